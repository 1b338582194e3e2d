"""Programs of all mesh ranks, from a graph and the first block of each stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace
from torch import fx

from fxpart.codegen.local_capture import build_local_capture, sharding_spec
from fxpart.codegen.mesh_programs.stage_meshes import check_stage_meshes, with_stage_ranks
from fxpart.codegen.module_emitter import emit
from fxpart.codegen.stage_split import StageGraph, split
from fxpart.codegen.totals_spec import weight_spec
from fxpart.compiler import PassManager
from fxpart.passes import all_passes
from fxpart.passes.objective import REPEAT_KEY, STEP_STATE_KEY
from fxpart.program.replicas import replicate_program
from fxpart.program.spec import ProgramSpec

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel
    from fxpart.codegen.mesh_programs.sharded_graph import ShardedGraph


@dataclass
class MeshRankPrograms:
    """Programs of all mesh ranks of a sharded graph, generated on demand.

    order: the block order in which ``starts`` counts; empty for the graph's order. transfer_dtype:
    of the program. in_blocks: stages whose blocks can be rerun one by one. rounds: of each stage's
    replicas (:func:`fxpart.program.replicas.replicate_stages`), empty without replicas.
    stage_ranks: number of ranks of each stage where these differ.
    """

    sharded: ShardedGraph
    captured: CapturedModel
    starts: tuple[int, ...]
    seed: int
    order: tuple[int, ...] = ()
    transfer_dtype: str = ""
    in_blocks: tuple[int, ...] = ()
    rounds: tuple[tuple[int, ...], ...] = ()
    stage_ranks: tuple[int, ...] = ()
    _graphs: dict[int, fx.GraphModule] = field(default_factory=dict)
    _made: dict[int, tuple[ProgramSpec, tuple[str, ...]]] = field(default_factory=dict)

    def graph(self, mesh_rank: int) -> fx.GraphModule:
        """Return the assigned graph of a mesh rank; ranks with equal shapes share it."""
        local = self.sharded.local(mesh_rank)
        if id(local) not in self._graphs:
            self._graphs[id(local)] = assign(local, self.starts, self.order)
        return self._graphs[id(local)]

    def program(self, mesh_rank: int) -> tuple[ProgramSpec, tuple[str, ...]]:
        """Return the stages as data and the source text of each."""
        graph = self.graph(mesh_rank)
        if id(graph) not in self._made:
            made = generate(
                graph, self.captured, self.seed, self.sharded, self.transfer_dtype, self.in_blocks
            )
            self._made[id(graph)] = replicate_program(*made, self.rounds) if self.rounds else made
            if self.stage_ranks:
                spec, sources = made
                check_stage_meshes(graph, spec, self.sharded.mesh, self.stage_ranks)
                spec = with_stage_ranks(spec, self.sharded.mesh, self.stage_ranks)
                self._made[id(graph)] = spec, sources
        return self._made[id(graph)]

    def with_replicas(self, rounds: Sequence[Sequence[int]]) -> MeshRankPrograms:
        """Return the programs with replicated stages."""
        return dataclasses.replace(self, rounds=tuple(map(tuple, rounds)), _made={})


def assign(
    graph: fx.GraphModule, starts: Sequence[int], order: Sequence[int] = ()
) -> fx.GraphModule:
    """Return the graph with stages assigned. starts: the first block of each, counted in ``order``.

    order: all blocks, stage by stage; empty for the graph's order.
    """
    options = f'starts="{",".join(map(str, starts))}"'
    if order:
        options += f',order="{",".join(map(str, order))}"'
    return PassManager(all_passes()).run(f"assign{{{options}}}", graph)


def generate(
    assigned: fx.GraphModule,
    captured: CapturedModel,
    seed: int,
    sharded: ShardedGraph | None = None,
    transfer_dtype: str = "",
    in_blocks: Collection[int] = (),
) -> tuple[ProgramSpec, tuple[str, ...]]:
    """Return the program's description and each stage's source text.

    in_blocks: stages whose blocks can be rerun one by one, for activation recomputation.
    """
    spec, stages = cut(assigned, captured, seed, sharded, transfer_dtype)
    return spec, tuple(emit(s, blocks=s.spec.index in in_blocks) for s in stages)


def cut(
    assigned: fx.GraphModule,
    captured: CapturedModel,
    seed: int,
    sharded: ShardedGraph | None,
    transfer_dtype: str = "",
    *,
    keep_outputs: bool = False,
) -> tuple[ProgramSpec, tuple[StageGraph, ...]]:
    """Split the graph into stages; ``sharded`` is given for a rank-local graph.

    keep_outputs: the stages also return the user's outputs.
    """
    spec, stages = _cut(assigned, captured, seed, sharded, keep_outputs)
    more = {
        "transfer_dtype": transfer_dtype,
        "weight": weight_spec(captured.graph),
        "repeat": captured.graph.meta.get(REPEAT_KEY, ("", "")),
        "step_state": captured.graph.meta.get(STEP_STATE_KEY, ()),
    }
    return replace(spec, **more), stages


def _cut(
    assigned: fx.GraphModule,
    captured: CapturedModel,
    seed: int,
    sharded: ShardedGraph | None,
    keep_outputs: bool,
) -> tuple[ProgramSpec, tuple[StageGraph, ...]]:
    if sharded is None:
        return split(assigned, captured, seed, keep_outputs=keep_outputs)
    zero, axis = (sharded.zero, sharded.zero_axis) if sharded.zero < 3 else (0, "")
    held = sharding_spec(captured, assigned, zero, axis)
    local = build_local_capture(captured, assigned)
    return split(assigned, local, seed, keep_outputs=keep_outputs, sharding=held)
