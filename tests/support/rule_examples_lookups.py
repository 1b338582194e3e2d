"""Examples of ops that look up and write by index, embeddings included."""

from __future__ import annotations

from typing import Any

import torch
from rule_drawing import ATEN, Draw, Maker
from rule_soundness import Example, Made


def _indices(r: Draw, below: int, shape: list[int]) -> torch.Tensor:
    return r.ints(below, *shape)


def _index(r: Draw) -> Example:
    shape = r.sizes(3, 2, 5)
    where = r.pick([[0], [1], [0, 1], [0, 2], [1, 2], [0, 1, 2], [2]])
    lead = r.shape(1, 2)
    given: list[Any] = [
        _indices(r, shape[d], r.broadcast(lead) or [1]) if d in where else None
        for d in range(max(where) + 1)
    ]
    return Example(ATEN.index.Tensor, (r.real(*shape), given))


def _index_put(r: Draw) -> Example:
    if r.yes():
        return _masked_put(r)
    shape = r.sizes(2, 3, 6)
    count = r.size(2, 3)
    rows = torch.randperm(shape[0], generator=r.generator)[:count]
    given: list[Any] = [rows] if r.yes() else [None, rows % shape[1]]
    gather = given[0] is not None
    values = r.real(count, shape[1]) if gather else r.real(shape[0], count)
    return Example(ATEN.index_put.default, (r.real(*shape), given, values, not gather))


def _masked_put(r: Draw) -> Example:
    shape, masked = r.sizes(3, 2, 6), r.pick([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)])
    mask = r.real(*shape[slice(*masked)]) > 0
    values = r.pick(
        [[], [1], [1, *shape[masked[1] :]], [*shape[: masked[0]], 1, *shape[masked[1] :]]]
    )
    given: list[Any] = [*[None] * masked[0], mask]
    return Example(ATEN.index_put.default, (r.real(*shape), given, r.real(*values), r.yes()))


def _gather(r: Draw) -> Example:
    shape, dim = r.sizes(2, 3, 5), r.dim(2)
    index = [s if r.random.random() < 0.7 else s - 1 for s in shape]
    index[dim] = r.size(2, 6)
    return Example(ATEN.gather.default, (r.real(*shape), dim, _indices(r, shape[dim], index)))


def _take_along(r: Draw) -> Example:
    made = _gather(r)
    x, dim, index = made.args
    other = [s if d == dim % 2 else x.shape[d] for d, s in enumerate(index.shape)]
    return Example(ATEN.take_along_dim.default, (x, _indices(r, x.shape[dim], other), dim))


def _scatter(op: Any, *rest: Any) -> Maker:
    def make(r: Draw) -> Example:
        shape, dim = r.sizes(2, 3, 5), r.dim(2)
        count = list(shape)
        at = dim % 2
        count[at] = r.size(2, shape[at])
        order = torch.rand(shape, generator=r.generator).argsort(at).narrow(at, 0, count[at])
        if r.random.random() < 0.3:
            order = order.narrow(1 - at, 0, shape[1 - at] - 1)
        if op is ATEN.scatter.value:
            return Example(op, (r.real(*shape), dim, order, r.pick([0, 2.0])))
        return Example(op, (r.real(*shape), dim, order, r.real(*order.shape), *rest))

    return make


def _reduced_scatter(r: Draw) -> Example:
    kind = r.pick(["sum", "mean", "amax"])
    return _scatter(ATEN.scatter_reduce.two, kind)(r)


def _index_rows(op: Any) -> Maker:
    def make(r: Draw) -> Example:
        shape, dim = r.sizes(2, 3, 5), r.dim(2)
        source = list(shape)
        source[dim] = shape[dim] - 1
        index = torch.randperm(shape[dim], generator=r.generator)[: source[dim]]
        if op is ATEN.index_fill.int_Scalar:
            return Example(op, (r.real(*shape), dim, index, r.pick([0, 1.5])))
        return Example(op, (r.real(*shape), dim, index, r.real(*source)))

    return make


def _index_select(r: Draw) -> Example:
    shape, dim = r.sizes(2, 2, 5), r.dim(2)
    return Example(
        ATEN.index_select.default, (r.real(*shape), dim, _indices(r, shape[dim], [r.size(1, 6)]))
    )


def own_rows(r: Draw) -> Example:
    """Rows by an arange over all of them, as attention masks are looked up."""
    rows, length, width = r.sizes(3)
    first = Made(ATEN.unsqueeze.default, (Made(ATEN.arange.default, (rows,)), 1))
    second = _indices(r, length, [1, width])
    return Example(ATEN.index.Tensor, (r.real(rows, length), [first, second]))


def _table(r: Draw, mode: int | None = None) -> tuple[torch.Tensor, int, int]:
    rows, width = r.size(3, 9), r.size()
    return r.real(rows, width), rows, width


def _embedding(r: Draw) -> Example:
    table, rows, _ = _table(r)
    padding = r.pick([-1, 0, rows - 1])
    indices = r.ints(rows, *r.shape(1, 2))
    scaled = r.random.random() < 0.2
    sparse = not scaled and r.yes()
    return Example(ATEN.embedding.default, (table, indices, padding, scaled, sparse))


def _bags(op: Any) -> Maker:
    def make(r: Draw) -> Example:
        table, rows, _ = _table(r)
        count, length = r.size(2, 5), r.size(1, 4)
        indices = r.ints(rows, count * length)
        mode = r.pick([0, 1, 2])
        weights = r.real(count * length) if mode == 0 and r.yes() else None
        offsets: Any = Made(ATEN.arange.start_step, (0, count * length, length))
        if r.random.random() < 0.4:
            offsets = torch.cat([torch.zeros(1, dtype=torch.long),
                                 r.ints(count * length, count - 1).sort().values])  # fmt: skip
        padding = r.pick([None, 0]) if op is ATEN.embedding_bag.padding_idx else r.pick([-1, 0])
        sparse = mode != 2 and r.yes()
        return Example(op, (table, indices, offsets, False, mode, sparse, weights, False, padding))

    return make


EXAMPLES: dict[str, Maker] = {
    "aten.index": lambda r: r.pick([_index, own_rows])(r),
    "aten.index_put": _index_put,
    "aten.gather": _gather,
    "aten.take_along_dim": _take_along,
    "aten.scatter": lambda r: _scatter(r.pick([ATEN.scatter.src, ATEN.scatter.value]))(r),
    "aten.scatter_add": _scatter(ATEN.scatter_add.default),
    "aten.scatter_reduce": _reduced_scatter,
    "aten.index_add": _index_rows(ATEN.index_add.default),
    "aten.index_copy": _index_rows(ATEN.index_copy.default),
    "aten.index_fill": _index_rows(ATEN.index_fill.int_Scalar),
    "aten.index_select": _index_select,
    "aten.embedding": _embedding,
    "aten.embedding_bag": _bags(ATEN.embedding_bag.padding_idx),
    "aten._embedding_bag": _bags(ATEN._embedding_bag.default),
}
