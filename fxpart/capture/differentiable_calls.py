"""Calls whose backward a gradient of forward needs as operations with rules and derivatives.

A fused backward has no derivative (of attention), writes statistics once more (of batch
normalization), or divides by the rows of a batch (of a mean). The same numbers come from the
operations that it fuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from fxpart.compat import operation_schema, record_operations
from fxpart.compiler.effects import argument, is_op, is_random, list_written_nodes, views
from fxpart.compiler.graph_edit import add_call, fake_mode, value

_ATEN = torch.ops.aten
_NONE, _MEAN = 0, 1  # reduction constants of ATen
_DROPOUTS = (_ATEN.dropout.default, _ATEN.feature_dropout.default)
_ATTENTION = _ATEN.scaled_dot_product_attention.default


def call_differentiable(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an op, by the operations that it fuses if they are in the table."""
    made = _CALLS.get(target)
    if made is None:
        return target(*args, **kwargs)
    names = [each.name for each in operation_schema(target).arguments]
    given = {each.name: each.default_value for each in operation_schema(target).arguments}
    return made(**{**given, **dict(zip(names, args, strict=False)), **kwargs})


def separate_effects(node: fx.Node) -> bool:
    """Replace a call that draws what it drops, or writes a new tensor; return whether it did.

    What is dropped becomes a factor that does not depend on the call's input. A write becomes a
    result, which later calls read.
    """
    if not is_op(node.target):
        return False
    if node.target._schema.is_mutable:  # type: ignore[union-attr]
        return _without_write(node)
    if not is_random(node):
        return False
    graph, mode = node.graph, fake_mode(node.graph)
    with graph.inserting_before(node):
        if node.target in _DROPOUTS:
            ones = add_call(graph, _ATEN.ones_like.default, node.args[:1], like=node, mode=mode)
            kept = add_call(graph, node.target, (ones, *node.args[1:]), like=node, mode=mode)
            made = add_call(graph, _ATEN.mul.Tensor, (node.args[0], kept), like=node, mode=mode)
        elif node.target is _ATTENTION:
            made = _inline(_attend, node)
        else:
            return False
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return True


def functional(target: Any) -> Any:
    """Return the op that returns what an in-place op would write; others unchanged."""
    if not is_op(target) or not target._schema.is_mutable:
        return target
    packet = getattr(_ATEN, target._schema.name.partition("::")[2].removesuffix("_"), None)
    found = getattr(packet, target._overloadname, target)
    return target if found._schema.is_mutable else found


def is_new(node: fx.Node) -> bool:
    """Return whether the result of a call has memory of its own."""
    if not is_op(node.target):
        return False
    schema = node.target._schema  # type: ignore[union-attr]
    return all(result.alias_info is None for result in schema.returns)


def _without_write(node: fx.Node) -> bool:
    """Replace a write of a whole tensor that has no view, and let later calls read the result."""
    into, target = node.args[0], functional(node.target)
    if target is node.target or not isinstance(into, fx.Node) or not is_new(into):
        return False
    others = [user for user in into.users if user is not node]
    if list_written_nodes(node) != (into,) or any(into in views(user) for user in others):
        return False
    node.target = target
    order = {each: place for place, each in enumerate(node.graph.nodes)}
    into.replace_all_uses_with(node, lambda user: order[user] > order[node])
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value)
    with fake_mode(node.graph), torch.no_grad():
        node.meta["val"] = target(*args, **kwargs)
    return True


def _inline(function: Callable[..., Any], node: fx.Node) -> fx.Node:
    """Insert the operations of a function of the node's arguments; return its result."""
    given: dict[str, Any] = {}
    for each in operation_schema(node.target).arguments:
        given[each.name] = argument(node, each.name, each.default_value)
    names = [name for name, held in given.items() if isinstance(held, fx.Node)]

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return function(**{**given, **dict(zip(names, tensors, strict=True))})  # type: ignore[no-any-return]

    with fake_mode(node.graph):
        traced = record_operations(call, *(value(given[name]) for name in names))
    placeholders = traced.graph.find_nodes(op="placeholder")
    env = {place: given[name] for place, name in zip(placeholders, names, strict=True)}
    mode = fake_mode(node.graph)
    for each in traced.graph.nodes:
        if each.op == "call_function":
            args, kwargs = fx.node.map_arg((each.args, dict(each.kwargs)), env.__getitem__)
            env[each] = add_call(node.graph, each.target, args, kwargs, like=node, mode=mode)
    made: fx.Node = env[traced.graph.output_node().args[0]]
    return made


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Return scaled dot-product attention by its formula, which drops weights.

    A row without any key is 0, as in torch.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = (query * factor) @ (key * factor).transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if attn_mask is None:
        weights = scores.softmax(-1)
    else:
        logical = attn_mask.dtype is torch.bool
        hidden = attn_mask.logical_not() if logical else attn_mask == -math.inf
        scores = scores if logical else scores + attn_mask.masked_fill(hidden, 0)
        lowest = torch.finfo(scores.dtype).min
        weights = scores.masked_fill(hidden, lowest).softmax(-1).masked_fill(hidden, 0)
    return torch.dropout(weights, dropout_p, True) @ value


