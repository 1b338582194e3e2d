"""Match the order in which a random op draws: that of the global operand's memory.

``rand_like`` of a transposed tensor draws along its strides. A local operand may have other strides
(a gathered tensor is row-major), so it is permuted to the global order and the result is permuted
back.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import fx

from fxpart.compiler.collective_calls import is_random_shard
from fxpart.compiler.effects import op_args, op_of, packet_name
from fxpart.compiler.graph_edit import value
from fxpart.compiler.tensor_sizes import hint

from .local_calls import LocalCall

# Ops that draw one value per element of their first argument, in memory order.
_ALONG = frozenset(
    f"aten.{name}"
    for name in (
        "bernoulli rand_like randn_like randint_like normal_functional exponential uniform "
        "geometric cauchy log_normal random"
    ).split()
)

Order = tuple[int, ...]
_DRAWN, _DRAWN_PART = 3, 5  # position of the operand, without and with shape and placements
_SHARDED = re.compile(r"S\((\d+)")


def reorder_random_call(
    node: fx.Node, call: LocalCall, add: Callable[..., fx.Node]
) -> tuple[LocalCall, list[int] | None]:
    """Return the call with its operand in global memory order, and the inverse permutation.

    The permutation is None if nothing changes. add: (target, args) -> a node before the call.
    """
    order = drawn_order(node)
    if order is None:
        return call, None
    part, plain = is_random_shard(call.target), tuple(range(len(order)))
    at = _DRAWN_PART if part else _DRAWN
    operand = call.args[at]
    if order == plain if part else is_dense(value(operand), order):
        return call, None
    if order != plain:
        operand = add(torch.ops.aten.permute.default, (operand, list(order)))
    if not part and not is_dense(value(operand), plain):
        operand = add(torch.ops.aten.contiguous.default, (operand,))
    args = [*call.args[:at], operand, *call.args[at + 1 :]]
    if part:
        args[0] = [args[0][d] for d in order]
        args[1] = _SHARDED.sub(lambda m: f"S({order.index(int(m[1]))}", args[1])
    return LocalCall(call.target, tuple(args), call.kwargs), inverse(order)


def drawn_order(node: fx.Node) -> Order | None:
    """Return the operand's dims, slowest in memory first; None for other ops."""
    if packet_name(op_of(node)) not in _ALONG:
        return None
    drawn = value(node)
    if not isinstance(value(op_args(node)[0]), torch.Tensor) or not isinstance(drawn, torch.Tensor):
        return None
    return memory_order(drawn)  # of a new tensor like the operand, which may not be dense


def memory_order(held: torch.Tensor) -> Order:
    """Return the dims by decreasing stride; dims of size 1 keep their position."""
    strides = [hint(s) for s in held.stride()]
    long = [d for d in range(held.dim()) if hint(held.shape[d]) != 1]
    turned = iter(sorted(long, key=lambda d: -strides[d]))
    return tuple(next(turned) if d in long else d for d in range(held.dim()))


def is_dense(held: torch.Tensor, order: Order) -> bool:
    """Return whether the elements are dense in memory in this order."""
    step = 1
    for dim in reversed(order):
        size = hint(held.shape[dim])
        if size != 1 and hint(held.stride(dim)) != step:
            return False
        step *= size
    return True


def inverse(order: Order) -> list[int]:
    """Return the inverse permutation."""
    return [order.index(d) for d in range(len(order))]
