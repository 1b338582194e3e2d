"""Price an annotated graph on a cluster for every stage option: the joint problem.

Blocks with equal costs are priced once. With one rank per replica the costs are those of
:func:`fxpart.pricing.partition.price` at the same microbatch size; d replicas compute ceil(batch /
(m * d)) rows each. Gradient accumulation is counted wherever a replica's microbatch is not the
whole batch, because a ``Work`` knows its rows and not m.

Dominated choices are left out: ZeRO 1 where 2 is allowed (equal time, less memory), levels above
the lowest for one replica, recompute modes that free nothing, tensor degrees that shard nothing,
options with which not even one block fits on a device, and microbatches of which one block alone
exceeds it (the smallest size is always kept).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import fx

from fxpart import costmodels
from fxpart.compat.optimizer_choice import choose
from fxpart.compiler import BLOCKS_KEY, NO_CUT_KEY
from fxpart.errors import error
from fxpart.plan.offload import Offload
from fxpart.pricing.device_limits import RESERVE
from fxpart.pricing.host_offload import HostOffload
from fxpart.pricing.joint_device_pools import ReplicaCollectiveTimes, device_pools
from fxpart.pricing.joint_layouts import ModelBlocks, ModelLayouts, SequencePlacements
from fxpart.pricing.joint_microbatch_costs import MicrobatchCosts
from fxpart.pricing.joint_microbatches import MicrobatchRows
from fxpart.pricing.joint_options import StageOptionEnumerator
from fxpart.pricing.joint_space import SearchSpace
from fxpart.pricing.memory import crossing
from fxpart.pricing.non_op_costs import NonOpCosts
from fxpart.schedule.spec import DEFAULT_SCHEDULE, list_closed_forms
from fxpart.schedule.weight_modes import STASH
from fxpart.solver.joint.problem import JointProblem, StageBoundary

if TYPE_CHECKING:
    from fxpart.capture.captured_model import CapturedModel
    from fxpart.cluster.model import Cluster
    from fxpart.costs import CostModel


def joint_problem(
    graph: fx.GraphModule,
    captured: CapturedModel,
    cluster: Cluster,
    *,
    cost_model: str | CostModel = "auto",
    batch_size: int,
    microbatches: int | None = None,
    optimizer: object = "adamw",
    schedules: Sequence[str] = (DEFAULT_SCHEDULE,),
    weights: str = STASH,
    space: SearchSpace | None = None,
    transfer_dtype: str = "",
    sequences: SequencePlacements | None = None,
    offloads: Sequence[Offload] = ("none",),
) -> tuple[JointProblem, dict[str, str]]:
    """Return the joint problem of an annotated graph on a cluster, and the sources of its costs.

    graph: with blocks and saved tensors (level ANNOTATED), of a single process: not sharded.
    batch_size: rows per step. microbatches: a number, or None to let the solver choose. optimizer:
    as for :func:`fxpart.compat.optimizer_choice.choose`. weights: weight mode of the schedule
    "async". space: the allowed choices. transfer_dtype: dtype in which float32 is sent between
    stages, "" for no conversion. sequences: the graph's placements under context parallelism; None
    excludes it. offloads: what may be in host memory. Raises FXP105 (the batch cannot be split),
    FXP109 (an argument), FXP201 (no blocks) and FXP403 (no link).
    """
    costs = costmodels.find(cost_model, cluster) if isinstance(cost_model, str) else cost_model
    if not graph.meta.get(BLOCKS_KEY):
        raise error(
            "FXP201",
            where="joint_problem",
            why="the graph has no blocks, so there is nothing to cut",
            fix="run the passes of fxpart.passes.PREPARE on it first",
        )
    choice = choose(optimizer)
    allowed, pools = space or SearchSpace(), device_pools(cluster, costs)
    devices, blocks = sum(p.pool.devices for p in pools), graph.meta[BLOCKS_KEY]
    stages = max(1, min(devices, len(blocks), allowed.max_stages or devices))
    rows = MicrobatchRows(captured, batch_size, microbatches, allowed, stages)
    model = ModelBlocks(graph, captured, choice)
    hosts = {each: HostOffload.of(each, cluster) for each in offloads}
    lines = ReplicaCollectiveTimes(
        costs, max(NonOpCosts.of(costs, pool.sample).copying for pool in pools)
    )
    layouts = ModelLayouts(model, costs, pools, lines, rows, allowed, sequences, hosts)
    works = MicrobatchCosts(layouts)
    options = StageOptionEnumerator(layouts, works, allowed).all()
    problem = JointProblem(
        blocks=tuple(block.name for block in blocks),
        kinds=model.kinds.of,
        batch=batch_size,
        pools=tuple(p.pool for p in pools),
        layouts=layouts.all,
        works=works.all(options),
        options=options,
        boundaries=_boundaries(model, rows, transfer_dtype),
        ties=model.ties,
        microbatches=rows.counts,
        schedules=_schedules(schedules),
        weights=weights,
        max_stages=stages,
        no_cut_after=tuple(graph.meta.get(NO_CUT_KEY, ())),
        uniform=allowed.uniform,
        offloads=hosts[offloads[0]].others if captured.training and len(hosts) == 1 else (),
    )
    return problem, _provenance(cluster, layouts)


def _schedules(names: Sequence[str]) -> tuple[str, ...]:
    """Return the schedules; raises FXP109 for an unknown one and for none."""
    known = list_closed_forms()
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise error(
            "FXP109",
            where=f"schedules={tuple(names)!r}",
            why=f"there is no schedule {wrong[0]!r} with a closed form"
            if wrong
            else "no schedule is given",
            fix=f"use some of {', '.join(known)}",
        )
    return tuple(dict.fromkeys(names))


def _boundaries(
    model: ModelBlocks, rows: MicrobatchRows, transfer_dtype: str
) -> tuple[StageBoundary, ...]:
    """Return values between blocks with sizes linear in rows: exact, else an upper bound."""
    values, amounts = crossing(model.graph.graph, model.specs, transfer_dtype)
    low = rows.fixed or 1
    high = low if rows.fixed else max(rows.batch, 2)
    found = []
    for value, amount in zip(values, amounts, strict=True):
        small, large = (rows.at(r).number(amount) for r in (low, high))
        slope = -(-(large - small) // (high - low)) if high > low else 0
        found.append(
            StageBoundary(
                producer=value.producer,
                consumers=value.consumers,
                row_bytes=max(0, slope),
                fixed_bytes=max(0, small - slope * low),
                gradient=value.gradient,
                saved=value.saved,
                widened=value.widened,
                sent=value.sent,
            )
        )
    return tuple(found)


def _provenance(cluster: Cluster, layouts: ModelLayouts) -> dict[str, str]:
    """Return the source of each kind of cost, for the plan."""
    captured, name = layouts.model.captured, layouts.prices.model.name
    optimizer = layouts.model.optimizer.name
    batch = "symbolic batch" if captured.symbolic else f"batch fixed at {captured.batch_size}"
    result = {
        "activations": f"counted from the captured graph, {batch}",
        "compute": "; ".join(sorted(layouts.prices.sources)) or name,
        "devices": "; ".join(sorted({d.source or "as specified" for d in cluster.devices})),
        "links": "; ".join(sorted({link.origin or "as specified" for link in cluster.links})),
        "memory": f"{RESERVE:.0%} of each device reserved",
        "optimizer": f"{optimizer}, one step on parameters of the same shapes",
        "transfers": f"{name}, over the worst link into each type of device",
        "replicas": f"{name} on rings of neighboring devices, buckets of 25 MiB",
        "tensor": layouts.note,
    }
    if layouts.rows.unknown:
        names = ", ".join(sorted(layouts.rows.unknown))
        result["sizes"] = f"only known at run time, assumed to be the microbatch size: {names}"
    return result
