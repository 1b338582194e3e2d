"""Capture a model and find its blocks: the input of planning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fxpart.annotations import annotations_of_batch, gather_batch_dtensors, gather_model_dtensors
from fxpart.annotations.entry_syntax import merge_annotations
from fxpart.capture import CapturedModel, capture
from fxpart.capture.flat_batch import assemble
from fxpart.capture.live_state import live_parameters
from fxpart.capture.model_validation import plain_module
from fxpart.capture.shared_memory import refuse_shared_memory
from fxpart.cluster.model import Cluster
from fxpart.codegen.mesh_programs.row_dependence import (
    couplings,
    is_accepted,
    mark_batch_dependent_nodes,
)
from fxpart.compat import replaced_names
from fxpart.compat.optimizer_choice import choose
from fxpart.compat.optimizer_parameters import (
    check_gradient_layouts,
    name_optimizer_parameters,
)
from fxpart.compat.optimizer_parts import find_optimizer_parts
from fxpart.compiler import BLOCKS_KEY, PassManager
from fxpart.compiler.autocast_region import DEVICES_KEY
from fxpart.compiler.garbage_collection import reduce_garbage_collection
from fxpart.compiler.graph_edit import annotation
from fxpart.compiler.higher_order_ops import AUTOCAST, region_name
from fxpart.compiler.sparse_lookups import sparse_tables
from fxpart.costs import CostModel
from fxpart.diagnostics.progress import log_phase
from fxpart.errors import FxpartError, error
from fxpart.passes import PREPARE, all_passes
from fxpart.plan.constraint_table import DATA_AXES
from fxpart.plan.model import ModuleCheck, Plan, PlanModel
from fxpart.planner.constraints import list_fixed
from fxpart.planner.execution_mode import Constraints
from fxpart.planner.plan_builder import model_info
from fxpart.planner.request import (
    PlanRequest,
    check_counts,
    find_cluster,
    make_request,
)
from fxpart.planner.sharding_decision import ShardingCache, find_annotations
from fxpart.pricing.weights import trained_names
from fxpart.verification import ConstantGuard, check_module, check_option, refuse_gradient_hooks


@dataclass(frozen=True)
class PlanningArguments:
    """The arguments of compile() that describe the requested plan."""

    batch_size: int | None
    microbatches: int | None
    optimizer: Any
    cost_model: str | Path | CostModel
    constraints: Constraints
    seed: int


@dataclass(frozen=True)
class PreparedModel:
    """A captured model with blocks, and the request for its plan.

    compare: compares the captured program with the module (raises FXP113), and returns the result
    for the plan. shardings: of the graph, as far as they were found.
    """

    request: PlanRequest
    captured: CapturedModel
    graph: fx.GraphModule
    info: PlanModel
    annotations: Mapping[str, str]
    compare: Callable[[], ModuleCheck | None] = lambda: None
    shardings: ShardingCache = field(default_factory=ShardingCache)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Return the names of the model's blocks."""
        return tuple(block.name for block in self.graph.meta[BLOCKS_KEY])


