"""A profile: what was measured of ops and stages on devices, in one SQLite file. No torch.

Every measurement says where it was made (:class:`MeasurementEnvironment`); nothing that was
measured elsewhere is used silently. :mod:`fxpart.profiling` fills profiles;
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
    """Where a measurement was made, and what it holds for.

    device: the model as the cluster says it ("cpu", "h100-sxm"). chip: the hardware's own name,
    with cores for a CPU ("AMD EPYC x 2"). threads: of computation (0 on a GPU). torch: its version.
    quota: cores that a container left the process on average; 0 where it held back none of its
    threads. Seconds are the processor's in any case, of which a process that is held back time and
    again needs more.
    """

    device: str
    chip: str
    threads: int
    torch: str
    quota: float = 0.0

    @property
    def share(self) -> float:
        """Of the time of its threads what the quota left, at most 1."""
        return min(1.0, self.quota / self.threads) if self.quota > 0 and self.threads > 0 else 1.0

    @property
    def processor(self) -> str:
        """The chip without the number of cores."""
        return self.chip.rpartition(_CORES)[0] or self.chip

    def words(self) -> str:
        """The setting for people: ``cpu (AMD EPYC x 2, threads: 1, torch 2.13.0)``."""
        threads = f", threads: {self.threads}" if self.threads else ""
        quota = f", held to {self.quota:g} cores" if self.quota else ""
        return f"{self.device} ({self.chip}{threads}{quota}, torch {self.torch})"


_CORES = " x "  # between a processor's name and its cores


def chip() -> str:
    """This host's processor, with the cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return f"{processor()}{_CORES}{len(affinity(0)) if affinity else os.cpu_count() or 1}"


def processor() -> str:
    """This host's processor as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class TimeQuartiles(msgspec.Struct, frozen=True):
    """Seconds: the median of ``runs`` runs without outliers, and its lower and upper quartile."""

    seconds: float
    low: float
    high: float
    runs: int


TIMED = 2  # microbatches before each update of a stage that is measured whole, if there are two


class StageMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """One stage measured whole, alone on its device, per microbatch (optimizer: an update).

    An update is after so many ``microbatches``, each with rows of its own. rows: of a microbatch.
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
    """What measured stages say about predictions made op by op, in one setting.

    factors: by op class and direction ("matmul forward", "pointwise backward", "optimizer"): how
    many times longer it takes within a stage than alone. action: seconds that the runtime needs for
    an action beside the computation itself; step: the same once a step. residuals: by stage label,
    (predicted with these factors, measured) seconds of a microbatch.
    """

    factors: dict[str, float] = {}
    action: float = 0.0
    step: float = 0.0
    residuals: tuple[tuple[str, float, float], ...] = ()


class ContentionProfile(msgspec.Struct, frozen=True, kw_only=True):
    """How ranks of one host slow each other down, in one setting, for one model.

    slowdown: how many times longer forward and backward take while 1, 2, ... ranks compute.
    transfer: how many computing ranks a transfer between two ranks of the host counts as, 0 to 2.
    wake: seconds by which a rank goes on later, once something has come for it, while 1, 2, ...
    ranks compute, itself included.
    uneven: how long cores are not all used where ranks are more; none where they have several each.
    meet: seconds by which a collective of 2, 3, ... ranks ends later where they come to it from
    computing than where one follows the other.
    baseline: bytes of a rank's process beside its tensors; overhead: the share of the tensors' own
    bytes by which it is larger at its peak than both together (the allocator).
    """

    slowdown: tuple[float, ...] = ()
    transfer: float = 0.0
    wake: tuple[float, ...] = ()
    uneven: CpuLoadImbalance | None = None
    meet: tuple[float, ...] = ()
    baseline: int = 0
    overhead: float = 0.0


