"""Build the stages of a plan on devices of one kind for benchmarks.

Stages are identified by their code, so plans with equal stages share measurements.
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
    """Return the stages of the plan on devices of this kind; None if there are none.

    Of a stage with several ranks, the first mesh rank is measured. Stages are timed without
    recomputation, as the cost model expects. Raises FXP304 if the plan is for another model, and
    FXP105 for another batch size.
    """
    _check(front, plan)
    units = list(_units(plan))
    mine = frozenset(k for k, (_, _, stages) in enumerate(units) if _on(plan, stages, device))
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
    labels = tuple(f"{mark} {stages[0].label}{shared}" for _, _, stages in units)
    work = StageBenchmarkInput(parts.spec, parts.sources, plan.microbatches, labels, mine)
    return BenchmarkStages(work, spans)


def check_places(plans: Iterable[Plan], measured: Sequence[Device]) -> None:
    """Raise FXP305 if a plan has no stage on a device of a measured kind."""
    kinds = {kind(device) for device in measured}
    for plan in plans:
        devices = [plan.device(rank) for rank in range(plan.world)]
        if not any(kind(device) in kinds for device in devices):
            raise error(
                "FXP305",
                where=f"plan for {plan.cluster.name}: {_names(devices)}",
                why=f"it has no rank on a device of the measured kinds, {_names(measured)}",
                fix="pass --cluster with a device of the plan, and run on its machine; the first "
                "device is measured, under torchrun all of them",
            )


def _names(devices: Iterable[Device]) -> str:
    return ", ".join(sorted({named(device) for device in devices}))


def _check(front: PreparedModel, plan: Plan) -> None:
    """Raise an error if the plan is for another model or batch size."""
    check_model(plan, front.info)
    if plan.batch_size != front.captured.batch_size:
        raise error(
            "FXP105",
            where=f"plan for batches of {plan.batch_size}",
            why=f"the profiled batch has {front.captured.batch_size} rows",
            fix=f"pass --batch-size {plan.batch_size}, or use a plan for "
            f"{front.captured.batch_size} rows",
        )


def _units(plan: Plan) -> Iterator[tuple[int, int, list[Stage]]]:
    """Yield the compiled stages: first block, last block, and the replicas that run it."""
    if plan.replicas:
        groups = {group[0]: sorted(set(group)) for group in plan.replicas}
        for first in plan.firsts:
            stage = plan.stages[first]
            yield stage.first, stage.last, [plan.stages[k] for k in groups.get(first, [first])]
        return
    for first, last, index in plan.program_stages:
        yield first, last, [plan.stages[index]]


def _on(plan: Plan, stages: list[Stage], device: Device) -> bool:
    """Return whether a rank of these stages has a device of this kind."""
    ranks = [rank for stage in stages for rank in stage.ranks]
    return any(kind(plan.device(rank)) == kind(device) for rank in ranks)
