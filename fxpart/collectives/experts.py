"""Mixture of experts as one op: each token through its k chosen experts, weighted and summed.

``torch.ops.fxpart.experts`` replaces about thirty ops around two grouped products: sort by expert,
gather rows, product, activation, product, weights, restore the token order, sum over k
(transformers' ``grouped_mm_experts_forward``). It runs the same ops in the same order, so results
are bit-identical. As one op it has sharding rules for tokens, experts and the experts' inner width.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

HALVES, PAIRS, WHOLE = "halves", "pairs", ""  # layout of gate and up in the first product
LOOP, GROUPED = "loop", "grouped"  # one product per expert, or aten._grouped_mm


class ExpertWeights(NamedTuple):
    """The experts' weights and computation.

    up: [E, 2I, H] ([E, I, H] without a gate), down: [E, H, I]; with ``plain``: [E, H, 2I] and [E,
    I, H]. Biases: [E, 2I] and [E, H]. body: the ops between the products, as parsed by
    :func:`statements`. parts: gate and up are the halves of the first product's columns, its even
    and odd columns, or there is no gate. product: LOOP or GROUPED.
    """

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    body: str
    parts: str
    plain: bool
    product: str


@dataclass(frozen=True)
class PointwiseStatement:
    """One pointwise op of a body; an argument is the number of an earlier value, or a literal."""

    op: Any
    args: tuple[tuple[bool, Any], ...]
    kwargs: tuple[tuple[str, Any], ...]


@cache
def statements(body: str) -> tuple[PointwiseStatement, ...]:
    """Parse ``"silu.default %0; mul.Tensor %2 %1"``: ATen pointwise ops on earlier values.

    %0 is the first product (its gate), %1 its up part if there is a gate, followed by the results
    in order; the last is the body's result. Raise ValueError for any other op.
    """
    found = []
    for line in filter(None, (part.strip() for part in body.split(";"))):
        name, *words = line.split()
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload)
        if torch.Tag.pointwise not in op.tags:
            raise ValueError(f"{name} is not a pointwise op")
        args = [w for w in words if "=" not in w]
        kwargs = [w.partition("=") for w in words if "=" in w]
        found.append(
            PointwiseStatement(
                op,
                tuple(
                    (True, int(w[1:])) if w.startswith("%") else (False, ast.literal_eval(w))
                    for w in args
                ),
                tuple((key, ast.literal_eval(value)) for key, _, value in kwargs),
            )
        )
    return tuple(found)


@torch.library.custom_op("fxpart::grouped_product", mutates_args=())
def grouped_product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply rows [S, A], sorted by expert, with their expert's matrix of [E, A, B]: [S, B].

    ends: [E], the end of each expert's rows. Rows after the last end give zeros.
    """
    result = rows.new_zeros(rows.size(0), weight.size(2))
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if start != end:
            torch.mm(rows[start:end], weight[expert], out=result[start:end])
            start = end
    return result


@grouped_product.register_fake
def _grouped_fake(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.size(0), weight.size(2))


@torch.library.custom_op("fxpart::grouped_product_backward", mutates_args=())
def grouped_product_backward(
    rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of rows and weight."""
    of_rows, of_weight = torch.zeros_like(rows), torch.zeros_like(weight)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if start != end:
            torch.mm(gradient[start:end], weight[expert].T, out=of_rows[start:end])
            torch.mm(rows[start:end].T, gradient[start:end], out=of_weight[expert])
            start = end
    return of_rows, of_weight


@grouped_product_backward.register_fake
def _backward_fake(
    rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.ends = inputs[2]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    of_rows, of_weight = torch.ops.fxpart.grouped_product_backward(
        *ctx.saved_tensors, ctx.ends, gradient
    )
    return of_rows, of_weight, None


grouped_product.register_autograd(_backward, setup_context=_keep)


def _product(
    rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    turned = weight if experts.plain else weight.transpose(-2, -1)
    result: torch.Tensor
    if experts.product == GROUPED:
        result = torch.ops.aten._grouped_mm.default(rows, turned, ends)
    else:
        result = torch.ops.fxpart.grouped_product(rows, turned, ends)
    return result


def apply_experts(
    rows: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Run rows [S, H], sorted by expert, through their experts.

    ids: [S], the expert of each row. ends: [E] int32, the end of each expert's rows.
    """
    inner = _product(rows, experts.up, ends, experts)
    if experts.up_bias is not None:
        inner = inner + experts.up_bias[ids]
    values = [inner]
    if experts.parts == HALVES:
        values = list(inner.chunk(2, -1))
    elif experts.parts == PAIRS:
        values = [inner[:, 0::2], inner[:, 1::2]]
    for step in statements(experts.body):
        args = [values[given] if earlier else given for earlier, given in step.args]
        values.append(step.op(*args, **dict(step.kwargs)))
    out = _product(values[-1], experts.down, ends, experts)
    return out if experts.down_bias is None else out + experts.down_bias[ids]


def experts(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    body: str,
    parts: str,
    plain: bool,
    product: str,
) -> torch.Tensor:
    """Run hidden [T, H] through the experts index [T, k] (int64), weighted by weights [T, k].

    The other arguments are those of :class:`ExpertWeights`.
    """
    layers = ExpertWeights(up, down, up_bias, down_bias, body, parts, plain, product)
    chosen = index.size(1)
    ids, order = torch.sort(index.reshape(-1))
    rows = hidden[order // chosen]
    weighed = weights.reshape(-1)[order]
    number = up.size(0)
    counted = ids.float() if ids.device.type in ("cpu", "mps") else ids.int()
    counts = torch.histc(counted, bins=number, min=0, max=number - 1)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    out = apply_experts(rows, ids, ends, layers) * weighed.unsqueeze(-1)
    place = torch.arange(order.size(0), device=order.device)
    back = torch.empty_like(order).index_put_((order,), place)
    return out[back].view(hidden.size(0), chosen, hidden.size(1)).sum(dim=1)


_LIBRARY = torch.library.Library("fxpart", "FRAGMENT")
_LIBRARY.define(
    "experts(Tensor hidden, Tensor index, Tensor weights, Tensor up, Tensor down, "
    "Tensor? up_bias, Tensor? down_bias, str body, str parts, bool plain, str product) -> Tensor"
)
_LIBRARY.impl("experts", experts, "CompositeImplicitAutograd")
