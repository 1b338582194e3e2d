"""The staleness penalty: steps to a target loss of asynchronous training, measured by emulation.

An asynchronous pipeline takes shorter steps but, with stale weights, more of them. The penalty has
the ratio of its steps to those of synchronous training, by weight mode and delay. The planner
multiplies the predicted step time by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from fxpart.errors import FxpartError, Problem, error
from fxpart.files import check_unique_keys, from_json, read_bytes
from fxpart.schedule.versions import WeightVersionCounters, count_chain_warmup
from fxpart.schedule.weight_modes import MODES, weight_mode

MOST_STAGES = 1024
_MOST_MICROBATCHES = 1 << 16
_MAX_BYTES = 16 << 20
_NEAR = 1e-9  # equal delays
_FIX = "measure it with `fxpart emulate TARGET --target-loss LOSS --penalty FILE`"

OptimizerOptions: TypeAlias = dict[str, bool | float | tuple[float, ...]]
Interval: TypeAlias = tuple[float, float]


class _PenaltyStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, and strict about fields."""


class MeasuredDelay(_PenaltyStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps to the target loss with one weight mode at one delay.

    stages, microbatches: of the emulated pipeline; a minibatch has so many microbatches and makes
    an update. delay: mean number of updates that its computations miss, over stages and
    microbatches; it follows from the other fields. steps: by seed, None if the target was not
    reached. relative_steps: geometric mean over seeds of the steps divided by the synchronous
    steps; None unless all seeds reached the target. interval: its 95 % confidence interval; None
    with one seed, and if all seeds have the same synchronous losses. optimizer, options: where they
    differ from those of the other runs, because the weight mode prescribes them.
    """

    weights: str
    stages: int
    microbatches: int
    relative_steps: float | None
    interval: Interval | None = None
    delay: float | None = None
    steps: tuple[int | None, ...] = ()
    optimizer: str = ""
    options: OptimizerOptions = {}


class StalenessPenalty(_PenaltyStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured steps to a target loss, relative to synchronous training.

    optimizer: its name in lowercase. options: such as the learning rate; empty: unknown.
    batch_size: of a minibatch. target_loss: reached after the first update where the mean loss of
    the last ``window`` updates is at most this. limit: updates of each run. model, parameters: name
    and number of parameters of the emulated model. sync_steps: of synchronous training, by seed.
    """

    format: Literal["fxpart-staleness-penalty"] = "fxpart-staleness-penalty"
    version: Literal[1] = 1
    optimizer: str
    options: OptimizerOptions = {}
    batch_size: int
    target_loss: float
    window: int = 1
    limit: int = 0
    model: str = ""
    parameters: int = 0
    seeds: tuple[int, ...] = ()
    sync_steps: tuple[int, ...] = ()
    measured: tuple[MeasuredDelay, ...]

    @staticmethod
    def load(given: str | Path | Mapping[str, Any] | StalenessPenalty) -> StalenessPenalty:
        """Return the checked penalty of a file, of its JSON text, or of its fields.

        Raises FXP109 with all problems.
        """
        if isinstance(given, str) and given.lstrip().startswith("{"):
            return _decode(given.encode(), "staleness_penalty")
        if isinstance(given, str | Path):
            try:
                data = read_bytes(given, _MAX_BYTES)
            except OSError as cause:
                raise _error(f"staleness_penalty={given}", cause.strerror or str(cause)) from cause
            return _decode(data, f"staleness_penalty={given}")
        where = "staleness_penalty"
        try:
            found = msgspec.convert(given, StalenessPenalty)
        except msgspec.ValidationError as cause:
            raise _error(where, str(cause)) from cause
        return _checked(found, where)

    def dump(self, path: str | Path) -> None:
        """Write the penalty as JSON; FXP603 if that fails."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"
        try:
            Path(path).write_text(text, encoding="utf-8", newline="\n")
        except OSError as cause:
            why = cause.strerror or str(cause)
            raise error("FXP603", where=str(path), why=why, fix="give a writable path") from cause

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @property
    def modes(self) -> tuple[str, ...]:
        """Return the measured weight modes."""
        return tuple(dict.fromkeys(row.weights for row in self.measured))

    def get_optimizer(self, weights: str) -> tuple[str, OptimizerOptions]:
        """Return name and options of the optimizer with which a weight mode was measured."""
        for row in self.measured:
            if row.weights == weights and row.optimizer:
                return row.optimizer, row.options
        return self.optimizer, self.options

    def find_relative_steps(
        self, weights: str, stages: int, microbatches: int
    ) -> RelativeSteps | str:
        """Return the relative steps of an asynchronous pipeline, or why they are not known.

        A pipeline with the same numbers of stages and microbatches is used as measured. Otherwise
        the logarithm of the relative steps is interpolated linearly between the nearest measured
        delays of the same weight mode; synchronous training has the delay 0. Nothing is
        extrapolated beyond the largest delay, or to one at which the target was not reached.
        """
        delay = compute_delay(weights, stages, microbatches)
        rows = [row for row in self.measured if row.weights == weights]
        for row in rows:
            if (row.stages, row.microbatches) == (stages, microbatches):
                if row.relative_steps is None:
                    return "the target loss was not reached"
                return RelativeSteps(row.relative_steps, row.interval, "measured", delay)
        points: dict[float, list[MeasuredDelay]] = {}
        for row in rows:
            points.setdefault(round(_delay_of(row), 9), []).append(row)
        below = max((d for d in points if d <= delay + _NEAR), default=0.0)
        above = min((d for d in points if d >= delay - _NEAR), default=None)
        if above is None:
            most = max(points, default=0.0)
            return f"the delay of {delay:.3g} updates is above the largest measured, {most:.3g}"
        left, right = _mean_logs(points.get(below, [_SYNC])), _mean_logs(points[above])
        if left is None or right is None:
            return f"at a delay near {delay:.3g} updates the target loss was not reached"
        part = 0.0 if above - below <= _NEAR else (delay - below) / (above - below)
        value, low, high = (
            None if a is None or b is None else math.exp(a + part * (b - a))
            for a, b in zip(left, right, strict=True)
        )
        assert value is not None, "only the interval may be unknown"
        interval = None if low is None or high is None else (low, high)
        return RelativeSteps(value, interval, "interpolated", delay)


_SYNC = MeasuredDelay(
    weights="", stages=1, microbatches=1, relative_steps=1.0, interval=(1.0, 1.0), delay=0.0
)


@dataclass(frozen=True)
class RelativeSteps:
    """Steps to the target loss divided by those of synchronous training; see StalenessPenalty."""

    value: float
    interval: Interval | None
    source: Literal["measured", "interpolated"]
    delay: float


class ModeCandidate(_PenaltyStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One execution mode and number of stages that was compared by time to the target loss.

    mode: "sync", or the asynchronous execution mode. step_seconds: the predicted step time.
    relative_steps, interval, source, delay: as of :class:`RelativeSteps`. seconds: step_seconds
    times relative_steps. why: why it has no seconds, "" if it has.
    """

    mode: str
    weights: str
    stages: int
    microbatches: int
    step_seconds: float | None = None
    relative_steps: float | None = None
    interval: Interval | None = None
    source: Literal["", "measured", "interpolated"] = ""
    delay: float = 0.0
    seconds: float | None = None
    why: str = ""


def compute_delay(weights: str, stages: int, microbatches: int) -> float:
    """Return the mean number of updates that a chain of stages misses in a weight mode.

    (K - 1) / (2 m) where a forward reads the newest weights of its own stage.
    """
    versions = WeightVersionCounters(count_chain_warmup(stages), microbatches)
    return versions.mean_delay(weight_mode(weights))


def _delay_of(row: MeasuredDelay) -> float:
    return compute_delay(row.weights, row.stages, row.microbatches)


def _mean_logs(
    rows: list[MeasuredDelay],
) -> tuple[float, float | None, float | None] | None:
    """Return the mean logarithms of relative steps and of the ends of their interval."""
    values = [row.relative_steps for row in rows]
    if any(value is None for value in values):
        return None
    ends = [row.interval for row in rows if row.interval is not None]
    whole = len(ends) == len(rows)
    return (
        math.fsum(math.log(value) for value in values if value is not None) / len(rows),
        math.fsum(math.log(low) for low, _ in ends) / len(rows) if whole else None,
        math.fsum(math.log(high) for _, high in ends) / len(rows) if whole else None,
    )


def _decode(data: bytes, where: str) -> StalenessPenalty:
    try:
        check_unique_keys(data)
        found = from_json(data, StalenessPenalty)
    except (ValueError, RecursionError, msgspec.MsgspecError) as cause:
        raise _error(where, str(cause) or type(cause).__name__) from cause
    return _checked(found, where)


def _checked(found: StalenessPenalty, where: str) -> StalenessPenalty:
    """Return the penalty; raises FXP109 with all problems of its numbers."""
    problems = [Problem("FXP109", f"{where}, {at}", why, _FIX) for at, why in _problems(found)]
    if problems:
        raise FxpartError(problems)
    return found


def _problems(found: StalenessPenalty) -> Iterator[tuple[str, str]]:
    if not found.optimizer:
        yield "optimizer", "the name is empty"
    if found.batch_size < 1:
        yield "batch_size", f"{found.batch_size} is not a positive number of samples"
    if not math.isfinite(found.target_loss):
        yield "target_loss", f"{found.target_loss} is not finite"
    if not found.measured:
        yield "measured", "no delay was measured"
    seen: set[tuple[str, int, int]] = set()
    for index, row in enumerate(found.measured):
        at = f"measured[{index}]"
        if row.weights not in MODES or MODES[row.weights].flush:
            known = ", ".join(name for name, mode in MODES.items() if not mode.flush)
            yield f"{at}.weights", f"{row.weights!r} is not one of {known}"
            continue
        if not 2 <= row.stages <= MOST_STAGES:
            yield f"{at}.stages", f"{row.stages} is not a number from 2 to {MOST_STAGES}"
            continue
        if not 1 <= row.microbatches <= _MOST_MICROBATCHES:
            limit = f"from 1 to {_MOST_MICROBATCHES}"
            yield f"{at}.microbatches", f"{row.microbatches} is not a number {limit}"
            continue
        value, interval = row.relative_steps, row.interval
        if value is not None and not (math.isfinite(value) and value > 0):
            yield f"{at}.relative_steps", f"{value} is not a finite number above 0"
        if interval is not None and (
            value is None or not 0 < interval[0] <= value <= interval[1] < math.inf
        ):
            yield f"{at}.interval", f"{list(interval)} does not contain relative_steps, {value}"
        if row.delay is not None and abs(row.delay - _delay_of(row)) > 1e-6:
            yield f"{at}.delay", f"{row.delay} should be {_delay_of(row):.6g}"
        key = row.weights, row.stages, row.microbatches
        if key in seen:
            yield at, f"{row.weights}, {row.stages} stages, {row.microbatches} occurs twice"
        seen.add(key)


def _error(where: str, why: str) -> FxpartError:
    return error("FXP109", where=where, why=why, fix=_FIX)
