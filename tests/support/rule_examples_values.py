"""Examples of pointwise ops, reductions and constants."""

from __future__ import annotations

from typing import Any

import torch
from rule_drawing import ATEN, Draw, Maker, along, like
from rule_soundness import Example


def two(op: Any, *rest: Any, chance: bool = False, gradients: bool = True) -> Maker:
    """Two tensors that broadcast."""

    def make(r: Draw) -> Example:
        shape = r.shape()
        a, b = (r.broadcast(shape), shape) if r.yes() else (shape, r.broadcast(shape))
        one = r.chance if chance else r.real
        return Example(op, (one(*a), r.chance(*b), *rest), gradients=gradients)

    return make


def whole_numbers(op: Any, *, real: bool = False) -> Maker:
    """Two tensors of whole numbers (or of truth values) that broadcast."""

    def make(r: Draw) -> Example:
        shape = r.shape()
        return Example(op, (r.ints(4, *r.broadcast(shape)), r.ints(4, *shape) + 1))

    return make


def still(op: Any, *rest: Any) -> Maker:
    """One tensor, written in place or without a gradient."""
    return lambda r: Example(op, (r.real(*r.shape()), *rest), gradients=False)


def written(op: Any) -> Maker:
    """One tensor, and what is written into it."""

    def make(r: Draw) -> Example:
        shape = r.shape()
        return Example(op, (r.real(*shape), r.real(*r.broadcast(shape))), gradients=False)

    return make


def alike(op: Any, *, chance: bool = False) -> Maker:
    """Two tensors of one shape."""

    def make(r: Draw) -> Example:
        shape = r.shape()
        return Example(op, (r.chance(*shape) if chance else r.real(*shape), r.real(*shape)))

    return make


def positive(op: Any, *rest: Any) -> Maker:
    """One tensor of numbers between 0 and 1."""
    return lambda r: Example(op, (r.chance(*r.shape()), *rest))


def drawn(op: Any, *rest: Any, gradients: bool = True) -> Maker:
    """A random op that is called through ``seeded``, on a tensor."""
    return lambda r: Example(
        op, (r.chance(*r.sizes(r.size(2, 3), 2, 5)), *rest), seeded=True, gradients=gradients
    )


def _where(r: Draw) -> Example:
    shape = r.shape()
    mask = r.bools(*r.broadcast(shape))
    kinds = [
        (ATEN.where.self, (mask, r.real(*shape), r.real(*r.broadcast(shape)))),
        (ATEN.where.ScalarOther, (mask, r.real(*shape), r.pick([0, -5.0]))),
        (ATEN.where.ScalarSelf, (mask, r.pick([0, -5.0]), r.real(*shape))),
    ]
    return Example(*r.pick(kinds))


def _prelu(r: Draw) -> Example:
    shape = r.sizes(r.size(1, 3))
    count = shape[1] if len(shape) > 1 and r.yes() else 1
    return Example(ATEN.prelu.default, (r.real(*shape), r.real(count)))


def _one_hot(r: Draw) -> Example:
    return Example(ATEN.one_hot.default, (r.ints(4, *r.shape(1, 2)), 4))


def _broadcast_tensors(r: Draw) -> Example:
    shape = r.shape()
    many = [r.real(*(shape if r.yes() else r.broadcast(shape))) for _ in range(r.size(1, 3))]
    return Example(ATEN.broadcast_tensors.default, (many,))


def _cast(r: Draw) -> Example:
    x = r.real(*r.shape())
    return Example(ATEN.to.dtype, (x, r.pick([torch.float64, torch.int64, torch.bool])))


def _masked_fill(op: Any) -> Maker:
    def make(r: Draw) -> Example:
        shape = r.shape()
        return Example(
            op, (r.real(*shape), r.bools(*r.broadcast(shape)), r.pick([0, 2.0])), gradients=False
        )

    return make


def _noise(r: Draw) -> Example:
    shape = r.sizes(2)
    return Example(
        ATEN.rrelu_with_noise_functional.default,
        (r.real(*shape), r.chance(*shape), 0.1, 0.3, False),
    )


