"""The stages that a plan puts on devices of one kind, ready to be timed.

Stages are told apart by their code, so a plan's are known to every plan that has the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fxpart.codegen.generated_program import check_model, generate_program
from fxpart.codegen.mesh_programs.plan_placements import restore_sharding
from fxpart.errors import error
from fxpart.plan.model import Plan, Stage
from fxpart.planner.prepared_model import PreparedModel
from fxpart.pricing.device_limits import named
from fxpart.profiling.candidates import BenchmarkStages
from fxpart.profiling.device_group import kind
from fxpart.profiling.stage_benchmark import StageBenchmarkInput

if TYPE_CHECKING:
    from fxpart.cluster.devices import Device


def work_of(front: PreparedModel, plan: Plan, device: Device) -> BenchmarkStages | None:
    """What the plan's ranks on devices like this one compute; None where it has none there.

    Of a stage of several ranks what its first lane does. Stages that recompute are timed as they
    are without it, which is what plans are priced by. Raises FXP304 where the plan is for another
    model, and FXP105 for another batch size.
    """
    _check(front, plan)
    units = list(_units(plan))
    mine = frozenset(k for k, (_, _, held) in enumerate(units) if _on(plan, held, device))
    if not mine:
        return None
    sharded = (
        None
        if plan.sharding is None
        else restore_sharding(front.graph, front.captured, plan.sharding)
    )
    starts = tuple(first for first, _, _ in units)
    parts = generate_program(
        front.captured, front.graph, sharded, starts, plan.seed, plan.order, plan.transfer_dtype
    )
    mark = front.info.fingerprint[:12]
    spans = tuple((first, last) for first, last, _ in units)
    shared = "" if plan.sharding is None else f" on {plan.sharding.mesh}"
    labels = tuple(f"{mark} {held[0].label}{shared}" for _, _, held in units)
    work = StageBenchmarkInput(parts.spec, parts.sources, plan.microbatches, labels, mine)
    return BenchmarkStages(work, spans)


def check_places(plans: Iterable[Plan], measured: Sequence[Device]) -> None:
    """Each plan puts something on a device like one that is measured; FXP305 otherwise."""
    kinds = {kind(device) for device in measured}
    for plan in plans:
        held = [plan.device(rank) for rank in range(plan.world)]
        if not any(kind(device) in kinds for device in held):
            raise error(
                "FXP305",
                where=f"plan for {plan.cluster.name}: {_names(held)}",
                why=f"it has no rank on a device like those that are measured, {_names(measured)}",
                fix="--cluster with a device of the plan, on its machine; the first one counts, or "
                "under torchrun all",
            )


def _names(devices: Iterable[Device]) -> str:
    return ", ".join(sorted({named(device) for device in devices}))


def _check(front: PreparedModel, plan: Plan) -> None:
    """It is this model's, and of the batch that was captured."""
    check_model(plan, front.info)
    if plan.batch_size != front.captured.batch_size:
        raise error(
            "FXP105",
            where=f"plan for batches of {plan.batch_size}",
            why=f"what is profiled has {front.captured.batch_size} rows",
            fix=f"--batch-size {plan.batch_size}, or a plan for {front.captured.batch_size} rows",
        )


def _units(plan: Plan) -> Iterator[tuple[int, int, list[Stage]]]:
    """What is compiled: first block, last block, and the stages that run it, as copies do."""
    if plan.replicas:
        groups = {group[0]: sorted(set(group)) for group in plan.replicas}
        for first in plan.firsts:
            stage = plan.stages[first]
            yield stage.first, stage.last, [plan.stages[k] for k in groups.get(first, [first])]
        return
    for first, last, index in plan.program_stages:
        yield first, last, [plan.stages[index]]


def _on(plan: Plan, stages: list[Stage], device: Device) -> bool:
    """Whether a rank of these stages has a device like this one."""
    ranks = [rank for stage in stages for rank in stage.ranks]
    return any(kind(plan.device(rank)) == kind(device) for rank in ranks)
