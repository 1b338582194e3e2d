"""Lower a graph with decided shardings to the rank-local graph of one mesh rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from fxpart.compiler.block_identity import identity
from fxpart.compiler.graph_edit import annotation
from fxpart.compiler.node_annotation import BLOCKS_KEY, MESH_KEY, WHOLE_KEY, Level
from fxpart.compiler.op_behavior import BEHAVIORS_KEY
from fxpart.errors import error

from .lowering.local_graph import LocalGraphBuilder
from .lowering.placement_requirements import analyse
from .mark_gradients import MarkGradientsPass


@dataclass(frozen=True)
class LowerPass:
    """Compute local shards of every value, with every reshard as explicit collectives.

    mesh_rank: the mesh rank; graphs of different ranks differ only if sharding is uneven.
    whole_outputs: return the user's outputs unsharded on every rank. Undecided placements and
    strategies count as replicated. The result's ``meta`` has the mesh, the mesh rank, and the
    pending gradient-reduction axes of each parameter; its state has local shapes on the meta
    device.
    """

    mesh_rank: str = "0"
    whole_outputs: bool = False
    name: ClassVar[str] = "lower"
    requires: ClassVar[Level] = Level.ANNOTATED
    ensures: ClassVar[Level] = Level.ANNOTATED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Return a new module; raise FXP109 for a rank outside the mesh."""
        mesh = graph_module.meta.get(MESH_KEY)
        if mesh is None:
            raise error("FXP900", where="pass lower", why="the graph has no mesh")
        mesh_rank = (
            int(self.mesh_rank) if self.mesh_rank.isascii() and self.mesh_rank.isdigit() else -1
        )
        if not 0 <= mesh_rank < mesh.size:
            raise error(
                "FXP109",
                where=f"pass lower, mesh_rank={self.mesh_rank!r}",
                why=f"the mesh {mesh} has {mesh.size} ranks",
                fix=f"use a number from 0 to {mesh.size - 1}",
            )
        demands = analyse(
            graph_module.graph, mesh, whole_outputs=self.whole_outputs,
            complete=graph_module.meta.get(WHOLE_KEY, {}),
        )  # fmt: skip
        result = MarkGradientsPass().run(
            LocalGraphBuilder(graph_module, demands, mesh_rank).build()
        )
        result.meta.pop(BEHAVIORS_KEY, None)
        blocks: dict[int, list[fx.Node]] = {}
        for node in result.graph.nodes:
            block = annotation(node).block
            if block is not None:
                blocks.setdefault(block, []).append(node)
        result.meta[BLOCKS_KEY] = tuple(
            replace(info, identity=identity(blocks.get(number, [])))
            for number, info in enumerate(graph_module.meta[BLOCKS_KEY])
        )
        return result
