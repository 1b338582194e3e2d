"""Rules for ops that only change the shape, with compound factors from the sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from .schema_call import (
    Dim,
    Entry,
    SchemaCall,
    Shape,
    UncoveredCallError,
    is_one,
    ratio,
    result_size,
    same,
    with_argument,
)
from .sharding_rule import Arguments, Localise, ShardingRule, Size

_LINEAR = ("self", "input")  # the name of the only operand


def chains(source: Shape, target: Shape) -> tuple[list[Dim], list[Dim], dict[str, Size]]:
    """Return the factors that two row-major shapes of equal size share, and each factor's size.

    Both are read from the major end: a common divisor of both remainders is a shared factor. If
    there is none, everything up to the next common boundary is not sharded (factors with ``_``).
    """
    sizes: dict[str, Size] = {}
    left, right = _ShapeReader(source), _ShapeReader(target)
    while left.open and right.open:
        a, b = left.rest, right.rest
        if same(a, b):
            shared: Size | None = a
        elif (by := ratio(a, b)) is not None:
            shared = b if by is not None else None
        elif ratio(b, a) is not None:
            shared = a
        else:
            shared = math.gcd(a, b) if isinstance(a, int) and isinstance(b, int) else None
        if shared is None or is_one(shared):
            left.close("_i", sizes)
            right.close("_o", sizes)
            continue
        name = f"f{len(sizes)}"
        sizes[name] = shared
        left.take(name, shared)
        right.take(name, shared)
    return left.dims, right.dims, sizes


class _ShapeReader:
    """Reads a shape from its major end, factor by factor; dims of size 1 are skipped."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._names: list[list[str]] = [[] for _ in shape]
        self._at = -1
        self.rest: Size = 1
        self._next()

    def _next(self) -> None:
        self._at += 1
        while self._at < len(self.shape) and is_one(self.shape[self._at]):
            self._at += 1
        self.open = self._at < len(self.shape)
        if self.open:
            self.rest = self.shape[self._at]

    def take(self, name: str, size: Size) -> None:
        """Take the next factor of the current dim."""
        self._names[self._at].append(name)
        left = 1 if same(self.rest, size) else ratio(self.rest, size)
        assert left is not None, "a factor divides what is left of its dim"
        self.rest = left
        if is_one(self.rest):
            self._next()

    def close(self, prefix: str, sizes: dict[str, Size]) -> None:
        """Mark the remainder of this dim, and all following dims, as not sharded."""
        while self.open:
            name = f"{prefix}{self._at}"
            self._names[self._at].append(name)
            sizes[name] = self.rest
            self._next()

    @property
    def dims(self) -> list[Dim]:
        """The factors of each dim."""
        return [tuple(names) for names in self._names]


def reshaped(call: SchemaCall, localise: Localise | None) -> ShardingRule:
    """Return the rule of an op that returns the same elements in another shape."""
    source, target = call.operands[0][1], call.results[0]
    if any(is_zero(s) for s in (*source, *target)):
        raise UncoveredCallError
    inside, outside, sizes = chains(source, target)
    rest: list[list[Dim]] = [[""] * len(shape) for _, shape in call.operands[1:]]
    linear = [] if rest else [call.operands[0][0]]
    return call.rule([inside, *rest], [outside], sizes=sizes, linear=linear, localise=localise)


def is_zero(size: Size) -> bool:
    """Return whether a size is the number 0."""
    return isinstance(size, int) and size == 0


def _view(call: SchemaCall) -> ShardingRule:
    if "dtype" in call.given:
        raise UncoveredCallError
    return reshaped(call, result_size("size" if "size" in call.given else "shape"))


def _view_as(call: SchemaCall) -> ShardingRule:
    """Rule for view_as and reshape_as: the other operand is sharded like the result."""
    source, target = call.operands[0][1], call.results[0]
    if any(is_zero(s) for s in (*source, *target)):
        raise UncoveredCallError
    inside, outside, sizes = chains(source, target)
    return call.rule([inside, outside], [outside], sizes=sizes)