def _without_statistics(op: Any, switch: str) -> Callable[..., torch.Tensor]:
    """Return a normalization that reads the batch's statistics and updates none."""

    def normalize(**given: Any) -> torch.Tensor:
        if given[switch]:
            given |= {"running_mean": None, "running_var": None}
        return op(*given.values())  # type: ignore[no-any-return]

    return normalize


def _reduce(terms: torch.Tensor, reduction: int) -> torch.Tensor:
    if reduction == _NONE:
        return terms
    return terms.mean() if reduction == _MEAN else terms.sum()


def _mse(self: torch.Tensor, target: torch.Tensor, reduction: int) -> torch.Tensor:
    return _reduce((self - target).square(), reduction)


def _l1(self: torch.Tensor, target: torch.Tensor, reduction: int) -> torch.Tensor:
    return _reduce((self - target).abs(), reduction)


def _smooth_l1(
    self: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> torch.Tensor:
    if beta == 0:
        return _l1(self, target, reduction)
    far = (self - target).abs()
    return _reduce(torch.where(far < beta, 0.5 * far.square() / beta, far - 0.5 * beta), reduction)


def _huber(self: torch.Tensor, target: torch.Tensor, reduction: int, delta: float) -> torch.Tensor:
    far = (self - target).abs()
    near = 0.5 * far.square()
    return _reduce(torch.where(far <= delta, near, delta * (far - 0.5 * delta)), reduction)


def _cross_entropy_of_chances(
    chances: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    smoothing: float,
    dim: int,
) -> torch.Tensor:
    target = target * (1 - smoothing) + smoothing / chances.shape[dim]
    return _reduce(-(_weighted(chances, weight, dim) * target).sum(dim), reduction)


def _weighted(chances: torch.Tensor, weight: torch.Tensor | None, dim: int) -> torch.Tensor:
    if weight is None:
        return chances
    return chances * weight.view([-1] + [1] * (chances.dim() - dim - 1))


def _cross_entropy(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    dim = min(self.dim() - 1, 1)
    chances = F.log_softmax(self, dim)
    if target.is_floating_point():
        return _cross_entropy_of_chances(chances, target, weight, reduction, label_smoothing, dim)
    return _nll(chances, target, weight, reduction, ignore_index, label_smoothing)


def _nll(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    smoothing: float = 0.0,
) -> torch.Tensor:
    """Return minus the log-probability of each target; a mean counts the targets by weight."""
    dim = min(self.dim() - 1, 1)
    counted = target != ignore_index
    index = torch.where(counted, target, 0)
    rates = counted.to(self.dtype) if weight is None else weight[index] * counted
    terms = -self.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    terms = torch.where(counted, terms, 0) * rates
    if smoothing:
        others = -_weighted(self, weight, dim).sum(dim) * (smoothing / self.shape[dim])
        terms = (1 - smoothing) * terms + torch.where(counted, others, 0)
    if reduction == _NONE:
        return terms
    return terms.sum() / rates.sum() if reduction == _MEAN else terms.sum()


def _hardshrink(self: torch.Tensor, lambd: float) -> torch.Tensor:
    return torch.where(self.abs() > lambd, self, 0)


def _softshrink(self: torch.Tensor, lambd: float) -> torch.Tensor:
    return torch.where(self.abs() > lambd, self - self.sign() * lambd, 0)


_CALLS: dict[Any, Callable[..., torch.Tensor]] = {
    _ATEN.batch_norm.default: _without_statistics(_ATEN.batch_norm.default, "training"),
    _ATEN.instance_norm.default: _without_statistics(
        _ATEN.instance_norm.default, "use_input_stats"
    ),
    _ATEN.mse_loss.default: _mse,
    _ATEN.l1_loss.default: _l1,
    _ATEN.smooth_l1_loss.default: _smooth_l1,
    _ATEN.huber_loss.default: _huber,
    _ATEN.cross_entropy_loss.default: _cross_entropy,
    _ATEN.nll_loss.default: _nll,
    _ATEN.nll_loss_nd.default: _nll,
    _ATEN.hardshrink.default: _hardshrink,
    _ATEN.softshrink.default: _softshrink,
}
