"""Kinds of an op's results from the kinds of its operands, by its sharding rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
from torch import fx

from fxpart.compiler.effects import argument
from fxpart.compiler.tensor_sizes import expression
from fxpart.sharding import PARTIAL, Shard

from ..propagation.axis_rules import AxisRule
from ..rules.sharding_rule import Dims, ShardingRule
from .value_kinds import FIXED, MEAN, SUM, BatchRelation, ValueKind, make_coupled_kind, rows

# Sharded forms that treat the local rows as the op itself treats the rows of a microbatch.
_LOCAL_FORMS = frozenset({"index_own_rows", "embedding_bag_bags", "embedding_bag_sent"})
_MEANS = "mean_rows"
_STATISTICS = "batch_norm_rows"
_LOSSES = frozenset(
    f"{name}_rows"
    for name in (
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
        "binary_cross_entropy_with_logits soft_margin_loss kl_div poisson_nll_loss "
        "hinge_embedding_loss ctc_loss"
    ).split()
)
_AFFINE = frozenset({"aten.add", "aten.sub", "aten.rsub", "aten.subtract"})

Part: TypeAlias = tuple[str, Any]  # a factor, and the size of its part before the rows


@dataclass(frozen=True)
class TransferCall:
    """One call: op name, tensor operands, their kinds, its rule, and the number of results.

    scales: whether a size grows with the rows of the batch. accept: batch statistics are computed
    per microbatch.
    """

    node: fx.Node
    name: str
    operands: Sequence[fx.Node]
    known: Sequence[ValueKind]
    ruled: AxisRule | None
    count: int
    scales: Callable[[Any], bool]
    accept: bool = False


@dataclass(frozen=True)
class TransferResult:
    """kinds: of the results. conversions: operands whose sum must first become a mean."""

    kinds: tuple[ValueKind, ...]
    conversions: tuple[fx.Node, ...] = field(default=())


def transfer(call: TransferCall) -> TransferResult:
    """Return the kinds of a call's results; no operand may be coupled."""
    relations = {k.relation for k in call.known}
    if relations <= {BatchRelation.FIXED}:
        return TransferResult((FIXED,) * call.count)
    blamed = TransferResult((make_coupled_kind(_culprit(call)),) * call.count)
    if call.ruled is None:
        return blamed
    if relations & {BatchRelation.ROWS, BatchRelation.INDEX}:
        return _of_rows(call, call.ruled) or blamed
    return _linear(call, call.ruled) or blamed


def _culprit(call: TransferCall) -> fx.Node:
    """Return the node to report: the arange if row indices are used as values."""
    index = next((k.cause for k in call.known if k.relation is BatchRelation.INDEX), None)
    return call.node if index is None else index


def _of_rows(call: TransferCall, ruled: AxisRule) -> TransferResult | None:
    """Return the result for rows along one factor of the rule; None if the op couples them."""
    numbered = _row_numbers(call)
    if numbered is not None:
        return numbered
    part = _factor(call, ruled.rule)
    if part is None or part[0] in ruled.rule.whole:
        return None
    name, rule = part[0], ruled.rule
    form = rule.forms.get(name)
    if call.accept and form == _STATISTICS:
        form = None
    results = [place_of(dims, part, rule) for dims in rule.results]
    for index, (kind, dims) in enumerate(zip(call.known, rule.operands, strict=True)):
        summed = index in rule.additive and None in results
        if summed or not _fits(kind, place_of(dims, part, rule), form):
            return None
    placements = rule.results_of.get(name, ())
    if any(fixed is not None and fixed != PARTIAL for fixed in placements):
        return None
    found = [_result(place, form) for place in results]
    if any(kind is None for kind in found):
        return None
    return TransferResult(tuple(kind for kind in found if kind is not None))


