"""What ``fxpart schedule show --weights`` says of each stage: staleness, look ahead, copies."""

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


_FULL = 4  # updates that are timed once the pipeline is full


@dataclass(frozen=True)
class UpdateTimes:
    """Seconds of an update: once the stream is full, and of 1F1B with a flush after each."""

    update_seconds: float
    flushed_seconds: float

    def as_dict(self) -> dict[str, object]:
        """As JSON takes it."""
        return asdict(self)

    def line(self) -> str:
        """For a person."""
        from fxpart import units

        said = f"  an update takes {units.seconds(self.update_seconds)} once the pipeline is full"
        if self.update_seconds:
            gain = self.flushed_seconds / self.update_seconds
            said += f", {units.seconds(self.flushed_seconds)} with a flush after each: {gain:.2f}x"
        return said


def pace(
    schedule: Schedule,
    source: ScheduleSource,
    edges: Sequence[StageEdge],
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Transfer | None,
    sends: Sends,
) -> UpdateTimes | None:
    """How fast a stream updates, by costs of each stage; None where there is none."""
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
    """The table for a machine: under "weights", and nothing where no mode is asked for."""
    if source.weights in (None, FLUSH):
        return {}
    from fxpart.schedule.version_annotation import derive_version_counters
    from fxpart.schedule.weight_modes import weight_mode

    assert source.weights is not None, "asked above"
    every = source.update(schedule)
    versions = derive_version_counters(schedule, every)
    stages = [
        row.as_dict() for row in compute_stage_staleness(weight_mode(source.weights), versions)
    ]
    about = {"mode": source.weights, "every": every, "lag": versions.lag, "stages": stages}
    return {"weights": about}


def lines(schedule: Schedule, source: ScheduleSource) -> list[str]:
    """The table for a person, under a line that says what it is of; nothing to say of a flush."""
    if source.weights in (None, FLUSH):
        return []
    from fxpart.report.table import table
    from fxpart.schedule.version_annotation import derive_version_counters
    from fxpart.schedule.weight_modes import weight_mode
    from fxpart.units import plural

    assert source.weights is not None, "asked above"
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
        f"{source.weights}, {often} to an update; figures in updates, once the pipeline is full",
        *table(heads, ">>>>>><", rows),
    ]


def _span(values: tuple[int, int]) -> str:
    low, high = values
    return str(low) if low == high else f"{low}-{high}"


def _copies(found: WeightCopies) -> str:
    """1, 4, 1 + 1 for a moment, 1 + 1 mean."""
    moment = f" + {found.transient} for a moment" if found.transient else ""
    return f"{found.kept}{moment}" + (f" + {found.deltas} mean update" if found.deltas else "")
