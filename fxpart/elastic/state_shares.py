"""Estimated bytes of model state stored by each rank of a plan, to compare plans."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fxpart.plan.model import Plan, Stage

# AdamW's two moments beside a four-byte parameter; only the ratio matters.
_PARAMETER, _SLOTS = 4.0, 8.0


@dataclass(frozen=True)
class StateShare:
    """A rank's part of the state.

    blocks: bytes of the unsharded parameters and optimizer state by block (position in the plan's
    order). parameters, slots: stored range of each block's parameters and optimizer state, as
    fractions [start, stop).
    """

    blocks: dict[int, float]
    parameters: tuple[float, float]
    slots: tuple[float, float]

    @property
    def bytes(self) -> float:
        """Bytes stored by the rank."""
        return count_common_bytes(self, self)


def count_common_bytes(one: StateShare, other: StateShare) -> float:
    """Return the bytes that both store."""
    whole = sum(size for block, size in one.blocks.items() if block in other.blocks)
    parameters = _overlap(one.parameters, other.parameters) * _PARAMETER
    slots = _overlap(one.slots, other.slots) * _SLOTS
    return whole * (parameters + slots) / (_PARAMETER + _SLOTS)


@lru_cache(maxsize=64)
def _spread_over_blocks(stage: Stage) -> dict[int, float]:
    """Return the stage's bytes by block, spread evenly: a plan has no more detail."""
    blocks = [block for first, last in stage.spans for block in range(first, last + 1)]
    each = stage.parameters * (_PARAMETER + _SLOTS) / len(blocks)
    # A block without parameters still has a placement, less than a byte in total.
    return dict.fromkeys(blocks, each + 1e-6)


def shares_of(plan: Plan) -> list[StateShare]:
    """Return each rank's share: blocks of its stage, sharded by tensor parallelism and ZeRO.

    Mesh ranks are ordered with the data-parallel axis major. ZeRO shards optimizer state from level
    1, parameters at level 3, over consecutive replicas under hybrid sharding.
    """
    found: dict[int, StateShare] = {}
    for stage in plan.stages:
        blocks = _spread_over_blocks(stage)
        tensor, shards = stage.tensor_parallel, stage.shard_degree or stage.data_parallel
        for mesh_rank, rank in enumerate(stage.ranks):
            tensor_range = (mesh_rank % tensor / tensor, (mesh_rank % tensor + 1) / tensor)
            place = mesh_rank // tensor % shards
            width = (tensor_range[1] - tensor_range[0]) / shards
            sharded = (tensor_range[0] + place * width, tensor_range[0] + (place + 1) * width)
            found[rank] = StateShare(
                blocks,
                sharded if stage.zero == 3 else tensor_range,
                sharded if stage.zero >= 1 else tensor_range,
            )
    return [found[rank] for rank in range(plan.world)]


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
