"""From a model and arguments to a captured graph with blocks: what planning starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fxpart.annotations import annotations_of_batch, whole_batch, whole_model
from fxpart.annotations.entries import merged
from fxpart.capture import Captured, capture
from fxpart.capture.accepted import plain_module
from fxpart.capture.batch import assemble
from fxpart.capture.live import live_parameters
from fxpart.cluster import Cluster
from fxpart.costmodels import Measured
from fxpart.costs import CostModel
from fxpart.errors import error
from fxpart.modes import Constraints
from fxpart.optimizers import choose
from fxpart.passes import PREPARE
from fxpart.pipeline import BLOCKS_KEY, PassManager
from fxpart.pipeline.garbage import seldom_collected
from fxpart.plan import ModuleCheck, Plan, PlanModel
from fxpart.planning import model_info
from fxpart.requests import (
    DATA_AXIS,
    Request,
    check_counts,
    find_cluster,
    make_request,
)
from fxpart.runtime.user_optimizer import UserOptimizer
from fxpart.sharded.coupling import couplings, is_accepted, mark_numbers
from fxpart.sharded.decide import find_annotations
from fxpart.verification import (
    Guard,
    check_module,
    check_option,
    refuse_gradient_hooks,
)


@dataclass(frozen=True)
class Asked:
    """Arguments that say what is wanted."""

    batch_size: int | None
    microbatches: int | None
    optimizer: Any
    cost_model: str | Path | CostModel
    constraints: Constraints
    seed: int


@dataclass(frozen=True)
class Front:
    """A captured model with blocks, and what is asked of it.

    compare: compares the captured program with the module (FXP113), and returns what the plan says
    of that.
    """

    request: Request
    captured: Captured
    graph: fx.GraphModule
    info: PlanModel
    annotations: Mapping[str, str]
    compare: Callable[[], ModuleCheck | None] = lambda: None

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the model's blocks."""
        return tuple(block.name for block in self.graph.meta[BLOCKS_KEY])


@seldom_collected()
def make_front(
    model: nn.Module,
    cluster: Cluster | str | Path,
    plan: Plan | None,
    given: tuple[Any, Any],
    asked: Asked,
    options: Mapping[str, Any],
    check: str = "auto",
) -> Front:
    """Check what is asked, capture the model, and find its blocks. plan: where one is applied.

    check: whether ``Front.compare`` compares the program with the module, as for compile().
    """
    check_counts(asked.batch_size, asked.microbatches)
    check_option(check)
    request = make_request(
        find_cluster(cluster, plan), asked.optimizer, asked.cost_model, asked.constraints,
        asked.seed,
    )  # fmt: skip
    model, loss = plain_module(whole_model(model)), options.get("loss")
    refuse_gradient_hooks(model, loss)
    captured = _capture(
        model,
        whole_batch(given[0]),
        whole_batch(given[1]),
        microbatches=asked.microbatches if plan is None else plan.microbatches,
        request=request,
        batch_size=asked.batch_size if plan is None else plan.batch_size,
        precision=request.precision,
        **options,
    )
    if isinstance(asked.optimizer, torch.optim.Optimizer):
        UserOptimizer(asked.optimizer, live_parameters(captured))  # FXP115 before planning
    constraints = request.constraints if plan is None else plan.constraints
    granularity = str(constraints.get("granularity", "block"))
    graph = PassManager().run(_prepare(granularity), captured.graph)
    said: Mapping[str, str] = {}
    if plan is None and (request.sharded or request.open):
        said = _annotations(model, request, captured, given)
    info = model_info(captured, graph)
    guard = Guard.of(model, loss, captured)
    captured = replace(captured, guard=guard, guarded=guard.covered(captured.state))

    def compare() -> ModuleCheck:
        return check_module(model, loss, captured, graph, seed=request.seed, check=check)

    return Front(of_model(request, info), captured, graph, info, said, compare)


def of_model(request: Request, info: PlanModel) -> Request:
    """The request with what a profile says of this very model."""
    if not isinstance(request.cost_model, Measured):
        return request
    return replace(request, cost_model=request.cost_model.of(info.fingerprint))


def asked_for(front: Front, microbatches: int | None) -> str:
    """What a plan is asked for, as text: the same on ranks that were given the same.

    Cluster and costs are left out: machines see other devices and measure other times, and one
    plan goes to all of them.
    """
    request, captured = front.request, front.captured
    rows = {
        "model": front.info.fingerprint,
        "batch size": captured.batch_size,
        "microbatches": microbatches,
        "optimizer": choose(request.optimizer).name,
        "constraints": sorted(request.constraints.items()),
        "annotations": sorted(front.annotations.items()),
        "seed": request.seed,
    }
    return "\n".join(f"{name}: {value}" for name, value in rows.items())


def _prepare(granularity: str) -> str:
    """The pipeline from captured to annotated."""
    if granularity == "block":
        return PREPARE
    return PREPARE.replace("group_blocks", 'group_blocks{granularity="op"}')


def _annotations(
    model: nn.Module, request: Request, captured: Captured, given: tuple[Any, Any]
) -> dict[str, str]:
    """All that a user said: on the model, in the constraint, and with DTensors as inputs."""
    said = find_annotations(model, request)
    if all(part is None for part in given):
        return said
    paths = {item.name: item.path for item in captured.inputs}
    return merged(said, annotations_of_batch(paths, assemble(*given)))


def _capture(
    model: nn.Module,
    inputs: Any,
    kwargs: Mapping[str, Any] | None,
    *,
    microbatches: int | None,
    request: Request,
    **options: Any,
) -> Captured:
    """Capture; where the batch cannot be symbolic, at the size of one microbatch.

    Without a wish that size is a divisor of the batch that makes about two microbatches a stage,
    each of which the ranks of the data axis can share.
    """
    captured = capture(model, inputs, kwargs, **options)
    if captured.symbolic or not any(i.batch_dim is not None for i in captured.inputs):
        return captured
    batch = captured.batch_size
    count = microbatches
    if count is None:
        shares = dict(request.mesh.axes).get(DATA_AXIS, 1)
        most = min(batch, 2 * len(request.cluster.devices) // request.mesh.size)
        divides = [m for m in range(1, most + 1) if batch % m == 0]
        count = max((m for m in divides if batch // m % shares == 0), default=1)
    if batch % count:
        raise error(
            "FXP109",
            where=f"microbatches={count}",
            why=f"the model can only be captured at a fixed size, and {count} does not divide the "
            f"batch of {batch}",
            fix="choose a number that divides the batch",
        )
    if count == 1:
        return captured
    made = capture(model, inputs, kwargs, microbatch_size=batch // count, **options)
    mark_numbers(captured, made)
    accepted = is_accepted(request.constraints) or microbatches is not None
    if not accepted and couplings(PassManager().run(PREPARE, made.graph), made):
        return captured
    return made