def _flatten(call: SchemaCall) -> ShardingRule:
    return reshaped(call, None)


def _unflatten(call: SchemaCall) -> ShardingRule:
    def localise(
        node: fx.Node, arguments: Arguments, operands: Sequence[Shape], results: Sequence[Shape]
    ) -> Arguments:
        at = call.dim("dim", len(operands[0]))
        count = len(results[0]) - len(operands[0]) + 1
        return with_argument(node, arguments, "sizes", list(results[0][at : at + count]))

    return reshaped(call, localise)


def _rearranged(call: SchemaCall, order: Sequence[int]) -> ShardingRule:
    dims: list[Dim] = [f"d{i}" for i in range(len(order))]
    name = call.operands[0][0]
    return call.rule([dims], [[dims[i] for i in order]], linear=[name])


def _permute(call: SchemaCall) -> ShardingRule:
    rank = len(call.operands[0][1])
    return _rearranged(call, [int(d) % rank for d in call.given["dims"]])


def _transpose(call: SchemaCall) -> ShardingRule:
    rank = len(call.operands[0][1])
    names = ("dim0", "dim1") if "dim0" in call.given else ("axis0", "axis1")
    a, b = (call.dim(name, rank) for name in names)
    order = list(range(rank))
    if rank:
        order[a], order[b] = order[b], order[a]
    return _rearranged(call, order)


def _reversed(call: SchemaCall) -> ShardingRule:
    """Rule for t() and numpy_T: all dims in reverse."""
    return _rearranged(call, list(reversed(range(len(call.operands[0][1])))))


def _last_two(call: SchemaCall) -> ShardingRule:
    rank = len(call.operands[0][1])
    return _rearranged(call, [*range(rank - 2), *reversed(range(max(rank - 2, 0), rank))])


def _movedim(call: SchemaCall) -> ShardingRule:
    rank = len(call.operands[0][1])
    given = [call.given[name] for name in ("source", "destination")]
    source, target = ([int(d) % rank for d in (g if isinstance(g, list | tuple) else [g])]
                      for g in given)  # fmt: skip
    order = [-1] * rank
    for s, t in zip(source, target, strict=True):
        order[t] = s
    others = iter(d for d in range(rank) if d not in source)
    return _rearranged(call, [next(others) if d < 0 else d for d in order])


def _unsqueeze(call: SchemaCall) -> ShardingRule:
    shape = call.operands[0][1]
    at = call.dim("dim", len(shape) + 1)
    dims: list[Dim] = [f"d{i}" for i in range(len(shape))]
    return call.rule([dims], [[*dims[:at], "", *dims[at:]]], linear=_LINEAR)


def _squeeze(call: SchemaCall) -> ShardingRule:
    """Rule for squeeze; named dims that are not 1 are not sharded, since shards might be 1."""
    shape = call.operands[0][1]
    wanted = call.dims("dim", len(shape)) if "dim" in call.given else set(range(len(shape)))
    gone = {d for d in wanted if d < len(shape) and is_one(shape[d])}
    several = isinstance(call.given.get("dim"), list | tuple)  # may include other dims
    kept = set() if several else wanted - gone
    dims: list[Dim] = [f"{'_' if i in kept else ''}d{i}" for i in range(len(shape))]
    out = [d for i, d in enumerate(dims) if i not in gone]

    def localise(
        node: fx.Node, arguments: Arguments, _: Sequence[Shape], __: Sequence[Shape]
    ) -> Arguments:
        return with_argument(node, arguments, "dim", sorted(gone))

    return call.rule([dims], [out], linear=_LINEAR, localise=localise if several else None)