def _row_numbers(call: TransferCall) -> TransferResult | None:
    """Return the result of an unsqueeze of row indices."""
    (kind, *others) = call.known
    if others or call.name != "aten.unsqueeze" or kind.relation is not BatchRelation.INDEX:
        return None
    assert kind.place is not None
    rank = len(call.node.meta["val"].shape)
    before = argument(call.node, "dim") % rank <= kind.place.dim
    place = Shard(kind.place.dim + before)
    return TransferResult((ValueKind(BatchRelation.INDEX, place, cause=kind.cause),))


def _factor(call: TransferCall, rule: ShardingRule) -> Part | None:
    """Return the factor along which all rows lie; None if there is no common one."""
    found = set()
    for kind, dims in zip(call.known, rule.operands, strict=True):
        if kind.relation in (BatchRelation.ROWS, BatchRelation.INDEX):
            assert kind.place is not None
            found.add(_locate(dims, kind.place, rule, call.scales))
    return found.pop() if len(found) == 1 else None


def _locate(
    dims: Dims, place: Shard, rule: ShardingRule, scales: Callable[[Any], bool]
) -> Part | None:
    """Return the factor with rows at this position, and the size of its part before them.

    The factor must grow with the rows; a batch reshaped to two halves has no such factor.
    """
    if place.dim >= len(dims):
        return None
    before: Any = 1
    for factor in dims[place.dim]:
        inner = sympy.cancel(sympy.sympify(place.outer) / before)
        size = sympy.sympify(expression(rule.sizes[factor]))
        if inner == 1:
            return (factor, 1) if scales(rule.sizes[factor]) else None
        if not inner.is_polynomial() or sympy.fraction(inner)[1] != 1:
            return None
        left = sympy.cancel(size / inner)
        if left != 1 and sympy.fraction(left)[1] == 1:
            return (factor, inner) if scales(rule.sizes[factor]) else None
        before *= size
    return None


def place_of(dims: Dims, part: Part, rule: ShardingRule) -> Shard | None:
    """Return the position of rows along a factor in a tensor; None without that factor."""
    name, inner = part
    for dim, factors in enumerate(dims):
        if name in factors:
            outer: Any = inner
            for factor in factors[: factors.index(name)]:
                outer *= expression(rule.sizes[factor])
            plain = sympy.sympify(outer)
            return Shard(dim, int(plain) if plain.is_number else plain)
    return None


def _fits(kind: ValueKind, wanted: Shard | None, form: str | None) -> bool:
    """Return whether an operand is as the op needs it to run on the rows of a microbatch."""
    if kind.relation is BatchRelation.INDEX:
        return kind.place == wanted and form in _LOCAL_FORMS
    if kind.relation is BatchRelation.ROWS:
        return kind.place == wanted
    return kind.relation is BatchRelation.FIXED and (wanted is None or kind.uniform)


def _result(place: Shard | None, form: str | None) -> ValueKind | None:
    """Return the kind of a result of an op on rows; None if it needs all rows of the batch."""
    if form is None or form in _LOCAL_FORMS:
        return SUM if place is None else rows(place)
    if form == _MEANS or form in _LOSSES:
        return MEAN if place is None else rows(place)
    return None


def _linear(call: TransferCall, ruled: AxisRule) -> TransferResult | None:
    """Return the result of linear ops on sums and means, or of adding a fixed value to a mean."""
    known = call.known
    for summed in ruled.rule.linear:
        if any(
            k.relation is not BatchRelation.FIXED for i, k in enumerate(known) if i not in summed
        ):
            continue
        inside = [k.relation for i, k in enumerate(known) if i in summed]
        if all(r is BatchRelation.SUM for r in inside):
            return TransferResult((SUM,) * call.count)
        return TransferResult((MEAN,) * call.count, _sums(call))
    if call.name in _AFFINE:
        return TransferResult((MEAN,) * call.count, _sums(call))
    return None


def _sums(call: TransferCall) -> tuple[fx.Node, ...]:
    pairs = zip(call.operands, call.known, strict=True)
    return tuple(node for node, kind in pairs if kind.relation is BatchRelation.SUM)
