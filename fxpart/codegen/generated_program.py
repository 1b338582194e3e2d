"""The program that a plan describes: stages, mesh and replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx

from fxpart.checkpoint.signature import KeySource
from fxpart.codegen.materialization import constants_of
from fxpart.codegen.mesh_programs.microbatch_graph import divide_graph, divide_sharded_graph
from fxpart.codegen.mesh_programs.plan_placements import restore_sharding
from fxpart.codegen.mesh_programs.rank_programs import MeshRankPrograms, assign, generate
from fxpart.codegen.mesh_programs.sharded_graph import ShardedGraph
from fxpart.codegen.mesh_programs.stage_meshes import place_on_stages
from fxpart.codegen.program_archive import export
from fxpart.compiler.effects import state_written
from fxpart.errors import error
from fxpart.plan.model import (
    Plan,
    PlanModel,
)
from fxpart.plan.schedule import plan_schedule, recomputed
from fxpart.program.edges import find_stage_edges
from fxpart.program.replicas import get_replica_rounds, replicate_program
from fxpart.program.spec import ProgramSpec
from fxpart.schedule.action import Schedule
from fxpart.schedule.make import make

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel


@dataclass(frozen=True)
class StagedGraph:
    """The prepared graph with stages, for the plan's microbatches, from its first use on.

    starts: the first block of each stage, counted in ``order``.
    """

    captured: CapturedModel
    prepared: fx.GraphModule
    starts: tuple[int, ...]
    order: tuple[int, ...]
    microbatches: int

    @cached_property
    def graph(self) -> fx.GraphModule:
        """The graph of a single rank per stage."""
        assigned = assign(self.prepared, self.starts, self.order)
        return divide_graph(assigned, self.captured, self.microbatches)


@dataclass(frozen=True)
class GeneratedProgram:
    """Generated stage modules of one plan, and the graphs they come from."""

    captured: CapturedModel
    prepared: fx.GraphModule
    whole: StagedGraph
    spec: ProgramSpec
    sources: tuple[str, ...]
    mesh_rank_programs: MeshRankPrograms | None


def apply_plan(
    captured: CapturedModel, graph: fx.GraphModule, info: PlanModel, plan: Plan
) -> GeneratedProgram:
    """Generate the program of a plan; raise FXP304 if the plan belongs to another model."""
    check_model(plan, info)
    sharded = None if plan.sharding is None else restore_sharding(graph, captured, plan.sharding)
    if plan.replicas:
        starts = tuple(plan.stages[k].first for k in plan.firsts)
        again = tuple(n for n, k in enumerate(plan.firsts) if k in recomputed(plan))
    else:
        starts = tuple(first for first, _, _ in plan.program_stages)
        again = tuple(recomputed(plan))
    return replicate_program_stages(
        generate_program(
            captured,
            graph,
            sharded,
            starts,
            plan.seed,
            plan.order,
            plan.transfer_dtype,
            again,
            microbatches=plan.microbatches,
            stage_ranks=() if plan.replicas else tuple(len(stage.ranks) for stage in plan.stages),
        ),
        get_replica_rounds(plan),
    )


def check_model(plan: Plan, info: PlanModel) -> None:
    """Raise FXP304 if the plan belongs to another model."""
    if plan.model.fingerprint != info.fingerprint:
        raise error(
            "FXP304",
            where=f"plan for {plan.model.name}",
            why=describe_model_difference(plan.model, info),
            fix="create a new plan for this model: fxpart plan TARGET -o plan.json",
        )


def replicate_program_stages(
    parts: GeneratedProgram, rounds: Sequence[Sequence[int]]
) -> GeneratedProgram:
    """Replicate the stages of a program.

    See :func:`fxpart.program.replicas.replicate_stages`. Raises FXP109 where a replicated stage
    writes to its state.
    """
    if len(rounds) != len(parts.spec.stages):
        return parts
    spec, sources = replicate_program(parts.spec, parts.sources, rounds)
    if spec is parts.spec:
        return parts
    _check_written_state(parts, rounds)
    programs = parts.mesh_rank_programs
    return replace(
        parts,
        spec=spec,
        sources=sources,
        mesh_rank_programs=None if programs is None else programs.with_replicas(rounds),
    )


def _check_written_state(parts: GeneratedProgram, rounds: Sequence[Sequence[int]]) -> None:
    """Raise FXP109 where replicas would write to their copies of one tensor in forward passes."""
    replicated = {
        state.name
        for stage, turns in zip(parts.spec.stages, rounds, strict=True)
        for state in stage.state
        if len(set(turns)) > 1
    }
    written = {name for names in state_written(parts.prepared.graph).values() for name in names}
    if found := sorted(written & replicated):
        raise error(
            "FXP109",
            where=f"replicas of the stage with {', '.join(found[:3])}",
            why="forward passes write to this state, and each replica would write to its own copy "
            "in its own microbatches only",
            fix='use constraints={"copies": "none"}',
        )


def generate_program(
    captured: CapturedModel,
    graph: fx.GraphModule,
    sharded: ShardedGraph | None,
    starts: Sequence[int],
    seed: int,
    order: Sequence[int] = (),
    transfer_dtype: str = "",
    in_blocks: tuple[int, ...] = (),
    *,
    microbatches: int = 1,
    stage_ranks: tuple[int, ...] = (),
) -> GeneratedProgram:
    """Generate the stages and their source text from the first block of each stage.

    starts: in units of ``order``. transfer_dtype: dtype in which float32 values are sent between
    ranks, "" for unchanged. in_blocks: stages whose blocks can be rerun one by one for activation
    recomputation. microbatches: per step; with more than one, totals of the batch become inputs.
    stage_ranks: number of ranks of each stage, by default that of the mesh. Raises FXP303 where a
    stage shards its work over more ranks than it has.
    """
    whole = StagedGraph(captured, graph, tuple(starts), tuple(order), microbatches)
    mesh_rank_programs = None
    if len(set(stage_ranks)) < 2:
        stage_ranks = ()
    if sharded is not None:
        if stage_ranks:
            sharded = place_on_stages(sharded, stage_ranks, starts, order)
        mesh_rank_programs = MeshRankPrograms(
            divide_sharded_graph(sharded, captured, microbatches),
            captured,
            tuple(starts),
            seed,
            tuple(order),
            transfer_dtype,
            in_blocks,
            stage_ranks=stage_ranks,
        )
        spec, sources = mesh_rank_programs.program(0)
    else:
        spec, sources = generate(whole.graph, captured, seed, None, transfer_dtype, in_blocks)
    return GeneratedProgram(captured, graph, whole, spec, sources, mesh_rank_programs)


def make_schedule(spec: ProgramSpec, name: str, microbatches: int) -> Schedule:
    """Return the actions of every stage, including transfers."""
    return make(name, range(len(spec.stages)), microbatches, find_stage_edges(spec))


def write_program(
    plan: Plan, parts: GeneratedProgram, directory: str | Path, sign: KeySource = None
) -> tuple[Path, ...]:
    """Write plan, stage modules, actions and manifest to ``directory``; return the files.

    sign: a file with a secret key, which signs the manifest.
    """
    schedule = plan_schedule(plan)
    texts = ["\n".join(map(str, actions)) + "\n" for actions in schedule.ranks]
    by_rank = {rank: texts[s] for s, stage in enumerate(plan.stages) for rank in stage.ranks}
    mesh_ranks = range(1, max(len(stage.ranks) for stage in plan.stages))
    return export(
        directory,
        plan=plan.dumps(),
        spec=parts.spec,
        sources=parts.sources,
        actions=[by_rank[rank] for rank in sorted(by_rank)],
        constants=constants_of(parts.spec, parts.captured.state),
        mesh_ranks=[parts.mesh_rank_programs.program(index) for index in mesh_ranks]
        if parts.mesh_rank_programs
        else (),
        sign=sign,
    )


def fields_of(parts: GeneratedProgram) -> dict[str, Any]:
    """Return the fields by name."""
    return {name: getattr(parts, name) for name in parts.__dataclass_fields__}


def describe_model_difference(planned: PlanModel, found: PlanModel) -> str:
    """Return a text that lists the differences between the plan's model and the given one."""
    rows = [
        f"{field}: planned {getattr(planned, field)}, found {getattr(found, field)}"
        for field in ("name", "capture", "batch", "nodes", "blocks", "parameters", "inputs")
        if getattr(planned, field) != getattr(found, field)
    ]
    return "\n".join(rows) or "the same counts, but other operations, shapes or arguments"