class TrialRun(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that was run for some steps on the devices that it is for.

    seconds: of a step; turns: how often it was run, apart in time (what several say, says
    :func:`fxpart.profiling.trial_rounds.summarize_rounds`). label: the plan in words; model: its
    fingerprint. predicted: its simulated seconds, before. kind: what plans that are alike have in
    common (:func:`fxpart.planner.prediction.trial_correction.kind_of`). peaks, baselines: by rank,
    bytes of its process at its peak, and before it held the model. cpu: by rank, the processor's
    seconds of a step.
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
    """That a model has been profiled: nothing is left to measure, or nothing for want of time.

    ops, stages, trial runs: how many of its own there are. plan: the best, in words; step_seconds:
    of it. median_error, worst_error: of stages predicted from ops. left_out: what there was no time
    for in a ``budget`` of so many seconds.
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

    def told(self) -> dict[str, object]:
        """As a run that finds all of it says it."""
        counts = {f"known_{name}": getattr(self, name) for name in ("ops", "stages", "trial_runs")}
        rest = ("plan", "step_seconds", "median_error", "worst_error", "left_out")
        return {**counts, **{name: getattr(self, name) for name in rest}}


# Names of tables in profile files; they stay as they are, so that older profiles can be read.
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
    and "crowding": the model's fingerprint, or "" for any model; "rehearsals":
    :func:`fxpart.planner.prediction.plan_digest.plan_key`; "settled": a digest of what was asked.
    """

    def __init__(self, path: str | Path, *, create: bool = False) -> None:
        """Open a profile; create: make it where there is none. Raises FXP405 otherwise."""
        self.path = Path(path)
        if not self.path.is_file() and (self.path.exists() or not create):
            why = "it is not a regular file" if self.path.exists() else "there is no such file"
            raise _unreadable(self.path, why, "fxpart profile TARGET -o FILE")
        with self._safely():
            self._base = sqlite3.connect(self.path, timeout=30.0, isolation_level=None)
            self._prepare(create)

    @contextmanager
    def _safely(self) -> Iterator[None]:
        """Whatever is wrong with the file is FXP405."""
        try:
            yield
        except (sqlite3.Error, msgspec.MsgspecError, RecursionError, ValueError, TypeError) as why:
            fix = "give a file that fxpart profile wrote, or profile again"
            raise _unreadable(self.path, str(why), fix) from why

    def _prepare(self, create: bool) -> None:
        self._base.execute("PRAGMA trusted_schema = OFF")
        self._base.execute("PRAGMA cell_size_check = ON")
        (version,) = self._base.execute("PRAGMA user_version").fetchone()
        known = dict(self._base.execute("SELECT name, sql FROM sqlite_master").fetchall())
        if version == FORMAT and set(_TABLES) <= set(known):
            # A view or a trigger of that name could run queries of its own.
            other = [name for name, sql in known.items() if sql != _made(name)]
            if not other:
                return
            why = f"it holds {str(other[0])[:40]!r}, which is not as fxpart profile makes it"
            raise _unreadable(self.path, why, "profile again into another file")
        if version or known or not create:
            why = f"it has the format {version}, and this version reads {FORMAT}"
            raise _unreadable(self.path, why, "profile again into another file")
        for kind in _TABLES:
            self._base.execute(_made(kind))
        self._base.execute(f"PRAGMA user_version = {FORMAT}")

    def put(
        self,
        kind: str,
        setting: MeasurementEnvironment,
        values: Mapping[str, object],
        date: str = "",
    ) -> None:
        """Keep measurements by key, over older ones, in one transaction. date: YYYY-MM-DD."""
        rows = [
            (_text(setting), key, msgspec.json.encode(value).decode(), date)
            for key, value in values.items()
        ]
        assert all(isinstance(value, _TABLES[kind]) for value in values.values()), "of its kind"
        with self._safely(), self._base:
            self._base.execute("BEGIN IMMEDIATE")
            self._base.executemany(f"INSERT OR REPLACE INTO {kind} VALUES (?, ?, ?, ?)", rows)

    def get(self, kind: str, setting: MeasurementEnvironment, of: type[T]) -> dict[str, T]:
        """Everything of a kind in a setting, by key. ``of``: the kind's type."""
        assert _TABLES[kind] is of
        with self._safely():
            found = self._base.execute(
                f"SELECT key, value FROM {kind} WHERE setting = ? ORDER BY key", (_text(setting),)
            )
            return {str(key): from_json(value, of) for key, value in found}

    def settings(self) -> tuple[MeasurementEnvironment, ...]:
        """Every setting that something was measured in, in order."""
        found: set[MeasurementEnvironment] = set()
        with self._safely():
            for kind in _TABLES:
                for (text,) in self._base.execute(f"SELECT DISTINCT setting FROM {kind}"):
                    found.add(from_json(text, MeasurementEnvironment))
        return tuple(sorted(found))

    def rows(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Everything as text: kind, setting, key, value, date."""
        with self._safely():
            rows = [
                (kind, *row)
                for kind in _TABLES
                for row in self._base.execute(f"SELECT * FROM {kind} ORDER BY setting, key")
            ]
        yield from rows

    def merge(self, other: Profile) -> int:
        """Take another profile's measurements, the later date where both have one; how many."""
        taken = 0
        with self._safely(), self._base:
            self._base.execute("BEGIN IMMEDIATE")
            for kind, setting, key, value, date in other.rows():
                done = self._base.execute(
                    f"INSERT INTO {kind} VALUES (?, ?, ?, ?) ON CONFLICT (setting, key) DO UPDATE "
                    "SET value = excluded.value, date = excluded.date "
                    "WHERE excluded.date > date",
                    (setting, key, value, date),
                )
                taken += done.rowcount
        return taken

    def __enter__(self) -> Profile:
        """The profile itself."""
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


def _made(kind: str) -> str:
    """How the table of a kind is made; SQLite keeps this text."""
    return (
        f"CREATE TABLE {kind} (setting TEXT, key TEXT, value TEXT, date TEXT, "
        "PRIMARY KEY (setting, key)) WITHOUT ROWID"
    )


def _text(setting: MeasurementEnvironment) -> str:
    """Canonical, so that equal settings are one row."""
    return json.dumps(msgspec.to_builtins(setting), sort_keys=True)


def _unreadable(path: Path, why: str, fix: str) -> FxpartError:
    return error("FXP405", where=str(path), why=why, fix=fix)
