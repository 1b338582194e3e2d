"""Coupled batch rows: allowed microbatches and the equivalence that a plan promises."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace
from torch import fx

from fxpart.codegen.mesh_programs.microbatch_graph import batch_dims
from fxpart.compiler import PassManager
from fxpart.compiler.node_annotation import REORDERED_KEY, SKIPPED_KEY
from fxpart.errors import FxpartError, Problem
from fxpart.passes import PREPARE, all_passes
from fxpart.passes.objective import LARGER_KEY, NUMBERS_KEY, RowDependence, analyze, coupling_of
from fxpart.plan.model import Equivalence, Plan
from fxpart.schedule.spec import SCHEDULES

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel

KEY = "batch_coupling"
PER_MICROBATCH = "per-microbatch"
_FIX = 'remove the constraint microbatches, or set batch_coupling="per-microbatch"'


def couplings(graph: fx.GraphModule, captured: CapturedModel) -> tuple[RowDependence, ...]:
    """Return the couplings between rows of different microbatches in a prepared graph."""
    given = captured.loss_kind != "mean-square"
    return coupling_of(analyze(graph, batch_dims(captured)), loss=given)


def mark_batch_dependent_nodes(whole: CapturedModel, microbatch: CapturedModel) -> None:
    """Record which nodes of a one-microbatch graph have arguments that depend on the batch size.

    whole: the same model, captured at another size. If the two graphs have different operations,
    every node counts.
    """
    one, two = list(whole.graph.graph.nodes), list(microbatch.graph.graph.nodes)
    alike = [(n.op, n.target) for n in one] == [(n.op, n.target) for n in two]
    pairs = zip(one, two, strict=True) if alike else ((None, n) for n in two)
    names = {
        n.name for m, n in pairs
        if n.op == "call_function" and (m is None or _plain(m) != _plain(n))
    }  # fmt: skip
    microbatch.graph.meta[NUMBERS_KEY] = frozenset(names)
    if microbatch.microbatch_size == 1:
        larger = PassManager(all_passes()).run(PREPARE, whole.graph)
        larger.meta[NUMBERS_KEY] = frozenset(names)
        microbatch.graph.meta[LARGER_KEY] = larger


def _plain(node: fx.Node) -> str:
    """Return the arguments of a call as text, without its input nodes."""
    return str(fx.node.map_arg((node.args, node.kwargs), lambda _: None))


def is_accepted(constraints: Mapping[str, object]) -> bool:
    """Return whether the user accepts an objective per microbatch."""
    return constraints.get(KEY) == PER_MICROBATCH


def resolve_microbatches(
    found: Sequence[RowDependence],
    constraints: Mapping[str, object],
    microbatches: int | None,
    excluding: str = "",
) -> int | None:
    """Return the number of microbatches: 1 if rows are coupled and the user did not accept it.

    excluding: the constraint that does not allow 1, if any. Raise FXP114 with each coupling if
    another number was requested.
    """
    if not found or is_accepted(constraints):
        return microbatches
    requested = excluding if microbatches is None else f"{microbatches} microbatches"
    if requested and microbatches != 1:
        raise FxpartError(
            [
                Problem(
                    "FXP114",
                    item.where,
                    f"with {requested} the objective differs from that of the "
                    f"whole batch: {item.why}",
                    _FIX,
                )
                for item in found
            ]
        )
    return 1


def with_equivalence(plan: Plan, graph: fx.GraphModule, found: Sequence[RowDependence]) -> Plan:
    """Return the plan with its promised equivalence to single-process training.

    found: the couplings between rows of the graph. Warn (FXP114) if the objective is computed per
    microbatch.
    """
    if not SCHEDULES[plan.schedule].flushes or any(plan.staleness):
        return plan
    if found and plan.microbatches > 1:
        reasons = tuple(item.where for item in found)
        warnings.warn(
            f"FXP114: {', '.join(reasons)}: computed per microbatch ({plan.microbatches} of them) "
            "instead of over the whole batch, as batch_coupling allows",
            stacklevel=2,
        )
        return replace(plan, equivalence=Equivalence(promise="per microbatch", reasons=reasons))
    reasons = (*_rounding(plan), *_reordered(graph))
    promise = Equivalence(promise="rounding" if reasons else "bitwise", reasons=reasons)
    return replace(plan, equivalence=promise)


def _reordered(graph: fx.GraphModule) -> list[str]:
    """Return the sums that capture computes in another order than the module."""
    skipped = [
        f"weights without rows have zero gradients, where the module has none ({line})"
        for line in graph.meta.get(SKIPPED_KEY, ())
    ]
    return [*graph.meta.get(REORDERED_KEY, ()), *skipped]


def _rounding(plan: Plan) -> list[str]:
    """Return the reasons why results may differ from a single process in the last bits."""
    found = []
    if plan.microbatches > 1:
        found.append(f"gradients are summed over {plan.microbatches} microbatches")
    data = max(stage.data_parallel for stage in plan.stages)
    tensor = max(stage.tensor_parallel for stage in plan.stages)
    context = max(stage.context_parallel for stage in plan.stages)
    if context > 1:
        found.append(f"gradients are summed over {context} parts of each sequence")
    if data > 1:
        found.append(f"gradients are summed over {data} replicas")
    if tensor > 1:
        found.append(f"reductions are split over {tensor} tensor-parallel ranks")
    if any(plan.device(rank).kind == "gpu" for rank in range(plan.world)):
        found.append("kernels of GPUs sum in an order that may change from run to run")
    if plan.transfer_dtype:
        found.append(f"values are sent between stages as {plan.transfer_dtype}")
    return found
