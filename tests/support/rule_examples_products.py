"""Examples of products, convolutions, recurrent layers, experts, distances and attention."""

from __future__ import annotations

from typing import Any

import torch
from rule_drawing import ATEN, Draw, Maker
from rule_soundness import Example


def _linear(r: Draw) -> Example:
    k, n = r.size(), r.size()
    bias = r.real(n) if r.yes() else None
    return Example(ATEN.linear.default, (r.real(*r.shape(0, 2), k), r.real(n, k), bias))


def _plain(op: Any, batched: bool) -> Maker:
    def make(r: Draw) -> Example:
        b, m, k, n = r.sizes(4)
        lead = (b,) if batched else ()
        return Example(op, (r.real(*lead, m, k), r.real(*lead, k, n)))

    return make


def _matmul(r: Draw) -> Example:
    m, k, n = r.sizes(3)
    lead = r.shape(0, 2)
    left = [k] if r.random.random() < 0.2 else [*r.broadcast(lead), m, k]
    right = [k] if r.random.random() < 0.2 else [*r.broadcast(lead), k, n]
    return Example(ATEN.matmul.default, (r.real(*left), r.real(*right)))


def _vectors(op: Any) -> Maker:
    def make(r: Draw) -> Example:
        k = r.size()
        return Example(op, (r.real(k), r.real(k)))

    return make


def _added(op: Any, self_shape: str, first: str, second: str) -> Maker:
    def make(r: Draw) -> Example:
        sizes = dict(zip("bmkn", r.sizes(4), strict=True))
        bias = [sizes[c] for c in self_shape]
        bias = bias if r.yes() else r.broadcast(bias)
        shapes = [bias, [sizes[c] for c in first], [sizes[c] for c in second]]
        kwargs = {"beta": 0.5, "alpha": 2.0} if r.yes() else {}
        return Example(op, tuple(r.real(*s) for s in shapes), kwargs)

    return make


def _einsum(r: Draw) -> Example:
    sizes = dict(zip("abcdk", r.sizes(5, 2, 4), strict=True))
    equation = r.pick(["ak,kb->ab", "abk,ckd->abcd", "ab,ab->", "ab->ba", "a,b,c->abc", "abk,bk->b",
                       "...k,kb->...b", "ab,bc,cd->ad", "aab->ab"])  # fmt: skip
    shapes = [[3, sizes["a"], sizes["k"]] if "." in term else [sizes[c] for c in term]
              for term in equation.split("->")[0].split(",")]  # fmt: skip
    return Example(ATEN.einsum.default, (equation, [r.real(*s) for s in shapes]))


def _tensordot(r: Draw) -> Example:
    a, b, c, d = r.sizes(4, 2, 4)
    return Example(ATEN.tensordot.default, (r.real(a, b, c), r.real(b, d, a), [0, 1], [2, 0]))


def _inner(r: Draw) -> Example:
    k = r.size()
    return Example(ATEN.inner.default, (r.real(*r.sizes(1), k), r.real(r.size(), k)))


def _bilinear(r: Draw) -> Example:
    i, j, n = r.sizes(3, 2, 4)
    lead = r.shape(1, 2)
    bias = r.real(n) if r.yes() else None
    return Example(
        ATEN.bilinear.default, (r.real(*lead, i), r.real(*lead, j), r.real(n, i, j), bias)
    )


def _grouped(op: Any, narrow: bool) -> Maker:
    def make(r: Draw) -> Example:
        k, n = (r.pick([8, 16]), r.pick([8, 16])) if narrow else (r.size(), r.size())
        e = r.size(2, 3)
        counts = torch.tensor([r.size(0, 4) for _ in range(e)])
        ends = counts.cumsum(0).to(torch.int32)
        rows = int(ends[-1]) or 1
        ends[-1] = rows
        r.dtype = torch.float32
        return Example(op, (r.real(rows, k), r.real(e, k, n), ends))

    return make


