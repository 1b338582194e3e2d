"""Profiles: measurements of ops and stages on devices, in one SQLite file. No torch.

Every measurement records where it was made (:class:`MeasurementEnvironment`); measurements of other
devices are never used silently. :mod:`fxpart.profiling` writes profiles;
:mod:`fxpart.costmodels.profile_cost_model` reads them.
"""

from __future__ import annotations

import json
import os
import platform
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from fxpart.cluster.devices import CpuLoadImbalance
from fxpart.errors import FxpartError, error
from fxpart.files import from_json

FORMAT = 2
T = TypeVar("T")


class MeasurementEnvironment(
    msgspec.Struct, frozen=True, kw_only=True, order=True, omit_defaults=True
):
    """The environment of a measurement, for which it is valid.

    device: the model as in the cluster ("cpu", "h100-sxm"). chip: the hardware's own name, with
    cores for a CPU ("AMD EPYC x 2"). threads: of computation (0 on a GPU). torch: its version.
    quota: average number of cores that a container's CPU quota allowed; 0 where it throttled no
    thread. Seconds are processor time in any case, which increases with throttling.
    """

    device: str
    chip: str
    threads: int
    torch: str
    quota: float = 0.0

    @property
    def share(self) -> float:
        """Return the fraction of its threads' time that the quota allows, at most 1."""
        return min(1.0, self.quota / self.threads) if self.quota > 0 and self.threads > 0 else 1.0

    @property
    def processor(self) -> str:
        """Return the chip without the number of cores."""
        return self.chip.rpartition(_CORES)[0] or self.chip

    def describe(self) -> str:
        """Describe the setting: ``cpu (AMD EPYC x 2, threads: 1, torch 2.13.0)``."""
        threads = f", threads: {self.threads}" if self.threads else ""
        quota = f", limited to {self.quota:g} cores" if self.quota else ""
        return f"{self.device} ({self.chip}{threads}{quota}, torch {self.torch})"


_CORES = " x "  # between a processor's name and its cores


def chip() -> str:
    """Return this host's processor, with the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return f"{processor()}{_CORES}{len(affinity(0)) if affinity else os.cpu_count() or 1}"


def processor() -> str:
    """Return this host's processor as named by Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class TimeQuartiles(msgspec.Struct, frozen=True):
    """Seconds: the median of ``runs`` runs without outliers, and the lower and upper quartile."""

    seconds: float
    low: float
    high: float
    runs: int


TIMED = 2  # microbatches before each update of a stage that is measured whole, if available


class StageMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """One stage measured whole, alone on its device, per microbatch (optimizer: per update).

    An update follows ``microbatches`` microbatches, each with its own rows. rows: per microbatch.
    parts: predicted seconds of the stage by op class and direction ("matmul forward"), without
    calibration, so that factors can be fitted to the timings.
    """

    forward: TimeQuartiles
    backward: TimeQuartiles
    optimizer: TimeQuartiles
    rows: int
    label: str = ""
    parts: dict[str, float] = {}
    microbatches: int = TIMED


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Corrections of predictions made op by op, from measured stages, in one setting.

    factors: by op class and direction ("matmul forward", "pointwise backward", "optimizer"): time
    within a stage over time alone. action: overhead of the runtime per action in seconds; step:
    overhead per step. residuals: by stage label, (predicted with these factors, measured) seconds
    per microbatch.
    """

    factors: dict[str, float] = {}
    action: float = 0.0
    step: float = 0.0
    residuals: tuple[tuple[str, float, float], ...] = ()


class ContentionProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Contention between ranks of one host, in one setting, for one model.

    slowdown: factors on forward and backward while 1, 2, ... ranks compute. transfer: number of
    computing ranks that a transfer between two ranks of the host counts as, 0 to 2. wake: delay in
    seconds until a rank resumes after it has received something, while 1, 2, ... ranks compute,
    including itself. uneven: imbalance of the cores with more ranks than cores; None where there
    are several cores per rank. meet: additional seconds of a collective of 2, 3, ... ranks that
    come from computing, over one that follows another collective. baseline: bytes of a rank's
    process besides its tensors; overhead: fraction of the tensors' bytes that the allocator adds at
    the peak.
    """

    slowdown: tuple[float, ...] = ()
    transfer: float = 0.0
    wake: tuple[float, ...] = ()
    uneven: CpuLoadImbalance | None = None
    meet: tuple[float, ...] = ()
    baseline: int = 0
    overhead: float = 0.0


