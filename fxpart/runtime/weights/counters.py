"""Weight versions that a stage has read, for comparison with its schedule."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from fxpart.errors import FxpartError, error
from fxpart.schedule.weight_modes import MODES, WeightMode, list_unflushed_modes


class MicrobatchWeightUse(NamedTuple):
    """Weights of a microbatch: version of its forward, and updates before its forward and
    backward.
    """

    microbatch: int
    version: int
    forward: int
    backward: int


@dataclass(frozen=True)
class StageCounters:
    """Counters of one stage since the last flush; updates since the start.

    recent: weight use of the last ``RECENT`` microbatches with a backward, oldest first.
    """

    forwards: int
    backwards: int
    updates: int
    recent: tuple[MicrobatchWeightUse, ...]


RECENT = 256  # microbatches


def make_recent_log() -> deque[MicrobatchWeightUse]:
    """Return an empty log of recent microbatches."""
    return deque(maxlen=RECENT)


def make_schedule_mismatch_error(
    stage: int, microbatch: int, what: str, expected: int, found: int
) -> FxpartError:
    """Return the FXP900 error of a stage that deviates from its schedule."""
    return error(
        "FXP900",
        where=f"stage {stage}, microbatch {microbatch}",
        why=f"{what}: the schedule expects {expected}, but it is {found}",
        fix="",
    )


def make_compiled_stage_error(mode: WeightMode) -> FxpartError:
    """Return the error for a compiled stage whose backward reads other weights."""
    return error(
        "FXP109",
        where=f"weights={mode.name!r} of a stage made by torch.compile",
        why="the compiled backward recomputes activations from the weights that it reads; in this "
        "mode they differ from those of its forward",
        fix="do not compile the stage, or use a mode whose backward reads its forward's weights: "
        + ", ".join(n for n in list_unflushed_modes() if MODES[n].backward == "forward"),
    )