def _reduced(op: Any, listed: bool = True, **kwargs: Any) -> Maker:
    def make(r: Draw) -> Example:
        shape = r.sizes(r.size(1, 3), 2, 6)
        dims = r.random.sample(range(len(shape)), r.size(1, len(shape)))
        dim: Any = dims if listed else dims[0]
        if listed and r.random.random() < 0.2:
            dim = [] if op in (ATEN.amax.default, ATEN.amin.default) else None
        given = kwargs
        x = r.bools(*shape) if op in (ATEN.any.dims, ATEN.all.dims) else r.chance(*shape)
        return Example(op, (x, dim, r.yes()), given)

    return make


def _spread(op: Any) -> Maker:
    return lambda r: Example(op, (r.real(*r.sizes(2)), [r.dim(2)]), {"correction": 1})


def _sum(r: Draw) -> Example:
    made = _reduced(ATEN.sum.dim_IntList)(r)
    if r.random.random() < 0.2:
        return Example(ATEN.sum.default, (r.bools(*r.shape()),))
    return made


def _mean(r: Draw) -> Example:
    if r.random.random() < 0.3:
        return Example(ATEN.mean.default, (r.real(*r.shape()),))
    return _reduced(ATEN.mean.dim)(r)


def _topk(r: Draw) -> Example:
    shape, dim = r.sizes(2, 3, 5), r.dim(2)
    return Example(ATEN.topk.default, (r.real(*shape), 2, dim))


def _histogram(r: Draw) -> Example:
    r.dtype = torch.float64
    return Example(ATEN.histc.default, (r.real(*r.shape(1, 2)), 4, -1, 1), gradients=False)


def _norm(r: Draw) -> Example:
    kinds = [(ATEN.linalg_vector_norm.default, 2, [-1]), (ATEN.linalg_vector_norm.default, 2, None)]
    op, order, dim = r.pick(kinds)
    return Example(op, (r.real(*r.sizes(2)), order, dim))


def _filled(op: Any, *rest: Any, seeded: bool = False, values: bool = True) -> Maker:
    return lambda r: Example(op, (r.shape(), *rest), {"dtype": torch.float64}, seeded, values)


def _new(op: Any, *rest: Any, values: bool = True) -> Maker:
    def make(r: Draw) -> Example:
        shape = r.sizes(2, 2, 5)
        return Example(op, (r.real(*shape), shape if r.yes() else r.shape(), *rest), values=values)

    return make


_SAME = """alias clone contiguous detach lift_fresh_copy lift_fresh lift
zeros_like ones_like hardtanh celu""".split()

_COMPLEX = "resolve_conj resolve_neg conj _conj _neg_view real imag".split()


def _complex(op: Any) -> Maker:
    def make(r: Draw) -> Example:
        shape = r.shape()
        return Example(op, (torch.complex(r.real(*shape), r.real(*shape)),))

    return make


DERIVATIVES: dict[str, tuple[Any, ...]] = {
    "softplus": (1.0, 20.0),
    "hardtanh": (-1.0, 1.0),
    "leaky_relu": (0.1, False),
    "elu": (1.0, 1.0, 1.0, False),
    "hardswish": (),
    "hardsigmoid": (),
    "mish": (),
}


def _derivative(op: Any, *rest: Any) -> Maker:
    """Backward ops of activations; the input of elu is the last argument."""

    def make(r: Draw) -> Example:
        shape = r.shape(1, 3)
        grad, x = r.real(*shape), r.real(*shape)
        last = op is ATEN.elu_backward.default
        return Example(op, (grad, *rest, x) if last else (grad, x, *rest), gradients=False)

    return make


