"""Rules for ops that compare vectors: the vectors' dim is not sharded, the others are factors."""

from __future__ import annotations

from .schema_call import Dim, Entry, SchemaCall, UncoveredCallError, notation
from .sharding_rule import ShardingRule


def _similarity(call: SchemaCall) -> ShardingRule:
    """Rule for cosine_similarity over one dim of broadcast operands."""
    rank = max(len(shape) for _, shape in call.operands)
    at = call.dim("dim", rank)
    names: list[Dim] = [f"_d{i}" if i == at else f"d{i}" for i in range(rank)]
    operands = [names[rank - len(shape) :] for _, shape in call.operands]
    return call.rule(operands, [[d for i, d in enumerate(names) if i != at]])


def _cross(call: SchemaCall) -> ShardingRule:
    rank = len(call.results[0])
    at = call.dim("dim", rank)
    names: list[Dim] = [f"_d{i}" if i == at else f"d{i}" for i in range(rank)]
    operands = [names[rank - len(shape) :] for _, shape in call.operands]
    return call.rule(operands, [names], linear=[name for name, _ in call.operands])


def _transform(call: SchemaCall) -> ShardingRule:
    """Rule for Fourier transforms: transformed dims are not sharded.

    Without ``dim``, these are the last dims of ``s``, or all dims.
    """
    shape = call.operands[0][1]
    sizes = call.number("s")
    if call.number("dim") is None and sizes is not None:
        dims = set(range(len(shape) - len(sizes), len(shape)))
    else:
        dims = call.dims("dim", len(shape))
    inside: list[Dim] = [f"_n{i}" if i in dims else f"d{i}" for i in range(len(shape))]
    out: list[Dim] = [f"_m{i}" if i in dims else f"d{i}" for i in range(len(shape))]
    return call.rule([inside], [out], linear=["self"])


_TRANSFORMS = """fft ifft rfft irfft hfft ihfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn
fftshift ifftshift
""".split()


def _grid(call: SchemaCall) -> ShardingRule:
    """Rule for meshgrid: every vector is a dim of all results."""
    if any(len(shape) != 1 for _, shape in call.operands):
        raise UncoveredCallError
    names: list[Dim] = [f"d{i}" for i in range(len(call.operands))]
    out = list(names)
    if call.given.get("indexing") == "xy" and len(out) > 1:
        out[0], out[1] = out[1], out[0]
    return call.rule([[n] for n in names], [out] * len(call.results))


TABLE: dict[str, Entry] = {
    "aten.cosine_similarity": _similarity,
    "aten.pairwise_distance": notation("... _d, ... _d -> ..."),
    "aten.cdist": notation("... p _m, ... r _m -> ... p r"),
    "aten._cdist_forward": notation("... p _m, ... r _m -> ... p r"),
    "aten.cross": _cross,
    "aten.linalg_cross": _cross,
    "aten._fft_r2c": _transform,
    "aten._fft_c2c": _transform,
    "aten._fft_c2r": _transform,
    "aten.view_as_real": notation("... -> ... _c"),
    "aten.view_as_complex": notation("... _c -> ..."),
    **dict.fromkeys((f"aten.fft_{name}" for name in _TRANSFORMS), _transform),
    "aten.bucketize": notation("..., _n -> ..."),
    "aten.meshgrid": _grid,
}
