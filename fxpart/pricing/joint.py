"""Price an annotated graph on a cluster for every way to run a stage: the joint problem.

Blocks that cost the same are priced once. With one rank for each replica the numbers are those of
:func:`fxpart.price.price` at the same microbatch size; d replicas take ceil(batch / (m * d)) rows
each. The gradients' sum over microbatches is counted wherever a replica's microbatch is not the
whole batch, since a ``Work`` knows its rows and not m.

What is left out because it cannot be better: ZeRO 1 where 2 may be chosen (the same seconds, less
memory), levels above the least for one replica, modes of recomputation that free nothing, tensor
degrees that cut nothing, options with which not even one block fits on a device, and microbatches
of which one block alone overfills it (the smallest size is always there).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import fx

from fxpart import costmodels
from fxpart.errors import error
from fxpart.optimizers import choose
from fxpart.pipeline import BLOCKS_KEY, NO_CUT_KEY
from fxpart.pricing.joint_links import device_pools
from fxpart.pricing.joint_pricer import JointPricer
from fxpart.pricing.joint_space import Space
from fxpart.pricing.places import RESERVE
from fxpart.solver.joint.problem import JointProblem, ScheduleName
from fxpart.solver.joint.schedules import SYNCHRONOUS

if TYPE_CHECKING:
    from fxpart.capture.captured import Captured
    from fxpart.cluster import Cluster
    from fxpart.costs import CostModel


def joint_problem(
    graph: fx.GraphModule,
    captured: Captured,
    cluster: Cluster,
    *,
    cost_model: str | CostModel = "auto",
    batch_size: int,
    microbatches: int | None = None,
    optimizer: object = "adamw",
    schedules: Sequence[ScheduleName] = ("1f1b",),
    space: Space | None = None,
) -> tuple[JointProblem, dict[str, str]]:
    """The joint problem of an annotated graph on a cluster, and where its numbers come from.

    graph: with blocks and what autograd saves (level ANNOTATED), of one process: not sharded.
    batch_size: rows of one step. microbatches: a number, or None to let the solver choose.
    optimizer: as :func:`fxpart.optimizers.choose` takes it. space: what may be chosen.
    Raises FXP105 (the batch cannot be cut), FXP109 (an argument), FXP201 (no blocks) and FXP403 (no
    link).
    """
    model = costmodels.find(cost_model) if isinstance(cost_model, str) else cost_model
    if not graph.meta.get(BLOCKS_KEY):
        raise error(
            "FXP201",
            where="joint_problem",
            why="the graph has no blocks, so there is nothing to cut",
            fix="run the passes of fxpart.passes.PREPARE on it first",
        )
    choice = choose(optimizer)
    pricer = JointPricer(
        graph, captured, model, device_pools(cluster, model), choice,
        batch_size, microbatches, space or Space(),
    )  # fmt: skip
    options = pricer.options()
    works = pricer.works(options)
    problem = JointProblem(
        blocks=tuple(block.name for block in graph.meta[BLOCKS_KEY]),
        kinds=pricer.kinds.of,
        batch=batch_size,
        pools=tuple(p.pool for p in pricer.pools),
        layouts=pricer.layouts,
        works=works,
        options=options,
        boundaries=pricer.boundaries(),
        ties=pricer.ties,
        microbatches=pricer.counts,
        schedules=_schedules(schedules),
        max_stages=pricer.most_stages,
        no_cut_after=tuple(graph.meta.get(NO_CUT_KEY, ())),
        uniform=pricer.space.uniform,
    )
    return problem, _provenance(model, cluster, choice.name, captured, pricer)


def _schedules(names: Sequence[ScheduleName]) -> tuple[ScheduleName, ...]:
    """The schedules; FXP109 for one that is not known and for none."""
    known: tuple[ScheduleName, ...] = (*SYNCHRONOUS, "async")
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise error(
            "FXP109",
            where=f"schedules={tuple(names)!r}",
            why=f"{wrong[0]!r} is not a schedule that plans know" if wrong else "there is none",
            fix=f"some of {', '.join(known)}",
        )
    return tuple(dict.fromkeys(names))


def _provenance(
    model: CostModel, cluster: Cluster, optimizer: str, captured: Captured, pricer: JointPricer
) -> dict[str, str]:
    """Where each kind of number comes from, for the plan."""
    batch = "symbolic batch" if captured.symbolic else f"batch fixed at {captured.batch_size}"
    result = {
        "activations": f"counted from the captured graph, {batch}",
        "compute": "; ".join(sorted(pricer.sources)) or model.name,
        "devices": "; ".join(sorted({device.source for device in cluster.devices})),
        "links": "; ".join(sorted({link.origin or "as given" for link in cluster.links})),
        "memory": f"{RESERVE:.0%} of each device kept free",
        "optimizer": f"{optimizer}, stepped once on parameters of the same shapes",
        "transfers": f"{model.name}, over the worst link into each type of device",
        "replicas": f"{model.name} on rings of neighbouring devices, 25 MiB at once",
        "tensor": pricer.tensor_note,
    }
    if pricer.unknown:
        names = ", ".join(sorted(pricer.unknown))
        result["sizes"] = f"only known at run time, taken as the microbatch size: {names}"
    return result