@reduce_garbage_collection()
def prepare_model(
    model: nn.Module,
    cluster: Cluster | str | Path,
    plan: Plan | None,
    given: tuple[Any, Any],
    arguments: PlanningArguments,
    options: Mapping[str, Any],
    check: str = "auto",
) -> PreparedModel:
    """Check the request, capture the model, and find its blocks. plan: the plan to apply, if any.

    check: whether ``PreparedModel.compare`` compares the program with the module, as for compile().
    """
    check_counts(arguments.batch_size, arguments.microbatches)
    check_option(check)
    request = make_request(
        find_cluster(cluster, plan),
        arguments.optimizer,
        arguments.cost_model,
        arguments.constraints,
        arguments.seed,
    )
    model, loss = plain_module(gather_model_dtensors(model)), options.get("loss")
    refuse_gradient_hooks(model, loss)
    with log_phase("capture the model", area="capture"):
        captured = _capture(
            model,
            gather_batch_dtensors(given[0]),
            gather_batch_dtensors(given[1]),
            microbatches=arguments.microbatches if plan is None else plan.microbatches,
            request=request,
            batch_size=arguments.batch_size if plan is None else plan.batch_size,
            precision=request.precision,
            device_type=_device_type(request),
            **options,
        )
    constraints = request.constraints if plan is None else plan.constraints
    granularity = str(constraints.get("granularity", "block"))
    with log_phase("prepare the graph"):
        graph = PassManager(all_passes()).run(_prepare(granularity), captured.graph)
    _check_loss_gradient(captured, graph)
    if isinstance(arguments.optimizer, torch.optim.Optimizer):
        _check_optimizer(arguments.optimizer, captured, graph.graph)
    refuse_shared_memory(model, loss, captured, graph.graph)
    annotations: Mapping[str, str] = {}
    if plan is None and (request.sharded or request.open):
        annotations = _annotations(model, request, captured, given)
    info = model_info(captured, graph)
    guard = ConstantGuard.of(model, loss, captured)
    captured = replace(captured, guard=guard, guarded=guard.covered(captured.state))

    def compare() -> ModuleCheck:
        with log_phase("check the captured program", area="capture"):
            checked = _as_on_module_device(captured, graph, granularity)
            return check_module(model, loss, captured, checked, seed=request.seed, check=check)

    request = with_model_profile(request, info)
    if plan is None:
        request = with_optimizer_parts(request, captured)
    return PreparedModel(request, captured, graph, info, annotations, compare)


def _check_optimizer(
    instance: torch.optim.Optimizer, captured: CapturedModel, graph: fx.Graph
) -> None:
    """Raise FXP115 for an instance that ranks cannot copy, FXP109 for unsupported gradients."""
    groups = name_optimizer_parameters(instance, live_parameters(captured))
    used = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    names = [n for group in groups for n in group if n in used & trained_names(captured)]
    check_gradient_layouts(instance, names, sparse_tables(graph), replaced_names(captured.aliases))


def _check_loss_gradient(captured: CapturedModel, graph: fx.GraphModule) -> None:
    """Raise FXP106 for a loss that trains nothing, as the backward of plain PyTorch does."""
    loss: Any = graph.graph.output_node().args[0][0]  # type: ignore[index]
    trained = any(captured.state[name].requires_grad for name in captured.parameters)
    if captured.training and trained and not annotation(loss).requires_grad:
        raise error(
            "FXP106",
            where="loss",
            why="it has no gradient for any trained parameter",
            fix="compute it without detach(), torch.no_grad() or operations on integers",
        )


def with_model_profile(request: PlanRequest, info: PlanModel) -> PlanRequest:
    """Return the request with the profile's data about this model."""
    return replace(request, cost_model=request.cost_model.for_model(info.fingerprint))


def with_optimizer_parts(request: PlanRequest, captured: CapturedModel) -> PlanRequest:
    """Return the request with how its optimizer allows to divide the model's parameters.

    Raises FXP115 for several stages where its parameters depend on each other.
    """
    if not captured.training:
        return request
    tensors = {name: captured.state[name] for name in sorted(trained_names(captured))}
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    found = find_optimizer_parts(request.optimizer, shapes)
    if not found.apart:
        return replace(request, divisible=found)
    if request.stages[0] > 1:
        raise error(
            "FXP115",
            where=f"optimizer {found.apart}",
            why="the update of a parameter depends on other parameters, so that all must be on one "
            f"stage, but the constraints require {request.stages[0]} stages",
            fix='use constraints={"stages": 1}, or an optimizer that updates each parameter '
            "independently",
        )
    return replace(request, divisible=found, stages=(1, 1))