def _expand(call: SchemaCall) -> ShardingRule:
    """Rule for expand: a repeated dim is a factor of the result only."""
    shape, out = call.operands[0][1], call.results[0]
    dims: list[Dim] = [f"d{i}" for i in range(len(out))]
    inside = dims[len(out) - len(shape) :]
    rest: list[list[Dim]] = [[""] * len(s) for _, s in call.operands[1:]]
    if rest:  # expand_as: the other operand only provides its shape
        rest = [list(dims)]
    localise = None if rest else result_size("size")
    linear = [] if rest else _LINEAR
    return call.rule([inside, *rest], [dims], linear=linear, localise=localise)


def _repeat(call: SchemaCall) -> ShardingRule:
    """Rule for repeat: each dim of the result is [repeats, size]."""
    shape, out = call.operands[0][1], call.results[0]
    padded: list[Size] = [*[1] * (len(out) - len(shape)), *shape]
    sizes: dict[str, Size] = {}
    inside: list[Dim] = []
    outside: list[Dim] = []
    for i, (size, whole) in enumerate(zip(padded, out, strict=True)):
        times = ratio(whole, size)
        if times is None:
            raise UncoveredCallError
        sizes |= {f"r{i}": times, f"d{i}": size}
        inside.append((f"d{i}",))
        outside.append((f"r{i}", f"d{i}"))

    def localise(
        node: fx.Node, arguments: Arguments, operands: Sequence[Shape], results: Sequence[Shape]
    ) -> Arguments:
        had = [*[1] * (len(results[0]) - len(operands[0])), *operands[0]]
        times = [r // h for r, h in zip(results[0], had, strict=True)]
        return with_argument(node, arguments, "repeats", times)

    return call.rule(
        [inside[len(out) - len(shape) :]],
        [outside],
        sizes=sizes,
        linear=_LINEAR,
        localise=localise,
    )


def _interleave(call: SchemaCall) -> ShardingRule:
    """Rule for repeat_interleave by a number: a dim of the result is [size, repeats]."""
    shape = call.operands[0][1]
    repeats = call.number("repeats")
    if len(call.operands) != 1 or not isinstance(repeats, int) or call.given.get("dim") is None:
        raise UncoveredCallError
    at = call.dim("dim", len(shape))
    dims: list[Dim] = [f"d{i}" for i in range(len(shape))]
    out = list(dims)
    out[at] = ("n", "r")
    inside = list(dims)
    inside[at] = ("n",)

    def localise(
        node: fx.Node, arguments: Arguments, operands: Sequence[Shape], results: Sequence[Shape]
    ) -> Arguments:
        found = with_argument(node, arguments, "repeats", results[0][at] // operands[0][at])
        return with_argument(node, found, "output_size", None)

    return call.rule(
        [inside], [out], sizes={"n": shape[at], "r": repeats}, linear=_LINEAR, localise=localise
    )


TABLE: dict[str, Entry] = {
    **dict.fromkeys(("aten.view", "aten.reshape", "aten._unsafe_view"), _view),
    **dict.fromkeys(("aten.view_copy", "aten._reshape_copy"), _view),
    **dict.fromkeys(("aten.view_as", "aten.reshape_as"), _view_as),
    "aten.flatten": _flatten,
    "aten.ravel": _flatten,
    "aten.unflatten": _unflatten,
    "aten.permute": _permute,
    "aten.permute_copy": _permute,
    **dict.fromkeys(("aten.transpose", "aten.swapaxes", "aten.swapdims"), _transpose),
    **dict.fromkeys(("aten.t", "aten.numpy_T"), _reversed),
    **dict.fromkeys(("aten.mT", "aten.adjoint"), _last_two),
    **dict.fromkeys(("aten.movedim", "aten.moveaxis"), _movedim),
    "aten.unsqueeze": _unsqueeze,
    "aten.squeeze": _squeeze,
    **dict.fromkeys(("aten.expand", "aten.broadcast_to", "aten.expand_as"), _expand),
    "aten.repeat": _repeat,
    "aten.repeat_interleave": _interleave,
}