class TrialRun(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that was run for some steps on its devices.

    seconds: per step; turns: number of runs, separated in time (combined by
    :func:`fxpart.profiling.trial_rounds.summarize_rounds`). label: description of the plan; model:
    its fingerprint. predicted: its simulated step time. kind: the properties of similar plans
    (:func:`fxpart.planner.prediction.trial_correction.kind_of`). peaks, baselines: by rank, bytes
    of its process at its peak, and before the model was loaded. cpu: by rank, processor seconds per
    step.
    """

    seconds: TimeQuartiles
    label: str
    model: str
    predicted: float
    kind: tuple[int, ...] = ()
    peaks: tuple[int, ...] = ()
    baselines: tuple[int, ...] = ()
    cpu: tuple[float, ...] = ()
    turns: int = 1


class ProfileCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Record that a model's profile is complete, or as complete as the time allowed.

    ops, stages, trial runs: number of its own measurements. plan: description of the best plan;
    step_seconds: its step time. median_error, worst_error: of stages predicted from ops. left_out:
    measurements that did not fit into a ``budget`` of so many seconds.
    """

    ops: int
    stages: int
    trial_runs: int
    plan: str
    step_seconds: float
    median_error: float
    worst_error: float
    budget: float = 0.0
    left_out: tuple[str, ...] = ()

    def as_report_fields(self) -> dict[str, object]:
        """Return the fields of a report for a run that finds everything measured."""
        counts = {f"known_{name}": getattr(self, name) for name in ("ops", "stages", "trial_runs")}
        names = ("plan", "step_seconds", "median_error", "worst_error", "left_out")
        return {**counts, **{name: getattr(self, name) for name in names}}


# Names of tables in profile files; fixed, so that older profiles can be read.
_TABLES: dict[str, type[object]] = {
    "ops": TimeQuartiles,
    "stages": StageMeasurement,
    "calibrations": Calibration,
    "crowding": ContentionProfile,
    "rehearsals": TrialRun,
    "settled": ProfileCompletion,
}


class Profile:
    """Measurements by kind, setting and key; a context manager over one SQLite file.

    Kinds and their keys: "ops": :func:`fxpart.costmodels.profile_cost_model.op_key` + " forward"/"
    backward"; "stages": the digest of the stage's program and its microbatch's rows; "calibrations"
    and `crowding` (contention): the model's fingerprint, or "" for any model; `rehearsals` (trial
    runs): :func:`fxpart.planner.prediction.plan_digest.plan_key`; "settled" (completion): a digest
    of the request.
    """

    def __init__(self, path: str | Path, *, create: bool = False) -> None:
        """Open a profile; create: make it where it does not exist. Raises FXP405 otherwise."""
        self.path = Path(path)
        if not self.path.is_file() and (self.path.exists() or not create):
            why = (
                "the path is not a regular file" if self.path.exists() else "there is no such file"
            )
            raise _unreadable(self.path, why, "fxpart profile TARGET -o FILE")
        with self._safely():
            self._base = sqlite3.connect(self.path, timeout=30.0, isolation_level=None)
            self._prepare(create)

    @contextmanager
    def _safely(self) -> Iterator[None]:
        """Raise FXP405 for any error of the file."""
        try:
            yield
        except (sqlite3.Error, msgspec.MsgspecError, RecursionError, ValueError, TypeError) as why:
            fix = "use a file that fxpart profile wrote, or profile again"
            raise _unreadable(self.path, str(why), fix) from why

    def _prepare(self, create: bool) -> None:
        self._base.execute("PRAGMA trusted_schema = OFF")
        self._base.execute("PRAGMA cell_size_check = ON")
        (version,) = self._base.execute("PRAGMA user_version").fetchone()
        known = dict(self._base.execute("SELECT name, sql FROM sqlite_master").fetchall())
        if version == FORMAT and set(_TABLES) <= set(known):
            # A view or a trigger of that name could run other queries.
            other = [name for name, sql in known.items() if sql != _table_sql(name)]
            if not other:
                return
            why = f"its table {str(other[0])[:40]!r} differs from those of fxpart profile"
            raise _unreadable(self.path, why, "profile again into another file")
        if version or known or not create:
            why = f"the profile has format {version}, but this version reads format {FORMAT}"
            raise _unreadable(self.path, why, "profile again into another file")
        for kind in _TABLES:
            self._base.execute(_table_sql(kind))
        self._base.execute(f"PRAGMA user_version = {FORMAT}")

    def put(
        self,
        kind: str,
        setting: MeasurementEnvironment,
        values: Mapping[str, object],
        date: str = "",
    ) -> None:
        """Store measurements by key, replacing older ones, in one transaction. date: YYYY-MM-DD."""
        rows = [
            (_text(setting), key, msgspec.json.encode(value).decode(), date)
            for key, value in values.items()
        ]
        assert all(isinstance(value, _TABLES[kind]) for value in values.values()), "of its kind"
        with self._safely(), self._base:
            self._base.execute("BEGIN IMMEDIATE")
            self._base.executemany(f"INSERT OR REPLACE INTO {kind} VALUES (?, ?, ?, ?)", rows)

    def get(self, kind: str, setting: MeasurementEnvironment, of: type[T]) -> dict[str, T]:
        """Return all measurements of a kind in a setting, by key. ``of``: the kind's type."""
        assert _TABLES[kind] is of
        with self._safely():
            found = self._base.execute(
                f"SELECT key, value FROM {kind} WHERE setting = ? ORDER BY key", (_text(setting),)
            )
            return {str(key): from_json(value, of) for key, value in found}

    def settings(self) -> tuple[MeasurementEnvironment, ...]:
        """Return every setting with measurements, in order."""
        found: set[MeasurementEnvironment] = set()
        with self._safely():
            for kind in _TABLES:
                for (text,) in self._base.execute(f"SELECT DISTINCT setting FROM {kind}"):
                    found.add(from_json(text, MeasurementEnvironment))
        return tuple(sorted(found))

    def rows(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Yield all measurements as text: kind, setting, key, value, date."""
        with self._safely():
            rows = [
                (kind, *row)
                for kind in _TABLES
                for row in self._base.execute(f"SELECT * FROM {kind} ORDER BY setting, key")
            ]
        yield from rows

    def merge(self, other: Profile) -> int:
        """Merge another profile, later dates first; return the number of entries taken over."""
        merged = 0
        with self._safely(), self._base:
            self._base.execute("BEGIN IMMEDIATE")
            for kind, setting, key, value, date in other.rows():
                done = self._base.execute(
                    f"INSERT INTO {kind} VALUES (?, ?, ?, ?) ON CONFLICT (setting, key) DO UPDATE "
                    "SET value = excluded.value, date = excluded.date "
                    "WHERE excluded.date > date",
                    (setting, key, value, date),
                )
                merged += done.rowcount
        return merged

    def __enter__(self) -> Profile:
        """Return the profile itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file."""
        with closing(self._base):
            pass


def _table_sql(kind: str) -> str:
    """Return the SQL of the table of a kind; SQLite stores this text."""
    return (
        f"CREATE TABLE {kind} (setting TEXT, key TEXT, value TEXT, date TEXT, "
        "PRIMARY KEY (setting, key)) WITHOUT ROWID"
    )


def _text(setting: MeasurementEnvironment) -> str:
    """Return canonical JSON, so that equal settings are one row."""
    return json.dumps(msgspec.to_builtins(setting), sort_keys=True)


def _unreadable(path: Path, why: str, fix: str) -> FxpartError:
    return error("FXP405", where=str(path), why=why, fix=fix)