def describe_request(front: PreparedModel, microbatches: int | None) -> str:
    """Return the request as text, which is identical on ranks with the same arguments.

    Cluster and costs are left out: machines detect different devices and measure different times,
    and one plan is used on all of them.
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


def _device_type(request: PlanRequest) -> str:
    """Return the device type of the ranks, whose autocast applies."""
    return "cuda" if any(d.kind == "gpu" for d in request.cluster.devices) else "cpu"


def _as_on_module_device(
    captured: CapturedModel, graph: fx.GraphModule, granularity: str
) -> fx.GraphModule:
    """Return the prepared graph with autocast as on the module's device, to compare with it."""
    module_device, rank_device = captured.graph.meta.get(DEVICES_KEY, ("", ""))
    if module_device == rank_device or not _has_autocast(captured.graph):
        return graph
    passes = _prepare(granularity).replace("inline_regions", "inline_regions{module_device=true}")
    return PassManager(all_passes()).run(passes, captured.graph)


def _has_autocast(graph: fx.GraphModule) -> bool:
    """Return whether a graph, or the body of a region in it, has an autocast region."""
    modules = [m for m in graph.modules() if isinstance(m, fx.GraphModule)]
    return any(region_name(node) == AUTOCAST for m in modules for node in m.graph.nodes)


def _prepare(granularity: str) -> str:
    """Return the pass pipeline from captured to annotated."""
    if granularity == "block":
        return PREPARE
    return PREPARE.replace("group_blocks", 'group_blocks{granularity="op"}')


def _annotations(
    model: nn.Module, request: PlanRequest, captured: CapturedModel, given: tuple[Any, Any]
) -> dict[str, str]:
    """Merge the annotations of the model, of the constraint and of DTensor inputs."""
    annotations = find_annotations(model, request)
    if all(part is None for part in given):
        return annotations
    paths = {item.name: item.path for item in captured.inputs}
    return merge_annotations(annotations, annotations_of_batch(paths, assemble(*given)))


def _capture(
    model: nn.Module,
    inputs: Any,
    kwargs: Mapping[str, Any] | None,
    *,
    microbatches: int | None,
    request: PlanRequest,
    **options: Any,
) -> CapturedModel:
    """Capture; at the size of one microbatch where the batch cannot be symbolic.

    By default that size is a divisor of the batch that yields about two microbatches per stage,
    each of which the ranks of the data axis can share; the batch if it cannot be captured so.
    """
    captured = capture(model, inputs, kwargs, **options)
    if captured.symbolic or not any(i.batch_dim is not None for i in captured.inputs):
        return captured
    batch = captured.batch_size
    fixed = list_fixed(request.constraints, "microbatches")
    if microbatches is None and len(fixed) == 1:
        microbatches = fixed[0]
    count = microbatches
    if count is None:
        shares = request.mesh.count(*DATA_AXES)
        most = min(batch, 2 * len(request.cluster.devices) // request.mesh.size)
        divides = [m for m in range(1, most + 1) if batch % m == 0]
        count = max((m for m in divides if batch // m % shares == 0), default=1)
    if batch % count:
        raise error(
            "FXP109",
            where=f"microbatches={count}",
            why=f"the model can only be captured at a fixed size, and {count} does not divide the "
            f"batch of {batch}",
            fix="use a number of microbatches that divides the batch",
        )
    if count == 1:
        return captured
    try:
        made = capture(model, inputs, kwargs, microbatch_size=batch // count, **options)
    except FxpartError as failure:  # such as topk over more rows than a microbatch has
        if microbatches is None:
            return captured
        raise error(
            "FXP109",
            where=f"microbatches={count}",
            why=f"the batch of {batch} rows can be captured, but not {batch // count} rows alone: "
            f"{failure.problems[0].why.splitlines()[0]}",
            fix="use fewer microbatches",
        ) from failure
    mark_batch_dependent_nodes(captured, made)
    accepted = is_accepted(request.constraints) or microbatches is not None
    if not accepted and couplings(PassManager(all_passes()).run(PREPARE, made.graph), made):
        return captured
    return made
