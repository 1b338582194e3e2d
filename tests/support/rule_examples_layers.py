"""Examples of norms, losses and ops on images."""

from __future__ import annotations

from typing import Any

from rule_drawing import ATEN, Draw, Maker, along
from rule_soundness import Example


def _layer_norm(op: Any) -> Maker:
    def make(r: Draw) -> Example:
        shape = r.sizes(3, 2, 4)
        inner = shape[3 - r.size(1, 2) :]
        weight = r.real(*inner) if op is ATEN.native_layer_norm.default or r.yes() else None
        bias = r.real(*inner) if weight is not None else None
        if op is ATEN.rms_norm.default or op is ATEN._fused_rms_norm.default:
            return Example(op, (r.real(*shape), inner, r.real(*inner), 1e-5))
        return Example(op, (r.real(*shape), inner, weight, bias, 1e-5))

    return make


def _group_norm(r: Draw) -> Example:
    groups, each = r.size(1, 6), r.size(1, 3)
    shape = [r.size(2, 5), groups * each, *r.sizes(r.size(1, 2), 1, 3)]
    weight = r.real(groups * each) if r.yes() else None
    return Example(ATEN.group_norm.default, (r.real(*shape), groups, weight, weight, 1e-5, False))


def _batch_norm(r: Draw) -> Example:
    c = r.size(2, 5)
    shape = [r.size(3, 6), c, *r.sizes(r.size(0, 2), 2, 3)]
    weight = r.chance(c) if r.yes() else None
    training = r.yes()
    args = (r.real(*shape), weight, weight, r.real(c), r.chance(c), training, 0.1, 1e-5, False)
    frozen = (1, 2) if weight is None else (3, 4)
    return Example(ATEN.batch_norm.default, args, frozen=frozen)


def _instance_norm(r: Draw) -> Example:
    c = r.size(2, 5)
    shape = [r.size(2, 4), c, *r.sizes(r.size(1, 2), 2, 3)]
    stats = (r.real(c), r.chance(c)) if r.yes() else (None, None)
    return Example(
        ATEN.instance_norm.default,
        (r.real(*shape), r.real(c), r.real(c), *stats, True, 0.1, 1e-5, False),
        frozen=(3, 4),
    )


def _elementwise(name: str) -> Maker:
    op = getattr(ATEN, name).default

    def make(r: Draw) -> Example:
        shape = r.sizes(r.size(1, 3), 2, 5)
        target = r.chance(*shape)
        reduction = r.size(0, 2)
        if name in ("soft_margin_loss", "hinge_embedding_loss"):
            target = target.round() * 2 - 1
        middle: tuple[Any, ...] = ()
        if name.startswith("binary"):
            middle = (r.chance(*r.broadcast(shape)) if r.yes() else None,)
            middle = (*middle, None) if name.endswith("logits") else middle
        if name == "hinge_embedding_loss":
            middle = (1.0,)
        if name == "poisson_nll_loss":
            middle = (True, False, 1e-8)
        last = (1.0,) if name in ("smooth_l1_loss", "huber_loss") else ()
        frozen = (2,) if name.startswith("binary") else (1,) if name == "soft_margin_loss" else ()
        return Example(op, (r.chance(*shape), target, *middle, reduction, *last), frozen=frozen)

    return make


def _cross_entropy(r: Draw) -> Example:
    rows, classes = r.size(3, 6), r.size(3, 6)
    reduction, smoothing = r.size(0, 2), r.pick([0.0, 0.0, 0.1])
    weight = r.chance(classes) if r.yes() else None
    kind = r.pick(["rows", "rows", "rows", "chances", "one", "places"])
    lead, space = ([], []) if kind == "one" else ([rows], [2] if kind == "places" else [])
    logits = r.real(*lead, classes, *space)
    if kind == "chances":
        target = logits.softmax(1)
    else:
        target = r.ints(classes, *lead, *space)
        if kind == "rows":
            target[0] = -100
    args = (logits, target, weight, reduction, -100, smoothing)
    return Example(ATEN.cross_entropy_loss.default, args, frozen=(2,))


def _nll(op: Any) -> Maker:
    def make(r: Draw) -> Example:
        rows, classes = r.size(3, 6), r.size(3, 5)
        space = [2, 3] if op is ATEN.nll_loss2d.default else []
        target = r.ints(classes, rows, *space)
        target[-1] = 1
        weight = r.chance(classes) if r.yes() else None
        args = (r.real(rows, classes, *space), target, weight, r.size(0, 2), r.pick([1, -100]))
        return Example(op, args, frozen=(2,))

    return make


def _ctc(r: Draw) -> Example:
    length, rows, classes, labels = r.size(6, 9), r.size(2, 5), r.size(3, 5), r.size(1, 3)
    chances = r.real(length, rows, classes).log_softmax(-1)
    lengths = r.ints(1, rows) + length, r.ints(1, rows) + labels
    args = (chances, 1 + r.ints(classes - 1, rows, labels), *lengths, 0, r.size(0, 2), True)
    return Example(ATEN.ctc_loss.Tensor, args, frozen=(1, 2, 3))


def _image(
    op: Any, space: int, *rest: Any, low: int = 4, high: int = 5, batched: bool = False
) -> Maker:
    def make(r: Draw) -> Example:
        lead = [r.size(2, 4), r.size(2, 4)]
        lead = lead if batched or r.yes() else lead[:1]
        return Example(op, (r.real(*lead, *r.sizes(space, low, high)), *rest))

    return make


