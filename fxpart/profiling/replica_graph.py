"""Build the graph of one rank if all ranks of a host are data-parallel replicas.

This is the cheapest graph of several ranks, and most of its ops occur in other sharded graphs:
losses and norms over a sharded batch, and all ops on fewer rows.
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
    """The graph of the first of ``ranks`` data-parallel ranks. parts: see StageParallelism."""

    graph: fx.GraphModule
    captured: CapturedModel
    ranks: int
    parts: Mapping[str, int]

    def sizes(self, microbatches: Sequence[int]) -> list[Sizes]:
        """Return the distinct local sizes for microbatches of so many rows in all.

        The size for two ranks follows those for all ranks, as fewer ranks may divide a batch, and
        costs at one size do not predict those at other sizes well.
        """
        shares = dict.fromkeys(-(-rows // self.ranks) for rows in microbatches)
        shares[-(-max(microbatches) // 2)] = None
        return [Sizes(self.captured, BatchSplit(rows, 1), self.parts) for rows in shares]


def ranks_of(front: PreparedModel) -> int:
    """Return how many ranks of the first device's host can divide the batch evenly, else 1."""
    request, captured = front.request, front.captured
    devices = request.cluster.devices
    ranks = sum(device.host == devices[0].host for device in devices)
    rows = captured.batch_size if captured.symbolic else captured_rows(captured)
    batched = any(item.batch_dim is not None for item in captured.inputs)
    free = request.open or DATA_AXIS in request.mesh.names
    return ranks if free and batched and rows % ranks == 0 else 1


def replica(front: PreparedModel) -> ReplicaGraph | None:
    """Return the graph of one rank of the host's data-parallel mesh.

    Return None if the host has one device, if the batch does not divide evenly, if constraints
    exclude a mesh with a data axis, or if annotations forbid it.
    """
    ranks = ranks_of(front)
    if ranks == 1:
        return None
    request = with_mesh(front.request, f"{DATA_AXIS}={ranks}", 0)
    # Everything but the batch is replicated, so there is nothing to search for.
    request = replace(request, constraints={**request.constraints, "placements": "annotated"})
    try:
        made = shard_graph(
            front.graph, front.captured, request, front.annotations, ShardingAssumptions(None, 1)
        )
        return ReplicaGraph(made.local(0), front.captured, ranks, StageParallelism.of(made).parts)
    except FxpartError:  # Annotations over other axes, or ops without a rule.
        return None