def _convolution(space: int, transposed: bool, op: Any, generic: bool = False) -> Maker:
    def make(r: Draw) -> Example:
        groups = r.pick([1, 1, 2, 4])
        c, o = groups * r.size(1, 3), groups * r.size(1, 3)
        kernel, length = [r.size(1, 2)] * space, [r.size(3, 4)] * space
        rows = r.size(2, 4)
        weight = r.real(*((c, o // groups) if transposed else (o, c // groups)), *kernel)
        bias = r.real(o) if r.yes() else None
        lead = [rows] if r.random.random() < 0.8 or generic else []
        x = r.real(*lead, c, *length)
        stride, padding = [r.size(1, 2)] * space, [0] * space
        if generic:
            rest: tuple[Any, ...] = (stride, padding, [1] * space, transposed, [0] * space, groups)
        elif transposed:
            rest = (stride, padding, [0] * space, groups)
        else:
            rest = (stride, padding, [1] * space, groups)
        if op is ATEN._convolution.default:
            rest = (*rest, False, False, False, False)
        return Example(op, (x, weight, bias, *rest))

    return make


def _layers(op: Any) -> Maker:
    def make(r: Draw) -> Example:
        rows, time, inner, hidden = r.size(2, 5), r.size(1, 3), r.size(2, 4), r.size(2, 3)
        both, layers, first = r.yes(), r.size(1, 2), r.yes()
        gates = {"lstm": 4, "gru": 3}.get(op._schema.name.split("::")[1], 1) * hidden
        dirs = 2 if both else 1
        x = r.real(rows, time, inner) if first else r.real(time, rows, inner)
        state = [r.real(layers * dirs, rows, hidden) for _ in range(2)]
        params = [
            t
            for layer in range(layers)
            for _ in range(dirs)
            for t in (
                r.real(gates, inner if layer == 0 else hidden * dirs), r.real(gates, hidden),
                r.real(gates), r.real(gates),
            )
        ]  # fmt: skip
        held: Any = state if "lstm" in op._schema.name else state[0]
        return Example(op, (x, held, params, True, layers, 0.0, True, both, first))

    return make


def _cell(op: Any) -> Maker:
    def make(r: Draw) -> Example:
        rows, inner, hidden = r.size(2, 5), r.size(2, 4), r.size(2, 3)
        name = op._schema.name.split("::")[1]
        gates = {"lstm_cell": 4, "gru_cell": 3}.get(name, 1) * hidden
        state = [r.real(rows, hidden) for _ in range(2)]
        held: Any = state if name == "lstm_cell" else state[0]
        weights = (r.real(gates, inner), r.real(gates, hidden), r.real(gates), r.real(gates))
        return Example(op, (r.real(rows, inner), held, *weights))

    return make


def _attention(r: Draw) -> Example:
    b, h, queries, keys, e, v = r.sizes(6, 2, 4)
    lead = r.pick([[b, h], [b, h], [b], [2, b, h]])
    kwargs: dict[str, Any] = {"scale": 0.3} if r.yes() else {}
    few = list(lead)
    if len(lead) > 1 and r.yes():
        lead[-1], few[-1] = 2 * lead[-1], lead[-1]
        kwargs["enable_gqa"] = True
    mask: torch.Tensor | None = None
    causal = r.random.random() < 0.25
    keys = queries if causal and r.yes() else keys
    if not causal and r.yes():
        shape = r.broadcast([*lead, queries, keys]) if r.yes() else [queries, keys]
        mask = r.real(*shape) if r.yes() else r.bools(*shape) | r.bools(*shape)
        if mask.dtype == torch.bool and mask.dim():
            mask[..., 0] = True
    args = (r.real(*lead, queries, e), r.real(*few, keys, e), r.real(*few, keys, v), mask, 0.0)
    return Example(ATEN.scaled_dot_product_attention.default, (*args, causal), kwargs)


def _attention_dropout(r: Draw) -> Example:
    made = _attention(r)
    args = (*made.args[:4], 0.3, made.args[5])
    return Example(made.op, args, made.kwargs, seeded=True)


def _pairs(op: Any, *rest: Any) -> Maker:
    def make(r: Draw) -> Example:
        lead, p, q, m = r.shape(0, 1), *r.sizes(3)
        return Example(op, (r.real(*lead, p, m), r.real(*lead, q, m), *rest))

    return make


def _cosine(r: Draw) -> Example:
    shape = r.sizes(3, 2, 4)
    return Example(
        ATEN.cosine_similarity.default, (r.real(*shape), r.real(*shape[1:]), r.size(-2, -1))
    )


def _distance(r: Draw) -> Example:
    shape = r.sizes(2)
    return Example(ATEN.pairwise_distance.default, (r.real(*shape), r.real(*shape)))


def _cross(op: Any) -> Maker:
    def make(r: Draw) -> Example:
        shape, dim = [*r.sizes(2), 3], r.size(-3, -1)
        shape[dim], shape[-1] = shape[-1], shape[dim]
        return Example(op, (r.real(*shape), r.real(*shape), dim))

    return make


def _fourier(op: Any, *rest: Any) -> Maker:
    def make(r: Draw) -> Example:
        shape = r.sizes(3, 2, 4)
        x = r.real(*shape)
        x = x if op is ATEN._fft_r2c.default else torch.complex(x, r.real(*shape))
        last = rest if op is not ATEN._fft_c2r.default else (2 * (shape[2] - 1),)
        # the raw op has no gradient with respect to the parts that a real signal does not have
        return Example(op, (x, [2], 0, *last), gradients=op is not ATEN._fft_c2r.default)

    return make


_TRANSFORMED = """fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2
fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fftshift fft_ifftshift""".split()


def _transformed(name: str) -> Maker:
    """A Fourier transform over given dims, sizes, or those that the function takes by itself."""
    op = getattr(ATEN, name).default
    is_real = name in ("fft_rfft", "fft_ihfft", "fft_rfft2", "fft_rfftn", "fft_fftshift")
    # The gradient of what a real signal does not have is not defined.
    gradients = name not in ("fft_irfft", "fft_hfft", "fft_irfft2", "fft_irfftn")
    dims: list[Any] = [0, 1, -1]
    if name.endswith(("2", "n", "shift")):
        dims = [[0, 1], [2, 0]]

    def make(r: Draw) -> Example:
        shape = r.sizes(3, 2, 4)
        x = r.real(*shape)
        x = x if is_real else torch.complex(x, r.real(*shape))
        kwargs: dict[str, Any] = {}
        if r.yes():
            kwargs["dim"] = r.pick(dims)
        elif name.endswith("n") and r.yes():
            kwargs["s"] = [5, 4]
        return Example(op, (x,), kwargs, gradients=gradients)

    return make


def _bucketize(r: Draw) -> Example:
    return Example(ATEN.bucketize.Tensor, (r.real(*r.shape()), r.real(r.size()).sort().values))


def _meshgrid(r: Draw) -> Example:
    vectors = [r.real(s) for s in r.sizes(r.size(2, 3))]
    return Example(ATEN.meshgrid.indexing, (vectors,), {"indexing": r.pick(["ij", "xy"])})


def _float8_linear(r: Draw) -> Example:
    """Rows of sizes that a shard keeps whole."""
    rows, width, wide = r.size(), r.size(), r.size()
    given = r.real(rows, r.size(), width), r.real(wide, width), r.real(wide)
    return Example(torch.ops.fxpart.float8_linear.default, given)


EXAMPLES: dict[str, Maker] = {
    "aten.linear": _linear,
    "fxpart.float8_linear": _float8_linear,
    "aten.mm": _plain(ATEN.mm.default, False),
    "aten.bmm": _plain(ATEN.bmm.default, True),
    "aten.mv": lambda r: (lambda m, k: Example(ATEN.mv.default, (r.real(m, k), r.real(k))))(
        r.size(), r.size()
    ),
    "aten.matmul": _matmul,
    "aten.dot": _vectors(ATEN.dot.default),
    "aten.vdot": _vectors(ATEN.vdot.default),
    "aten.inner": _inner,
    "aten.outer": lambda r: Example(ATEN.outer.default, (r.real(r.size()), r.real(r.size()))),
    "aten.ger": lambda r: Example(ATEN.ger.default, (r.real(r.size()), r.real(r.size()))),
    "aten.addmm": _added(ATEN.addmm.default, "mn", "mk", "kn"),
    "aten.addmv": _added(ATEN.addmv.default, "m", "mk", "k"),
    "aten.addbmm": _added(ATEN.addbmm.default, "mn", "bmk", "bkn"),
    "aten.baddbmm": _added(ATEN.baddbmm.default, "bmn", "bmk", "bkn"),
    "aten.addr": _added(ATEN.addr.default, "mn", "m", "n"),
    "aten.einsum": _einsum,
    "aten.tensordot": _tensordot,
    "aten.bilinear": _bilinear,
    "aten._grouped_mm": _grouped(ATEN._grouped_mm.default, True),
    **{
        f"aten.conv{d}d": _convolution(d, False, getattr(ATEN, f"conv{d}d").default)
        for d in (1, 2, 3)
    },
    "aten.conv_transpose1d": _convolution(1, True, ATEN.conv_transpose1d.default),
    "aten.conv_transpose2d": _convolution(2, True, ATEN.conv_transpose2d.input),
    "aten.conv_transpose3d": _convolution(3, True, ATEN.conv_transpose3d.input),
    "aten.convolution": lambda r: _convolution(2, r.yes(), ATEN.convolution.default, True)(r),
    "aten._convolution": lambda r: _convolution(1, r.yes(), ATEN._convolution.default, True)(r),
    "aten.lstm": _layers(ATEN.lstm.input),
    "aten.gru": _layers(ATEN.gru.input),
    "aten.rnn_tanh": _layers(ATEN.rnn_tanh.input),
    "aten.rnn_relu": _layers(ATEN.rnn_relu.input),
    "aten.lstm_cell": _cell(ATEN.lstm_cell.default),
    "aten.gru_cell": _cell(ATEN.gru_cell.default),
    "aten.rnn_tanh_cell": _cell(ATEN.rnn_tanh_cell.default),
    "aten.rnn_relu_cell": _cell(ATEN.rnn_relu_cell.default),
    "aten.scaled_dot_product_attention": lambda r: r.pick([_attention, _attention_dropout])(r),
    "aten.cdist": _pairs(ATEN.cdist.default),
    "aten._cdist_forward": _pairs(ATEN._cdist_forward.default, 2.0, None),
    "aten.cosine_similarity": _cosine,
    "aten.pairwise_distance": _distance,
    "aten.cross": _cross(ATEN.cross.default),
    "aten.linalg_cross": lambda r: (lambda e: Example(e.op, e.args[:2], {"dim": e.args[2]}))(
        _cross(ATEN.linalg_cross.default)(r)
    ),
    "aten._fft_r2c": _fourier(ATEN._fft_r2c.default, True),
    "aten._fft_c2c": _fourier(ATEN._fft_c2c.default, True),
    "aten._fft_c2r": _fourier(ATEN._fft_c2r.default),
    **{f"aten.{name}": _transformed(name) for name in _TRANSFORMED},
    "aten.bucketize": _bucketize,
    "aten.meshgrid": _meshgrid,
}


def grouped_fallback(r: Draw) -> Example:
    """transformers' own product of groups, where it is installed."""
    import transformers.integrations.moe  # noqa: F401

    return _grouped(torch.ops.transformers.grouped_mm_fallback.default, False)(r)
