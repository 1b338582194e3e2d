"""Losses with a mean over counted targets, and losses of rows without a sharding rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from fxpart.compiler.effects import argument, op_of, packet_name
from fxpart.sharding import Shard

from ..rules import operands
from .value_kinds import MEAN, SUM, BatchRelation, ValueKind, make_coupled_kind, rows

NONE, MEAN_OF, SUM_OF = 0, 1, 2  # reduction constants of ATen

_BY_CLASS = frozenset(
    {"aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss_nd", "aten.nll_loss2d"}
)
# One term per row, besides a dim that is reduced within each row.
_BY_ROW = frozenset(
    f"aten.{name}"
    for name in (
        "triplet_margin_loss margin_ranking_loss cosine_embedding_loss multi_margin_loss "
        "multilabel_margin_loss"
    ).split()
)


@dataclass(frozen=True)
class LossOp:
    """A loss op: its kind, and whether its mean is over counted (or weighted) targets."""

    kind: ValueKind
    counted: bool = False


def loss_of(node: fx.Node, kind: Callable[[fx.Node], ValueKind]) -> LossOp | None:
    """Return the result of a loss op on a microbatch; None for ops with a sharding rule."""
    name = packet_name(op_of(node))
    if name in _BY_CLASS:
        return _by_class(node, kind)
    if name in _BY_ROW:
        return _by_row(node, kind, dict.fromkeys(operands(node), 0))
    if name == "aten.ctc_loss":
        return _ctc(node, kind)
    return None


def _by_class(node: fx.Node, kind: Callable[[fx.Node], ValueKind]) -> LossOp | None:
    """Classify cross_entropy_loss and nll_loss with the mean over targets that are not ignored."""
    target, weight = argument(node, "target"), argument(node, "weight")
    value = argument(node, "self")
    if argument(node, "reduction") != MEAN_OF or value.meta["val"].dim() < 2:
        return None
    if any(kind(n).coupled for n in operands(node)):
        return None
    found = [kind(value), kind(target)]
    places = {k.place if k.relation is BatchRelation.ROWS else None for k in found}
    cut = len(places) == 1 and all(p is not None and p.dim == 0 for p in places)
    if not cut or (weight is not None and kind(weight).relation is not BatchRelation.FIXED):
        return (
            None
            if not any(k.relation is BatchRelation.ROWS for k in found)
            else LossOp(make_coupled_kind(node))
        )
    if target.meta["val"].is_floating_point():
        return LossOp(MEAN)  # class probabilities: every row counts
    known = kind(target).from_inputs and (weight is None or kind(weight).from_inputs)
    return LossOp(SUM, counted=True) if known else LossOp(make_coupled_kind(node))


def _by_row(
    node: fx.Node, kind: Callable[[fx.Node], ValueKind], dims: dict[fx.Node, int]
) -> LossOp:
    """Classify a loss of rows: every operand has its rows along the given dim, or has none."""
    known = {n: kind(n) for n in dims}
    bad = next((k for k in known.values() if k.coupled), None)
    if bad is not None:
        return LossOp(bad)
    relations = {k.relation for k in known.values()}
    if relations <= {BatchRelation.FIXED}:
        return LossOp(ValueKind(BatchRelation.FIXED))
    for operand, dim in dims.items():
        found = known[operand]
        rank = operand.meta["val"].dim()
        if found.relation is BatchRelation.FIXED and (
            rank < 2 and argument(node, "weight") is operand
        ):
            continue
        if found.relation is not BatchRelation.ROWS or found.place != Shard(dim):
            return LossOp(make_coupled_kind(node))
    reduction = argument(node, "reduction")
    if reduction == NONE:
        return LossOp(rows(Shard(0)))
    return LossOp(MEAN if reduction == MEAN_OF else SUM)


def _ctc(node: fx.Node, kind: Callable[[fx.Node], ValueKind]) -> LossOp:
    """Classify ctc_loss: rows are dim 1 of the log-probabilities; targets are a matrix."""
    given = operands(node)
    tensors = [argument(node, n) for n in ("log_probs", "targets")]
    lengths = [argument(node, n) for n in ("input_lengths", "target_lengths")]
    plain = all(isinstance(n, fx.Node) for n in lengths) and tensors[1].meta["val"].dim() == 2
    if not plain or tensors[0].meta["val"].dim() != 3:
        return LossOp(make_coupled_kind(node))
    return _by_row(node, kind, {n: 1 if n is tensors[0] else 0 for n in given})


def count_of(
    graph: fx.Graph,
    node: fx.Node,
    copied: Callable[[fx.Node], fx.Node],
    add: Callable[..., fx.Node],
) -> fx.Node:
    """Add the number of counted targets, or the sum of their weights, to another graph."""
    aten = torch.ops.aten
    target = copied(argument(node, "target"))
    weight = argument(node, "weight")
    ignored = argument(node, "ignore_index")
    if weight is None:
        counts = add(aten.ne.Scalar, (target, ignored))
        return add(aten.sum.default, (counts,))
    without = add(aten.eq.Scalar, (target, ignored))
    index = add(aten.masked_fill.Scalar, (target, without, 0))
    each = add(aten.index.Tensor, (copied(weight), [index]))
    counted = add(aten.masked_fill.Scalar, (each, without, 0))
    return add(aten.sum.default, (counted,))
