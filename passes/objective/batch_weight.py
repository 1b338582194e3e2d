"""The weight of a batch in a mean over batches: the divisor of its loss.

If a loss is a sum divided by one number of its batch, such as its valid tokens, then the mean of
several batches' losses, weighted by these numbers, is the loss of one batch of all their rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpart.compiler.effects import is_op, op_of, packet_name
from fxpart.compiler.graph_edit import fake_mode

from .analysis import ObjectiveAnalysis
from .loss_ops import count_of
from .microbatch_rewrite import live_nodes, total_reads
from .total_inputs import TotalInputs, TotalsGraph
from .value_kinds import BatchRelation

WEIGHT_KEY = "fxpart_batch_weight"  # a captured graph: TotalInputs of its batch weight, or None
NAMES = ("batch_weight", "batch_divisor")
_SMALL = 1e-3  # largest constant that counts as a guard against division by zero
_SAME = frozenset({"aten.to", "aten._to_copy", "aten.alias", "aten.clone", "aten.contiguous"})
_SCALED = frozenset({"aten.mul", "aten.multiply", "aten.neg"})
_QUOTIENTS = frozenset({"aten.div", "aten.divide", "aten.true_divide"})
_BOUNDS = frozenset({"aten.clamp", "aten.clamp_min", "aten.maximum"})


def weight_of(module: fx.GraphModule, found: ObjectiveAnalysis) -> TotalInputs | None:
    """Return the divisor of the loss; None if rows count, or if there are several numbers.

    The totals are two: the weight, which is zero for a batch in which nothing counts, and the
    divisor itself, which is bounded away from zero. module: a prepared, undivided graph. found: its
    analysis, with ``accept``.
    """
    if found.loss is None:
        return None
    made, root = TotalsGraph(fake_mode(module.graph)), unscaled(found.loss)
    divisor = divisor_of(found, root)
    reads = set(total_reads(found, live_nodes(found))) - {(root, divisor)}
    if reads:
        return None  # it uses other totals of the whole batch
    if root in found.losses:
        count = count_of(made.graph, root, made.copied, made.add(root))
        numbers = count, count
    elif divisor is not None:
        numbers = made.copied(_unbounded(divisor)), made.copied(divisor)
    else:
        return None
    made.graph.output(numbers)
    return TotalInputs(made.graph, NAMES, (), module)


def divisor_of(found: ObjectiveAnalysis, loss: fx.Node) -> fx.Node | None:
    """Return the batch total that divides a sum over rows."""
    if loss.op != "call_function" or packet_name(op_of(loss)) not in _QUOTIENTS:
        return None
    source, number = loss.args[:2]
    if not (isinstance(source, fx.Node) and isinstance(number, fx.Node)):
        return None
    value = number.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() or not found.kind(number).total:
        return None
    return number if found.kind(source).relation is BatchRelation.SUM else None


def unscaled(node: fx.Node) -> fx.Node:
    """Return the loss before conversions and factors that are the same for every batch."""
    while node.op == "call_function" and is_op(op_of(node)):
        name, operands = packet_name(op_of(node)), node.all_input_nodes
        plain = name in _SAME or (name in _SCALED | _QUOTIENTS and _is_number(node.args[1:]))
        if not plain or len(operands) != 1:
            return node
        node = operands[0]
    return node


def _unbounded(node: fx.Node) -> fx.Node:
    """Return a number before it is bounded away from zero."""
    while node.op == "call_function" and is_op(op_of(node)):
        name, operands = packet_name(op_of(node)), node.all_input_nodes
        small = name == "aten.add" and _is_number(node.args[1:2])
        small = small and 0 <= float(node.args[1]) <= _SMALL  # type: ignore[arg-type]
        if len(operands) != 1 or not (name in _SAME | _BOUNDS or small):
            return node
        node = operands[0]
    return node


def _is_number(args: tuple[Any, ...]) -> bool:
    return all(isinstance(a, int | float) for a in args)
