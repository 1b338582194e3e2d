"""Examples of the backwards of ops: consistent results and saved values of a forward."""

from __future__ import annotations

from typing import Any

import torch
from rule_drawing import ATEN, Draw, Maker
from rule_soundness import Example


def _mask(r: Draw, *possible: bool) -> list[bool]:
    """Which gradients are computed, at least one."""
    found = [can and r.yes() for can in possible]
    return found if any(found) else list(possible)


def _layer_norm(r: Draw) -> Example:
    shape = r.sizes(3, 2, 4)
    inner = shape[3 - r.size(1, 2) :]
    weight = r.real(*inner) if r.yes() else None
    x = r.real(*shape)
    _, mean, rstd = ATEN.native_layer_norm.default(x, inner, weight, weight, 1e-5)
    mask = _mask(r, True, weight is not None, weight is not None)
    args = (r.real(*shape), x, inner, mean, rstd, weight, weight, mask)
    return Example(ATEN.native_layer_norm_backward.default, args, frozen=(2, 3))


def _group_norm(r: Draw) -> Example:
    groups, rows = r.size(1, 6), r.size(2, 5)
    wide, space = groups * r.size(1, 3), r.sizes(r.size(1, 2), 2, 3)
    weight = r.real(wide) if r.yes() else None
    count = int(torch.tensor(space).prod())
    args = (r.real(rows, wide, *space), weight, weight, rows, wide, count, groups, 1e-5)
    return Example(ATEN.native_group_norm.default, args)


def _batch_norm(backward: bool) -> Maker:
    def make(r: Draw) -> Example:
        c, training = r.size(2, 5), r.yes()
        shape = [r.size(3, 6), c, *r.sizes(r.size(0, 2), 2, 3)]
        x, weight = r.real(*shape), r.chance(c) if r.yes() else None
        stats = (None, None) if training else (r.real(c), r.chance(c))
        given = (x, weight, weight, *stats, training, 0.1, 1e-5)
        if not backward:
            return Example(ATEN.native_batch_norm.default, given, gradients=training)
        _, *saved = ATEN.native_batch_norm.default(*given)
        mask = _mask(r, True, weight is not None, weight is not None)
        args = (r.real(*shape), x, weight, *stats, *saved, training, 1e-5, mask)
        frozen = tuple(range(2 + (weight is not None), 7))
        return Example(ATEN.native_batch_norm_backward.default, args, frozen=frozen)

    return make


def _batch_norm_of_rows(r: Draw) -> Example:
    c = r.size(2, 5)
    args = (r.real(r.size(3, 6), c, 2), r.chance(c), r.real(c), True, 0.1, 1e-5)
    return Example(ATEN._native_batch_norm_legit.no_stats, args)


def _softmax(op: Any, forward: Any) -> Maker:
    def make(r: Draw) -> Example:
        shape = r.sizes(r.size(1, 3), 2, 5)
        dim, x = r.dim(len(shape)), r.real(*shape)
        return Example(op, (r.real(*shape), forward(x, dim), dim, r.dtype))

    return make


def _glu(r: Draw) -> Example:
    shape = r.sizes(r.size(1, 3), 2, 4)
    dim = r.dim(len(shape))
    whole = list(shape)
    whole[dim] *= 2
    return Example(ATEN.glu_backward.default, (r.real(*shape), r.real(*whole), dim))


def _log_sigmoid(r: Draw) -> Example:
    x = r.real(*r.shape())
    args = (r.real(*x.shape), x, ATEN.log_sigmoid_forward.default(x)[1])
    return Example(ATEN.log_sigmoid_backward.default, args, frozen=(2,))


def _prelu(r: Draw) -> Example:
    shape = r.sizes(3, 2, 4)
    return Example(
        ATEN._prelu_kernel_backward.default, (r.real(*shape), r.real(*shape), r.real(*shape))
    )


