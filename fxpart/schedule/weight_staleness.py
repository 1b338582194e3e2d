"""What a weight mode means for each stage of a stream, once the pipeline is full: for a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_copies import WeightCopies, count_weight_copies
from fxpart.schedule.weight_modes import WeightMode

Span = tuple[int, int]  # the least and the most


@dataclass(frozen=True)
class StageStaleness:
    """One stage of a full pipeline. Spans are over the microbatches of an update.

    in_flight: microbatches. staleness: updates between a forward and its backward. behind: updates
    that the version a forward starts from lacks at its backward. look_forward, look_backward:
    updates that each looks ahead. copies: of the stage's weights.
    """

    stage: int
    in_flight: int
    staleness: Span
    behind: Span
    look_forward: Span
    look_backward: Span
    copies: WeightCopies

    def as_dict(self) -> dict[str, object]:
        """As JSON takes it."""
        return asdict(self)


def compute_stage_staleness(
    mode: WeightMode, versions: WeightVersionCounters
) -> tuple[StageStaleness, ...]:
    """Each stage's; FXP109 where the mode needs more microbatches to an update."""
    found = []
    for stage, ahead in enumerate(versions.ahead):
        reads = [versions.read(mode, stage, m) for m in versions.period()]
        found.append(
            StageStaleness(
                stage,
                min(ahead, versions.every) if mode.flush else ahead,
                _span([read.staleness for read in reads]),
                _span([read.backward - read.version for read in reads]),
                _span([read.look_forward for read in reads]),
                _span([read.look_backward for read in reads]),
                count_weight_copies(mode, versions, stage),
            )
        )
    return tuple(found)


def _span(values: Sequence[int]) -> Span:
    return min(values), max(values)
