"""The order in which a random op draws its numbers: that of the whole operand's memory.

Dropout on a transposed tensor draws along its strides. A local operand may lie otherwise (what is
gathered is row-major), so it is turned to the whole one's order first, and the result is turned
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

# Ops that draw a number for each element of their first argument, in the order of its memory.
_ALONG = frozenset(
    f"aten.{name}"
    for name in ("dropout", "alpha_dropout", "bernoulli", "rand_like", "randn_like", "randint_like")
)

Order = tuple[int, ...]
_DRAWN, _DRAWN_PART = 3, 5  # where the operand stands: after key, index, op; and shape, placements
_SHARDED = re.compile(r"S\((\d+)")


def reorder_random_call(
    node: fx.Node, call: LocalCall, add: Callable[..., fx.Node]
) -> tuple[LocalCall, list[int] | None]:
    """The call with its operand in the whole one's order, and how its result is turned back.

    None where nothing is to be done. add: (target, args) -> a node before the call.
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
    """The operand's dims, the slowest in memory first; None for other ops than those here."""
    if packet_name(op_of(node)) not in _ALONG:
        return None
    drawn = value(node)
    if not isinstance(value(op_args(node)[0]), torch.Tensor) or not isinstance(drawn, torch.Tensor):
        return None
    return memory_order(drawn)  # that of a new tensor like the operand, which may have holes


def memory_order(held: torch.Tensor) -> Order:
    """Dims by stride, the largest first; dims of size 1 stay where they are."""
    strides = [hint(s) for s in held.stride()]
    long = [d for d in range(held.dim()) if hint(held.shape[d]) != 1]
    turned = iter(sorted(long, key=lambda d: -strides[d]))
    return tuple(next(turned) if d in long else d for d in range(held.dim()))


def is_dense(held: torch.Tensor, order: Order) -> bool:
    """Whether the elements lie one after another in this order."""
    step = 1
    for dim in reversed(order):
        size = hint(held.shape[dim])
        if size != 1 and hint(held.stride(dim)) != step:
            return False
        step *= size
    return True


def inverse(order: Order) -> list[int]:
    """The permutation that undoes another."""
    return [order.index(d) for d in range(len(order))]