def _convolution(r: Draw) -> Example:
    groups, transposed, space = r.pick([1, 1, 2, 4]), r.yes(), r.size(1, 2)
    c, o, rows = groups * r.size(1, 3), groups * r.size(1, 3), r.size(2, 4)
    weight = r.real(*((c, o // groups) if transposed else (o, c // groups)), *[2] * space)
    x = r.real(rows, c, *r.sizes(space, 3, 4))
    rest = ([r.size(1, 2)] * space, [0] * space, [1] * space, transposed, [0] * space, groups)
    out = ATEN.convolution.default(x, weight, None, *rest)
    # Kernels may compute the gradient of the weight unasked, with another shape.
    mask = [r.yes(), True, r.yes()] if space == 1 or r.yes() else [True, False, False]
    args = (r.real(*out.shape), x, weight, [o], *rest, mask)
    return Example(ATEN.convolution_backward.default, args)


def _pool(name: str, space: int, *rest: Any) -> Maker:
    """A backward of pooling or padding, whose forward may return indices too."""
    adaptive = "adaptive" in name

    def make(r: Draw) -> Example:
        x = r.real(r.size(2, 4), r.size(2, 4), *r.sizes(space, 4, 5))
        found = getattr(ATEN, name).default(x, *rest)
        out, saved = (found, ()) if isinstance(found, torch.Tensor) else (found[0], found[1:])
        op = getattr(ATEN, f"{name}_backward").default
        given = () if adaptive else rest
        return Example(op, (r.real(*out.shape), x, *given, *saved), frozen=(1,))

    return make


def _resize(kind: str, space: int, *rest: Any) -> Maker:
    def make(r: Draw) -> Example:
        shape, out = [*r.sizes(2, 2, 4), *r.sizes(space, 2, 3)], r.sizes(space, 4, 5)
        args = (r.real(*shape[:2], *out), out, shape, *rest)
        return Example(getattr(ATEN, f"upsample_{kind}_backward").default, args)

    return make


def _diagonal(r: Draw) -> Example:
    shape = r.sizes(3, 2, 4)
    first, second = r.pick([(0, 1), (0, 2), (1, 2), (-1, 0)])
    found = torch.zeros(shape).diagonal(0, first, second)
    args = (r.real(*found.shape), shape, 0, first, second)
    return Example(ATEN.diagonal_backward.default, args)


def _embedding(r: Draw) -> Example:
    where, width, rows = r.shape(1, 2), r.size(), r.size(3, 6)
    args = (r.real(*where, width), r.ints(rows, *where), rows, r.pick([-1, 0]), r.yes())
    return Example(ATEN.embedding_dense_backward.default, args)


def _products(r: Draw) -> Example:
    b, i, j, n = r.sizes(4, 2, 4)
    given = r.real(b, n), r.real(b, j), r.real(n, i, j)
    return Example(ATEN._trilinear.default, (*given, [2, 3], [1, 2], [0], [1, 3]))


_TWO = [2, 2]
_POOLS: dict[str, Maker] = {
    "max_pool2d_with_indices": _pool(
        "max_pool2d_with_indices", 2, _TWO, _TWO, [0, 0], [1, 1], False
    ),
    "max_pool3d_with_indices": _pool(
        "max_pool3d_with_indices", 3, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False
    ),
    **{
        f"avg_pool{d}d": _pool(f"avg_pool{d}d", d, [2] * d, [2] * d, [0] * d, False, True, None)
        for d in (2, 3)
    },
    **{
        f"{kind}_pad{d}d": _pool(f"{kind}_pad{d}d", d, [1, 2] * d)
        for d in (1, 2, 3)
        for kind in ("reflection", "replication")
    },
}


_BACKWARDS: dict[str, Maker] = {
    **_POOLS,
    **{
        f"{name}{d}d": _pool(f"{name}{d}d", d, [2] * d)
        for d in (2, 3)
        for name in ("_adaptive_avg_pool", "adaptive_max_pool")
    },
    "upsample_linear1d": _resize("linear1d", 1, False),
    "upsample_bilinear2d": _resize("bilinear2d", 2, False),
    "upsample_trilinear3d": _resize("trilinear3d", 3, False),
    "upsample_bicubic2d": _resize("bicubic2d", 2, False),
    **{f"upsample_nearest{d}d": _resize(f"nearest{d}d", d) for d in (1, 2, 3)},
}

EXAMPLES: dict[str, Maker] = {
    "aten.native_layer_norm_backward": _layer_norm,
    "aten.native_group_norm": _group_norm,
    "aten.native_batch_norm": _batch_norm(False),
    "aten._native_batch_norm_legit": _batch_norm_of_rows,
    "aten.native_batch_norm_backward": _batch_norm(True),
    "aten._softmax_backward_data": _softmax(ATEN._softmax_backward_data.default, torch.softmax),
    "aten._log_softmax_backward_data": _softmax(
        ATEN._log_softmax_backward_data.default, torch.log_softmax
    ),
    "aten.glu_backward": _glu,
    "aten.log_sigmoid_forward": lambda r: Example(
        ATEN.log_sigmoid_forward.default, (r.real(*r.shape()),)
    ),
    "aten.log_sigmoid_backward": _log_sigmoid,
    "aten._prelu_kernel_backward": _prelu,
    "aten.convolution_backward": _convolution,
    "aten.diagonal_backward": _diagonal,
    "aten.embedding_dense_backward": _embedding,
    "aten._trilinear": _products,
    **{f"aten.{name}_backward": make for name, make in _BACKWARDS.items()},
}
