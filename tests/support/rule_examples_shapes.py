"""Examples of ops that change shapes, join and cut."""

from __future__ import annotations

from typing import Any

from rule_drawing import ATEN, Draw, Maker, along, like
from rule_soundness import Example


def _other_shape(r: Draw) -> tuple[list[int], list[int]]:
    """Two shapes of equal size that share some boundaries between dims."""
    primes = [r.pick([2, 2, 3, 4, 6, 1]) for _ in range(r.size(2, 4))]

    def grouped() -> list[int]:
        found = [1]
        for p in primes:
            if r.yes():
                found.append(p)
            else:
                found[-1] *= p
        return found if r.yes() else found[found[0] == 1 :] or [1]

    return grouped(), grouped()


def _view(op: Any, copy: bool = False) -> Maker:
    def make(r: Draw) -> Example:
        a, b = _other_shape(r)
        known = list(b)
        if r.yes():
            known[r.size(0, len(b) - 1)] = -1
        return Example(op, (r.real(*a), b if copy else known))

    return make


def _view_as(op: Any) -> Maker:
    def make(r: Draw) -> Example:
        a, b = _other_shape(r)
        return Example(op, (r.real(*a), r.real(*b)))

    return make


def _flatten(r: Draw) -> Example:
    shape = r.sizes(r.size(1, 4), 1, 4)
    a = r.size(0, len(shape) - 1)
    return Example(ATEN.flatten.using_ints, (r.real(*shape), a, r.size(a, len(shape) - 1)))


def _unflatten(r: Draw) -> Example:
    a, b, c = r.sizes(3, 2, 4)
    sizes = r.pick([[a, b], [a, -1], [-1, b], [a * b, 1]])
    shape, dim = r.pick([([a * b, c], 0), ([c, a * b], -1), ([c, a * b], 1), ([a * b], 0)])
    return Example(ATEN.unflatten.int, (r.real(*shape), dim, sizes))


def _permute(op: Any) -> Maker:
    def make(r: Draw) -> Example:
        shape = r.sizes(r.size(1, 4), 1, 4)
        order = r.random.sample(range(len(shape)), len(shape))
        return Example(op, (r.real(*shape), [d - len(shape) if r.yes() else d for d in order]))

    return make


def _swap(op: Any) -> Maker:
    def make(r: Draw) -> Example:
        shape = r.sizes(r.size(1, 4), 1, 5)
        return Example(op, (r.real(*shape), r.dim(len(shape)), r.dim(len(shape))))

    return make


def _move(op: Any) -> Maker:
    def make(r: Draw) -> Example:
        shape = r.sizes(3, 2, 4)
        a, b = (r.random.sample(range(3), 2) for _ in range(2))
        return Example(op, (r.real(*shape), a, b))

    return make


def _two(op: Any, low: int = 2, high: int = 2) -> Maker:
    return lambda r: Example(op, (r.real(*r.sizes(r.size(low, high))),))


def _unsqueeze(r: Draw) -> Example:
    shape = r.shape()
    return Example(ATEN.unsqueeze.default, (r.real(*shape), r.size(-len(shape) - 1, len(shape))))


def _squeeze(r: Draw) -> Example:
    shape = r.sizes(3, 1, 3)
    kinds: list[tuple[Any, tuple[Any, ...]]] = [
        (ATEN.squeeze.default, ()),
        (ATEN.squeeze.dim, (r.dim(3),)),
        (ATEN.squeeze.dims, ([0, -1],)),
    ]
    op, rest = r.pick(kinds)
    return Example(op, (r.real(*shape), *rest))


def _expand(op: Any) -> Maker:
    def make(r: Draw) -> Example:
        shape = r.sizes(r.size(2, 3), 2, 5)
        x = r.real(*r.broadcast(shape))
        other: Any = r.real(*shape) if op is ATEN.expand_as.default else shape
        return Example(op, (x, other))

    return make


def _repeat(r: Draw) -> Example:
    shape = r.shape(1, 2)
    times = [r.size(1, 4) for _ in range(r.size(len(shape), 3))]
    return Example(ATEN.repeat.default, (r.real(*shape), times))


def _interleave(r: Draw) -> Example:
    shape = r.shape(1, 3)
    args = (r.real(*shape), r.size(1, 4), r.dim(len(shape)))
    return Example(ATEN.repeat_interleave.self_int, args)


def _cat(op: Any) -> Maker:
    def make(r: Draw) -> Example:
        shape, dim = r.sizes(r.size(1, 3), 2, 5), 0
        dim = r.dim(len(shape))
        unit = r.pick([1, 2, 4])
        parts = []
        for _ in range(r.size(1, 3)):
            shape[dim] = unit * r.size(0, 3)
            parts.append(r.real(*shape))
        return Example(op, (parts, dim))

    return make


