"""The program that a plan describes: what follows from its cuts, its mesh and its copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx

from fxpart.codegen.export import export
from fxpart.codegen.materialise import constants_of
from fxpart.errors import error
from fxpart.plan import Plan, PlanModel
from fxpart.planned.scheduled import plan_schedule, recomputed
from fxpart.planning import difference
from fxpart.program import ProgramSpec
from fxpart.runtime.links import edges
from fxpart.runtime.replicas import original, replicated, rounds_of
from fxpart.schedule.action import Schedule
from fxpart.schedule.make import make
from fxpart.sharded.divided import divided, divided_lanes
from fxpart.sharded.graphs import Sharded
from fxpart.sharded.programs import Lanes, assign, generate
from fxpart.sharded.record import restore

if TYPE_CHECKING:
    from fxpart.capture import Captured


@dataclass(frozen=True)
class Parts:
    """The fields of a program that follow from its cuts and its mesh."""

    captured: Captured
    prepared: fx.GraphModule
    graph: fx.GraphModule
    spec: ProgramSpec
    sources: tuple[str, ...]
    lanes: Lanes | None


def apply_plan(captured: Captured, graph: fx.GraphModule, info: PlanModel, plan: Plan) -> Parts:
    """Make the program that a given plan describes; FXP304 where it is another model's."""
    check_model(plan, info)
    sharded = None if plan.sharding is None else restore(graph, captured, plan.sharding)
    if plan.replicas:
        starts = tuple(plan.stages[k].first for k in plan.firsts)
        again = tuple(n for n, k in enumerate(plan.firsts) if k in recomputed(plan))
    else:
        starts = tuple(first for first, _, _ in plan.program_stages)
        again = tuple(recomputed(plan))
    return copied(
        make_parts(
            captured,
            graph,
            sharded,
            starts,
            plan.seed,
            plan.order,
            plan.transfer_dtype,
            again,
            microbatches=plan.microbatches,
        ),
        rounds_of(plan),
    )


def check_model(plan: Plan, info: PlanModel) -> None:
    """Raises FXP304 where the plan is another model's."""
    if plan.model.fingerprint != info.fingerprint:
        raise error(
            "FXP304",
            where=f"plan for {plan.model.name}",
            why=difference(plan.model, info),
            fix="plan again for this model: fxpart plan TARGET -o plan.json",
        )


def copied(parts: Parts, rounds: Sequence[Sequence[int]]) -> Parts:
    """The same with copies of its stages (:func:`fxpart.runtime.replicas.replicated`)."""
    spec = replicated(parts.spec, rounds) if len(rounds) == len(parts.spec.stages) else parts.spec
    if spec is parts.spec:
        return parts
    sources = [parts.sources[original(spec, stage)] for stage in range(len(spec.stages))]
    return replace(parts, spec=spec, sources=tuple(sources))


def make_parts(
    captured: Captured,
    graph: fx.GraphModule,
    sharded: Sharded | None,
    starts: Sequence[int],
    seed: int,
    order: Sequence[int] = (),
    transfer_dtype: str = "",
    in_blocks: tuple[int, ...] = (),
    *,
    microbatches: int = 1,
) -> Parts:
    """Stages and their text from the first block of each, counted in ``order``.

    transfer_dtype: in which float32 values go from rank to rank, "" as they are. in_blocks: stages
    whose blocks can run again by themselves, to recompute activations. microbatches: of a step;
    with several, totals of the batch become inputs.
    """
    assigned = divided(assign(graph, starts, order), captured, microbatches)
    lanes = None
    if sharded is not None:
        lanes = Lanes(
            divided_lanes(sharded, captured, microbatches),
            captured,
            tuple(starts),
            seed,
            tuple(order),
            transfer_dtype,
            in_blocks,
        )
        spec, sources = lanes.program(0)
    else:
        spec, sources = generate(assigned, captured, seed, None, transfer_dtype, in_blocks)
    return Parts(captured, graph, assigned, spec, sources, lanes)


def make_schedule(spec: ProgramSpec, name: str, microbatches: int) -> Schedule:
    """Every stage's actions with transfers."""
    return make(name, range(len(spec.stages)), microbatches, edges(spec))


def write(plan: Plan, parts: Parts, directory: str | Path) -> tuple[Path, ...]:
    """Write plan, stage modules, actions and manifest to ``directory``; the files written."""
    schedule = plan_schedule(plan)
    texts = ["\n".join(map(str, actions)) + "\n" for actions in schedule.ranks]
    by_rank = {rank: texts[s] for s, stage in enumerate(plan.stages) for rank in stage.ranks}
    lanes = range(1, len(plan.stages[0].ranks))
    return export(
        directory,
        plan=plan.dumps(),
        spec=parts.spec,
        sources=parts.sources,
        actions=[by_rank[rank] for rank in sorted(by_rank)],
        constants=constants_of(parts.spec, parts.captured.state),
        lanes=[parts.lanes.program(index) for index in lanes] if parts.lanes else (),
    )


def fields_of(parts: Parts) -> dict[str, Any]:
    """The parts by name."""
    return {name: getattr(parts, name) for name in parts.__dataclass_fields__}
