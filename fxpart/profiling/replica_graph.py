"""One replica's graph: what a rank computes where all of a host share the batch and nothing else.

It is the cheapest graph of several ranks to make, and most of what it holds is in every other:
parts of losses and norms over a cut batch, and all ops on fewer rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import fx

from fxpart.errors import FxpartError
from fxpart.plan.constraint_table import DATA_AXIS
from fxpart.planner.request import with_mesh
from fxpart.planner.sharding_decision import ShardingAssumptions, shard_graph
from fxpart.pricing.stage_parallelism import StageParallelism
from fxpart.pricing.variants import BatchSplit, Sizes, captured_rows

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel
    from fxpart.planner.prepared_model import PreparedModel


@dataclass(frozen=True)
class ReplicaGraph:
    """The graph of the first of ``ranks`` ranks that share every batch. parts: as of Sharing."""

    graph: fx.GraphModule
    captured: CapturedModel
    ranks: int
    parts: Mapping[str, int]

    def sizes(self, microbatches: Sequence[int]) -> list[Sizes]:
        """Its sizes at microbatches of so many rows in all; those of equal shares once.

        First the shares of all its ranks, then the largest that a rank of two has: fewer ranks may
        share a batch, and what is known at one size alone cannot be priced well at others.
        """
        shares = dict.fromkeys(-(-rows // self.ranks) for rows in microbatches)
        shares[-(-max(microbatches) // 2)] = None
        return [Sizes(self.captured, BatchSplit(rows, 1), self.parts) for rows in shares]


def ranks_of(front: PreparedModel) -> int:
    """How many ranks of the first device's host can share the batch evenly; 1 where none may."""
    request, captured = front.request, front.captured
    devices = request.cluster.devices
    ranks = sum(device.host == devices[0].host for device in devices)
    rows = captured.batch_size if captured.symbolic else captured_rows(captured)
    batched = any(item.batch_dim is not None for item in captured.inputs)
    free = request.open or DATA_AXIS in request.mesh.names
    return ranks if free and batched and rows % ranks == 0 else 1


def replica(front: PreparedModel) -> ReplicaGraph | None:
    """The graph of one rank of the host's pure data-parallel mesh.

    None where a host has one device, the batch does not fall into equal parts, no mesh with a data
    axis may be chosen, or annotations forbid it.
    """
    ranks = ranks_of(front)
    if ranks == 1:
        return None
    request = with_mesh(front.request, f"{DATA_AXIS}={ranks}", 0)
    # What the cut of the batch leaves open is whole on every rank: nothing to search for.
    request = replace(request, constraints={**request.constraints, "placements": "annotated"})
    try:
        made = shard_graph(
            front.graph, front.captured, request, front.annotations, ShardingAssumptions(None, 1)
        )
        return ReplicaGraph(made.local(0), front.captured, ranks, StageParallelism.of(made).parts)
    except FxpartError:  # annotations over other axes, ops that no rule can cut
        return None