EXAMPLES: dict[str, Maker] = {
    **{f"aten.{name}": _complex(getattr(ATEN, name).default) for name in _COMPLEX},
    "aten.view_as_real": _complex(ATEN.view_as_real.default),
    "aten.view_as_complex": lambda r: Example(
        ATEN.view_as_complex.default, (r.real(*r.shape(), 2),)
    ),
    **{f"aten.{name}": like(getattr(ATEN, name).default) for name in _SAME},
    "aten.detach_copy": still(ATEN.detach_copy.default),
    "aten.alias_copy": still(ATEN.alias_copy.default),
    "aten.full_like": like(ATEN.full_like.default, 2.5),
    "aten.empty_like": lambda r: Example(
        ATEN.empty_like.default, (r.real(*r.shape()),), values=False
    ),
    "aten.fill": like(ATEN.fill.Scalar, 2.0),
    "aten.fill_": still(ATEN.fill_.Scalar, 2.0),
    "aten.zero_": still(ATEN.zero_.default),
    "aten.copy": written(ATEN.copy.default),
    "aten.copy_": written(ATEN.copy_.default),
    "aten.to": _cast,
    "aten._to_copy": lambda r: Example(
        ATEN._to_copy.default,
        (r.real(*r.shape()),),
        {"dtype": r.pick([torch.float64, torch.int32])},
    ),
    "aten.type_as": alike(ATEN.type_as.default),
    "aten.dropout": drawn(ATEN.dropout.default, 0.4, True),
    "aten.native_dropout": drawn(ATEN.native_dropout.default, 0.4, True),
    "aten.feature_dropout": drawn(ATEN.feature_dropout.default, 0.4, True),
    "aten.alpha_dropout": drawn(ATEN.alpha_dropout.default, 0.4, True),
    "aten.feature_alpha_dropout": drawn(ATEN.feature_alpha_dropout.default, 0.4, True),
    "aten.rand_like": drawn(ATEN.rand_like.default),
    "aten.randn_like": drawn(ATEN.randn_like.default),
    "aten.randint_like": drawn(ATEN.randint_like.default, 9, gradients=False),
    "aten.bernoulli": drawn(ATEN.bernoulli.default),
    "aten.rrelu_with_noise_functional": _noise,
    "aten.exponential": drawn(ATEN.exponential.default, 1.5, gradients=False),
    "aten.uniform": drawn(ATEN.uniform.default, -1.0, 2.0, gradients=False),
    "aten.geometric": drawn(ATEN.geometric.default, 0.3, gradients=False),
    "aten.cauchy": drawn(ATEN.cauchy.default, gradients=False),
    "aten.log_normal": drawn(ATEN.log_normal.default, gradients=False),
    "aten.random": drawn(ATEN.random.to, 9, gradients=False),
    "aten.normal_functional": drawn(ATEN.normal_functional.default, 0.0, 1.0, gradients=False),
    "aten.where": _where,
    "aten.prelu": _prelu,
    "aten.one_hot": _one_hot,
    "aten.broadcast_tensors": _broadcast_tensors,
    "aten.masked_fill_": _masked_fill(ATEN.masked_fill_.Scalar),
    "aten.floor_divide": two(ATEN.floor_divide.default, gradients=False),
    "aten.floor_divide_": still(ATEN.floor_divide_.Scalar, 0.3),
    "aten.isclose": two(ATEN.isclose.default),
    **{
        f"aten.{n}": like(getattr(ATEN, n).default)
        for n in ("hardswish", "softplus", "log_sigmoid", "hardsigmoid")
    },
    **{
        f"aten.{n}": whole_numbers(getattr(ATEN, n).Tensor)
        for n in ("__and__", "__or__", "__xor__", "__lshift__", "__rshift__")
    },
    **{
        f"aten.{n}_backward": _derivative(getattr(ATEN, f"{n}_backward").default, *rest)
        for n, rest in DERIVATIVES.items()
    },
    "aten.complex": alike(ATEN.complex.default),
    "aten.polar": alike(ATEN.polar.default, chance=True),
    "aten.sum": _sum,
    "aten.mean": _mean,
    **{f"aten.{n}": _reduced(getattr(ATEN, n).default) for n in ("amax", "amin")},
    "aten.logsumexp": lambda r: Example(
        ATEN.logsumexp.default, (r.real(*r.sizes(2)), [r.dim(2)], r.yes())
    ),
    **{
        f"aten.{n}": _reduced(getattr(ATEN, n).dim, False)
        for n in ("max", "min", "median", "nanmedian")
    },
    **{f"aten.{n}": _reduced(getattr(ATEN, n).default, False) for n in ("argmax", "argmin")},
    **{f"aten.{n}": _reduced(getattr(ATEN, n).dims) for n in ("any", "all")},
    "aten.prod": _reduced(ATEN.prod.dim_int, False),
    **{
        f"aten.{n}": _spread(getattr(ATEN, n).correction)
        for n in ("var", "std", "var_mean", "std_mean")
    },
    "aten.aminmax": lambda r: Example(
        ATEN.aminmax.default, (r.real(*r.sizes(2)),), {"dim": r.dim(2)}
    ),
    "aten.norm": lambda r: Example(ATEN.norm.ScalarOpt_dim, (r.real(*r.sizes(2)), 2, [r.dim(2)])),
    "aten.linalg_vector_norm": _norm,
    "aten.count_nonzero": lambda r: Example(
        ATEN.count_nonzero.dim_IntList, (r.ints(2, *r.sizes(2)), [r.dim(2)])
    ),
    "aten.sort": along(ATEN.sort.default),
    "aten.argsort": along(ATEN.argsort.default),
    "aten.topk": _topk,
    "aten.kthvalue": lambda r: Example(ATEN.kthvalue.default, (r.real(*r.sizes(2)), 1, r.dim(2))),
    "aten.cummax": along(ATEN.cummax.default),
    "aten.cummin": along(ATEN.cummin.default),
    "aten.mode": lambda r: Example(ATEN.mode.default, (r.ints(3, *r.sizes(2)), r.dim(2))),
    "aten.histc": _histogram,
    **{f"aten.{n}": _filled(getattr(ATEN, n).default) for n in ("zeros", "ones")},
    "aten.full": _filled(ATEN.full.default, 1.5),
    "aten.empty": _filled(ATEN.empty.memory_format, values=False),
    "aten.rand": _filled(ATEN.rand.default, seeded=True),
    "aten.randn": _filled(ATEN.randn.default, seeded=True),
    "aten.randint": lambda r: Example(ATEN.randint.default, (9, r.shape()), seeded=True),
    "aten.normal": lambda r: Example(ATEN.normal.float_float, (0.5, 2.0, r.shape()), seeded=True),
    "aten.randperm": lambda r: Example(ATEN.randperm.default, (r.size(),), seeded=True),
    "aten.new_zeros": _new(ATEN.new_zeros.default),
    "aten.new_ones": _new(ATEN.new_ones.default),
    "aten.new_full": _new(ATEN.new_full.default, 1.5),
    "aten.new_empty": _new(ATEN.new_empty.default, values=False),
    "aten.arange": lambda r: Example(ATEN.arange.default, (r.size(),)),
    "aten.linspace": lambda r: Example(ATEN.linspace.default, (0, 1, r.size())),
    "aten.eye": lambda r: Example(ATEN.eye.m, tuple(r.sizes(2))),
    "aten.scalar_tensor": lambda r: Example(ATEN.scalar_tensor.default, (2.0,)),
}
_UNARY = """isreal negative absolute arctan special_expit special_log1p special_erf special_expm1
special_logit fix arccos arcsin arctanh arcsinh special_digamma special_gammaln special_sinc
special_psi special_round special_exp2""".split()
_BINARY = """divide multiply subtract arctan2 greater greater_equal less less_equal not_equal
special_xlogy""".split()


def _overload(name: str) -> Any:
    packet = getattr(ATEN, name)
    return packet.Tensor if "Tensor" in packet.overloads() else packet.default


EXAMPLES |= {f"aten.{n}": positive(_overload(n)) for n in _UNARY}
EXAMPLES |= {f"aten.{n}": two(_overload(n), chance=True) for n in _BINARY}
EXAMPLES["aten.arccosh"] = lambda r: Example(ATEN.arccosh.default, (r.chance(*r.shape()) + 1,))
