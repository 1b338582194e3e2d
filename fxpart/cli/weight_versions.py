"""Weight versions of ``fxpart schedule show --weights``: staleness, prediction, copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from fxpart.schedule.spec import ASYNC, DEFAULT_SCHEDULE
from fxpart.schedule.weight_copies import WeightCopies, compute_stage_staleness
from fxpart.schedule.weight_modes import FLUSH

if TYPE_CHECKING:
    from fxpart.cli.schedule_source import ScheduleSource
    from fxpart.schedule.action import Schedule, StageEdge
    from fxpart.schedule.event_graph import Sends
    from fxpart.schedule.simulate import Transfer
    from fxpart.schedule.weight_copies import WeightCopies


_FULL = 4  # Updates that are timed once the pipeline is full.


@dataclass(frozen=True)
class UpdateTimes:
    """Seconds of an update: once the pipeline is full, and of 1F1B with a flush after each."""

    update_seconds: float
    flushed_seconds: float

    def as_dict(self) -> dict[str, object]:
        """Return the times as JSON values."""
        return asdict(self)

    def line(self) -> str:
        """Return the times as a line of text."""
        from fxpart import units

        text = f"  an update takes {units.seconds(self.update_seconds)} once the pipeline is full"
        if self.update_seconds:
            gain = self.flushed_seconds / self.update_seconds
            text += f", {units.seconds(self.flushed_seconds)} with a flush after each: {gain:.2f}x"
        return text


def pace(
    schedule: Schedule,
    source: ScheduleSource,
    edges: Sequence[StageEdge],
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Transfer | None,
    sends: Sends,
) -> UpdateTimes | None:
    """Return the update times of an asynchronous pipeline; None for synchronous modes."""
    from fxpart.schedule.make import make_unverified
    from fxpart.schedule.simulate import simulate
    from fxpart.schedule.weight_modes import weight_mode

    if source.weights is None or weight_mode(source.weights).flush:
        return None
    every, ranks = source.update(schedule), schedule.stage_rank

    def last(name: str, updates: int) -> float:
        made = make_unverified(
            name, ranks, updates * every, edges, forward=forward, backward=backward
        )  # fmt: skip
        return simulate(made, edges, forward, backward, transfer, sends=sends).step_seconds

    filled = -(-len(ranks) // every) + 1
    steady = last(ASYNC, filled + _FULL) - last(ASYNC, filled)
    return UpdateTimes(steady / _FULL, last(DEFAULT_SCHEDULE, 1))


def as_data(schedule: Schedule, source: ScheduleSource) -> dict[str, object]:
    """Return the table as data under "weights"; empty without a weight mode."""
    if source.weights in (None, FLUSH):
        return {}
    from fxpart.schedule.version_annotation import derive_version_counters
    from fxpart.schedule.weight_modes import weight_mode

    assert source.weights is not None, "checked above"
    every = source.update(schedule)
    versions = derive_version_counters(schedule, every)
    stages = [
        row.as_dict() for row in compute_stage_staleness(weight_mode(source.weights), versions)
    ]
    about = {"mode": source.weights, "every": every, "lag": versions.lag, "stages": stages}
    return {"weights": about}


def lines(schedule: Schedule, source: ScheduleSource) -> list[str]:
    """Return the table as text with a heading; empty for modes with flushes."""
    if source.weights in (None, FLUSH):
        return []
    from fxpart.report.table import table
    from fxpart.schedule.version_annotation import derive_version_counters
    from fxpart.schedule.weight_modes import weight_mode
    from fxpart.units import plural

    assert source.weights is not None, "checked above"
    every = source.update(schedule)
    versions = derive_version_counters(schedule, every)
    rows = [
        (
            str(row.stage), str(row.in_flight), _span(row.staleness), _span(row.behind),
            _span(row.look_forward), _span(row.look_backward), _copies(row.copies),
        )
        for row in compute_stage_staleness(weight_mode(source.weights), versions)
    ]  # fmt: skip
    heads = ("stage", "in flight", "staleness", "behind", "F ahead", "B ahead", "copies of weights")
    often = plural(every, "microbatch")
    return [
        "",
        f"{source.weights}, {often} per update; figures in updates, once the pipeline is full",
        *table(heads, ">>>>>><", rows),
    ]


def _span(values: tuple[int, int]) -> str:
    low, high = values
    return str(low) if low == high else f"{low}-{high}"


def _copies(found: WeightCopies) -> str:
    """Return the number of copies: 1, 4, 1 + 1 temporary, 1 + 1 update (mean or last)."""
    temporary = f" + {found.transient} temporary" if found.transient else ""
    return f"{found.kept}{temporary}" + (f" + {found.deltas} update" if found.deltas else "")