def _shuffle(r: Draw) -> Example:
    c = r.size(1, 6)
    return Example(ATEN.pixel_shuffle.default, (r.real(*r.shape(0, 1), 4 * c, 2, 3), 2))


def _unshuffle(r: Draw) -> Example:
    return Example(ATEN.pixel_unshuffle.default, (r.real(*r.shape(0, 1), r.size(1, 6), 4, 6), 2))


def _im2col(r: Draw) -> Example:
    lead = [r.size(2, 3)] if r.yes() else []
    x = r.real(*lead, r.size(1, 4), 4, 4)
    return Example(ATEN.im2col.default, (x, [2, 2], [1, 1], [0, 0], [1, 1]))


def _col2im(r: Draw) -> Example:
    lead = [r.size(2, 3)] if r.yes() else []
    x = r.real(*lead, 4 * r.size(1, 4), 9)
    return Example(ATEN.col2im.default, (x, [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]))


def _grid(op: Any, few: int, most: int | None = None) -> Maker:
    def make(r: Draw) -> Example:
        space = r.size(few, most or few)
        n, c = r.sizes(2, 2, 4)
        x = r.real(n, c, *r.sizes(space, 2, 3))
        return Example(op, (x, r.real(n, *r.sizes(space, 2, 3), space), 0, 0, False))

    return make


def _affine_grid(r: Draw) -> Example:
    n, space = r.size(2, 5), r.size(2, 3)
    size = [n, r.size(1, 3), *r.sizes(space, 2, 3)]
    return Example(ATEN.affine_grid_generator.default, (r.real(n, space, space + 1), size, False))


LOSSES = """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
binary_cross_entropy_with_logits soft_margin_loss kl_div poisson_nll_loss hinge_embedding_loss
""".split()

_IMAGES: dict[str, Maker] = {
    **{
        f"avg_pool{d}d": _image(getattr(ATEN, f"avg_pool{d}d").default, d, [2] * d)
        for d in (1, 2, 3)
    },
    **{
        f"max_pool{d}d": _image(getattr(ATEN, f"max_pool{d}d").default, d, [2] * d)
        for d in (1, 2, 3)
    },
    **{
        f"adaptive_avg_pool{d}d": _image(
            getattr(ATEN, f"adaptive_avg_pool{d}d").default, d, [2] * d
        )
        for d in (1, 2, 3)
    },
    **{
        f"adaptive_max_pool{d}d": _image(
            getattr(ATEN, f"adaptive_max_pool{d}d").default, d, [2] * d
        )
        for d in (1, 2, 3)
    },
    **{
        f"_adaptive_avg_pool{d}d": _image(
            getattr(ATEN, f"_adaptive_avg_pool{d}d").default, d, [2] * d
        )
        for d in (2, 3)
    },
    **{
        f"max_pool{d}d_with_indices": _image(
            getattr(ATEN, f"max_pool{d}d_with_indices").default, d, [2] * d
        )
        for d in (2, 3)
    },
    "upsample_linear1d": _image(ATEN.upsample_linear1d.default, 1, [7], False, batched=True),
    "upsample_bilinear2d": _image(ATEN.upsample_bilinear2d.default, 2, [7, 6], False, batched=True),
    "upsample_trilinear3d": _image(
        ATEN.upsample_trilinear3d.default, 3, [4, 4, 3], False, low=2, high=3, batched=True
    ),
    "upsample_bicubic2d": _image(ATEN.upsample_bicubic2d.default, 2, [7, 6], False, batched=True),
    **{
        f"{a}upsample_nearest{b}{d}d": _image(
            getattr(ATEN, f"{a}upsample_nearest{b}{d}d").default,
            d,
            [6] * d,
            low=2,
            high=3,
            batched=True,
        )
        for d in (1, 2, 3)
        for a, b in (("", ""), ("_", "_exact"))
    },
    "pixel_shuffle": _shuffle,
    "pixel_unshuffle": _unshuffle,
    "im2col": _im2col,
    "col2im": _col2im,
    "affine_grid_generator": _affine_grid,
    "grid_sampler": _grid(ATEN.grid_sampler.default, 2, 3),
    "grid_sampler_2d": _grid(ATEN.grid_sampler_2d.default, 2),
    "grid_sampler_3d": _grid(ATEN.grid_sampler_3d.default, 3),
}

EXAMPLES: dict[str, Maker] = {
    **{
        f"aten.{n}": _layer_norm(getattr(ATEN, n).default)
        for n in ("layer_norm", "rms_norm", "_fused_rms_norm", "native_layer_norm")
    },
    "aten.group_norm": _group_norm,
    "aten.batch_norm": _batch_norm,
    "aten.instance_norm": _instance_norm,
    **{f"aten.{n}": along(getattr(ATEN, n).int) for n in ("softmax", "log_softmax")},
    "aten._softmax": along(ATEN._softmax.default, False),
    "aten._log_softmax": along(ATEN._log_softmax.default, False),
    "aten._safe_softmax": along(ATEN._safe_softmax.default),
    **{f"aten.{n}": along(getattr(ATEN, n).default) for n in ("cumsum", "cumprod", "logcumsumexp")},
    **{f"aten.{n}": _elementwise(n) for n in LOSSES},
    "aten.cross_entropy_loss": _cross_entropy,
    "aten.ctc_loss": _ctc,
    "aten.nll_loss": _nll(ATEN.nll_loss.default),
    "aten.nll_loss_nd": _nll(ATEN.nll_loss_nd.default),
    "aten.nll_loss2d": _nll(ATEN.nll_loss2d.default),
    **{f"aten.{n}": m for n, m in _IMAGES.items()},
}
