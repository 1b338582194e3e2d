"""Communication bytes of a strategy, which decide between otherwise equal strategies.

Per rank, for an axis of p ranks and a tensor of B bytes: all-gather and reduce-scatter B (p-1)/p,
all-reduce twice that, all-to-all B (p-1)/p^2. Times p^2 / B these are integers.
"""

from __future__ import annotations

from fxpart.sharding import PARTIAL, REPLICATE, Placement, Shard

from .propagation_graph import PropagationOp, PropagationValue


def estimate_reshard_bytes(op: PropagationOp, name: str, axis: int) -> int:
    """Return the bytes (times p^2) of the reshards of a strategy, gradients included.

    An operand that is not placed yet is assumed to be placed as the op requests it.
    """
    assert op.ruled is not None
    made = op.ruled.along(name, axis)
    assert made is not None
    parts = op.ruled.parts[axis]
    total = 0
    for value, into, back in zip(op.inputs, made.operands, made.gradients, strict=True):
        gradient = back[0] if op.carries and value.op.carries else None
        total += value.bytes * _moved(value.placed[axis], into[0], gradient, parts)
    for value, out in zip(op.results, made.results, strict=True):
        total += value.bytes * sum(
            _moved(out[0], wanted, REPLICATE if op.carries else None, parts)
            for wanted in _wanted(value, axis, out[0])
        )
    return total


def _wanted(value: PropagationValue, axis: int, out: Placement | None) -> list[Placement]:
    """Return the placements requested of a result; a Partial result will be reduced."""
    placed = value.placed[axis]
    if value.pinned[axis] and placed is not None:
        return [placed]
    known = list(value.demands[axis])
    return known or ([REPLICATE] if out == PARTIAL else [])


def _moved(
    held: Placement | None, wanted: Placement | None, gradient: Placement | None, parts: int
) -> int:
    """Return the cost of one reshard and its gradient, in B / p^2. gradient: None if none flows."""
    gather = (parts - 1) * parts
    back = 0
    if wanted == REPLICATE and gradient == PARTIAL:
        back = 2 * gather if held in (None, REPLICATE, PARTIAL) else gather
    if held is None or held == wanted:
        return back
    if isinstance(wanted, Shard):
        if isinstance(held, Shard):
            return (parts - 1) * (1 if gradient is None else 2)
        return (gather if held == PARTIAL else 0) + (0 if gradient is None else gather)
    if wanted == REPLICATE:
        return back + (2 * gather if held == PARTIAL else gather)
    return gather if isinstance(held, Shard) else 0
