"""Which part of the model's state a rank of a plan holds, in bytes: enough to compare plans."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fxpart.plan.model import Plan, Stage

# An AdamW's two moments beside a parameter of four bytes; what compares plans is the ratio.
_PARAMETER, _SLOTS = 4.0, 8.0


@dataclass(frozen=True)
class StateShare:
    """A rank's part of the state.

    blocks: for each block (position in the plan's order) the bytes of its parameters and optimizer
    state, whole. parameters, slots: which part of each the rank holds, as [start, stop) of 1.
    """

    blocks: dict[int, float]
    parameters: tuple[float, float]
    slots: tuple[float, float]

    @property
    def bytes(self) -> float:
        """All that the rank holds."""
        return count_common_bytes(self, self)


def count_common_bytes(one: StateShare, other: StateShare) -> float:
    """Bytes that both hold: the blocks of both, and of these the parts of both."""
    whole = sum(size for block, size in one.blocks.items() if block in other.blocks)
    parameters = _overlap(one.parameters, other.parameters) * _PARAMETER
    slots = _overlap(one.slots, other.slots) * _SLOTS
    return whole * (parameters + slots) / (_PARAMETER + _SLOTS)


@lru_cache(maxsize=64)
def _of_stage(stage: Stage) -> dict[int, float]:
    """The stage's bytes, spread evenly over its blocks: a plan does not say more."""
    blocks = [block for first, last in stage.spans for block in range(first, last + 1)]
    each = stage.parameters * (_PARAMETER + _SLOTS) / len(blocks)
    # A block without parameters still has a place; less than a byte for all of them.
    return dict.fromkeys(blocks, each + 1e-6)


def shares_of(plan: Plan) -> list[StateShare]:
    """By rank what it holds: its stage's blocks, cut by its tensor-parallel and ZeRO places.

    Lanes are counted with the data-parallel axis major. ZeRO cuts the optimizer's state from
    level 1, parameters at level 3.
    """
    found: dict[int, StateShare] = {}
    for stage in plan.stages:
        blocks = _of_stage(stage)
        tensor, data = stage.tensor_parallel, stage.data_parallel
        for lane, rank in enumerate(stage.ranks):
            inner = (lane % tensor / tensor, (lane % tensor + 1) / tensor)
            replica = lane // tensor
            width = (inner[1] - inner[0]) / data
            cut = (inner[0] + replica * width, inner[0] + (replica + 1) * width)
            found[rank] = StateShare(
                blocks,
                cut if stage.zero == 3 else inner,
                cut if stage.zero >= 1 else inner,
            )
    return [found[rank] for rank in range(plan.world)]


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