def _stack(r: Draw) -> Example:
    shape = r.shape()
    parts = [r.real(*shape) for _ in range(r.size(1, 3))]
    return Example(ATEN.stack.default, (parts, r.size(-len(shape) - 1, len(shape))))


def _split(op: Any) -> Maker:
    def make(r: Draw) -> Example:
        unit, count = r.size(1, 6), r.size(1, 3)
        shape, dim = r.sizes(2, 2, 5), r.dim(2)
        if "sizes" in op._schema.name:
            many = [unit * r.size(0, 3) for _ in range(count)]
            many[0] = many[0] or unit
            shape[dim] = sum(many)
            return Example(op, (r.real(*shape), many, dim))
        rest = 0 if r.yes() else r.size(0, unit - 1)
        shape[dim] = unit * count + rest
        return Example(op, (r.real(*shape), count if "chunk" in op._schema.name else unit, dim))

    return make


def _slice(r: Draw) -> Example:
    unit, count = r.size(1, 6), r.size(1, 4)
    shape, dim = r.sizes(2, 2, 5), r.dim(2)
    shape[dim] = size = unit * count
    start = r.pick([None, 0, unit, -unit, size // 2, 1])
    end = r.pick([None, size, 2 * unit, size // 2 + unit, 9223372036854775807])
    first = (start or 0) % (size + 1) if (start or 0) >= 0 else max(start + size, 0)  # type: ignore[operator]
    if end is not None and end <= first:
        end = None
    if first >= size and r.yes():  # otherwise the result is empty
        start = None
    return Example(ATEN.slice.Tensor, (r.real(*shape), dim, start, end, r.pick([1, 1, 1, 2])))


def _narrow(r: Draw) -> Example:
    shape, dim = r.sizes(2, 3, 6), r.dim(2)
    return Example(ATEN.narrow.default, (r.real(*shape), dim, 1, shape[dim] - 2))


def _select_scatter(r: Draw) -> Example:
    shape, dim = r.sizes(3, 2, 5), r.dim(3)
    part = list(shape)
    del part[dim]
    return Example(
        ATEN.select_scatter.default, (r.real(*shape), r.real(*part), dim, r.pick([0, -1, 1]))
    )


def _diagonal_scatter(r: Draw) -> Example:
    batch, rows, columns = r.sizes(3, 2, 5)
    whole, part = r.real(rows, batch, columns), r.real(batch, min(rows, columns))
    return Example(ATEN.diagonal_scatter.default, (whole, part, 0, 0, -1))


def _slice_backward(r: Draw) -> Example:
    shape, dim = r.sizes(3, 2, 6), r.dim(3) % 3
    part = [*shape[:dim], shape[dim] - 1, *shape[dim + 1 :]]
    args = (r.real(*part), shape, dim, 1, 9223372036854775807, 1)
    return Example(ATEN.slice_backward.default, args)


def _select_backward(r: Draw) -> Example:
    shape, dim = r.sizes(3, 2, 6), r.dim(3) % 3
    part = [*shape[:dim], *shape[dim + 1 :]]
    return Example(ATEN.select_backward.default, (r.real(*part), shape, dim, r.pick([0, -1, 1])))


def _slice_scatter(r: Draw) -> Example:
    shape, dim = r.sizes(2, 3, 6), r.dim(2)
    part = list(shape)
    if r.yes():
        return Example(
            ATEN.slice_scatter.default,
            (r.real(*shape), r.real(*part), dim, 0, 9223372036854775807),
        )
    part[dim] -= 1
    return Example(ATEN.slice_scatter.default, (r.real(*shape), r.real(*part), dim, 1))


def _diff(r: Draw) -> Example:
    shape, dim = r.sizes(2, 3, 5), r.dim(2)
    more = list(shape)
    more[dim] = 1
    return Example(ATEN.diff.default, (r.real(*shape), 1, dim, r.real(*more) if r.yes() else None))


def _pad(r: Draw) -> Example:
    mode, value = r.pick(
        [("constant", 0.0), ("constant", None), ("constant", 2.0), ("reflect", None)]
    )
    shape = r.sizes(3, 3, 5)
    padding = r.pick([[1, 0], [1, 2]] if mode == "reflect" else [[1, 0], [0, 0, 1, 1], [2, -1]])
    return Example(ATEN.pad.default, (r.real(*shape), padding, mode, value))


def _pads(name: str, space: int) -> Maker:
    def make(r: Draw) -> Example:
        shape = r.sizes(space + 2, 2, 4)
        return Example(getattr(ATEN, name).default, (r.real(*shape), [1] * (2 * space)))

    return make


def _glu(r: Draw) -> Example:
    shape, dim = r.sizes(2, 2, 6), r.dim(2)
    shape[dim] *= 2
    return Example(ATEN.glu.default, (r.real(*shape), dim))


_PADS = {
    **{f"reflection_pad{d}d": d for d in (1, 2, 3)},
    **{f"replication_pad{d}d": d for d in (1, 2, 3)},
    "constant_pad_nd": 1,
}


EXAMPLES: dict[str, Maker] = {
    "aten.view": _view(ATEN.view.default),
    "aten.reshape": _view(ATEN.reshape.default),
    "aten._unsafe_view": _view(ATEN._unsafe_view.default),
    "aten.view_as": _view_as(ATEN.view_as.default),
    "aten.reshape_as": _view_as(ATEN.reshape_as.default),
    "aten.view_copy": _view(ATEN.view_copy.default),
    "aten._reshape_copy": _view(ATEN._reshape_copy.default),
    "aten.flatten": _flatten,
    "aten.ravel": like(ATEN.ravel.default),
    "aten.unflatten": _unflatten,
    "aten.permute": _permute(ATEN.permute.default),
    "aten.permute_copy": _permute(ATEN.permute_copy.default),
    "aten.transpose": _swap(ATEN.transpose.int),
    "aten.swapaxes": _swap(ATEN.swapaxes.default),
    "aten.swapdims": _swap(ATEN.swapdims.default),
    "aten.t": _two(ATEN.t.default),
    "aten.numpy_T": _two(ATEN.numpy_T.default),
    "aten.mT": _two(ATEN.mT.default, 2, 3),
    "aten.adjoint": _two(ATEN.adjoint.default, 2, 3),
    "aten.movedim": _move(ATEN.movedim.intlist),
    "aten.moveaxis": _move(ATEN.moveaxis.intlist),
    "aten.unsqueeze": _unsqueeze,
    "aten.squeeze": _squeeze,
    "aten.expand": _expand(ATEN.expand.default),
    "aten.broadcast_to": _expand(ATEN.broadcast_to.default),
    "aten.expand_as": _expand(ATEN.expand_as.default),
    "aten.repeat": _repeat,
    "aten.repeat_interleave": _interleave,
    "aten.cat": _cat(ATEN.cat.default),
    "aten.concat": _cat(ATEN.concat.default),
    "aten.concatenate": _cat(ATEN.concatenate.default),
    "aten.stack": _stack,
    "aten.split": _split(ATEN.split.Tensor),
    "aten.chunk": _split(ATEN.chunk.default),
    "aten.split_with_sizes": _split(ATEN.split_with_sizes.default),
    "aten.split_with_sizes_copy": _split(ATEN.split_with_sizes_copy.default),
    "aten.split_copy": _split(ATEN.split_copy.Tensor),
    "aten.unsafe_split": _split(ATEN.unsafe_split.Tensor),
    "aten.unsafe_chunk": _split(ATEN.unsafe_chunk.default),
    "aten.unbind": along(ATEN.unbind.int),
    "aten.select": along(ATEN.select.int, -1),
    "aten.slice": _slice,
    "aten.slice_backward": _slice_backward,
    "aten.select_backward": _select_backward,
    "aten.narrow": _narrow,
    "aten.select_scatter": _select_scatter,
    "aten.slice_scatter": _slice_scatter,
    "aten.diff": _diff,
    "aten.pad": _pad,
    **{f"aten.{name}": _pads(name, d) for name, d in _PADS.items()},
    "aten.flip": lambda r: (lambda s: Example(ATEN.flip.default, (r.real(*s), [r.dim(len(s))])))(
        r.sizes(2)
    ),
    "aten.roll": lambda r: Example(ATEN.roll.default, (r.real(*r.sizes(2)), [1], [r.dim(2)])),
    "aten.tril": lambda r: Example(ATEN.tril.default, (r.real(*r.shape(0, 1), 4, 5), 1)),
    "aten.triu": lambda r: Example(ATEN.triu.default, (r.real(*r.shape(0, 1), 4, 5), -1)),
    "aten.glu": _glu,
    "aten.unfold": lambda r: Example(ATEN.unfold.default, (r.real(*r.sizes(2, 3)), r.dim(2), 2, 1)),
    "aten.diagonal_scatter": _diagonal_scatter,
    "aten.diagonal": lambda r: Example(ATEN.diagonal.default, (r.real(*r.sizes(3)), 0, 0, -1)),
}
