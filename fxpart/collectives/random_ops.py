"""Random ops on a shard. The values equal those of a single process.

What dropout keeps depends on positions, so a rank computes it for its shard. For any other random
op it draws the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxpart.collectives.communicator import Communicator, Size
from fxpart.collectives.shard_buffer import lengths, part, take
from fxpart.rng import RepeatedKey, dropout_factors, mix, seeded
from fxpart.sharding import Placements, Shard, parse_placements

_ATEN = torch.ops.aten
_ATTENTION = "aten.scaled_dot_product_attention"
_Op = Callable[..., Any]
# Ops whose numbers a rank computes for its shard only.
DRAWN_IN_PARTS = frozenset({"aten.dropout", "aten.native_dropout", _ATTENTION})
_FACTORIES = ("aten::rand", "aten::randn", "aten::randint", "aten::normal", "aten::randperm")


def random_shard(
    mesh: Communicator,
    shape: Sequence[Size],
    placements: str,
    key: int,
    index: int,
    op: _Op,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run ``fxpart.rng.seeded(key, index, op, ...)`` on local operands: this rank's shard.

    shape: the global shape of the (first) result. placements: text such as "dp:S(0)". args: the
    op's arguments with local tensors; a factory's size argument is replaced by ``shape``. Supports
    dropout, attention with dropout along batch, heads and queries, bernoulli, rand_like and other
    ops that draw in element order regardless of values.
    """
    where = parse_placements(placements, mesh.mesh)
    if op in (_ATEN.dropout.default, torch.dropout):
        mask = _mask(mesh, shape, where, key, index, args[0], args[1])
        return args[0] * mask
    if op is _ATEN.native_dropout.default:
        scaled = _mask(mesh, shape, where, key, index, args[0], args[1])
        mask = scaled != 0
        p = args[1]
        return args[0] * mask * (0.0 if p == 1 else 1 / (1 - p)), mask
    if op is _ATEN.scaled_dot_product_attention.default:
        return _attention(mesh, shape, where, key, index, args, kwargs)
    name = getattr(getattr(op, "_schema", None), "name", "")
    if name in _FACTORIES:

        def draw(size: list[Size]) -> Any:
            return seeded(key, index, op, *_sized(op, args, size), **kwargs)

        return _cut(mesh, _repeated(mesh, shape, where, key, draw), where)
    wholes = [_around(mesh, a, shape, where) if isinstance(a, torch.Tensor) else a for a in args]
    found = seeded(key, index, op, *wholes, **kwargs)
    if isinstance(found, torch.Tensor):
        return _cut(mesh, found, where)
    return type(found)(_cut(mesh, t, where) for t in found)


def _mask(
    mesh: Communicator,
    shape: Sequence[Size],
    where: Placements,
    key: int,
    index: int,
    like: torch.Tensor,
    p: float,
) -> torch.Tensor:
    """Return this rank's shard of what dropout multiplies with: 0 or 1 / (1 - p)."""
    sizes, at = _positions(mesh, shape, where, key, like.device)
    with torch.no_grad():
        return dropout_factors(mix(key, index), p, like, sizes, at)


def _positions(
    mesh: Communicator, shape: Sequence[Size], where: Placements, key: int, device: torch.device
) -> tuple[list[int] | None, list[torch.Tensor | None]]:
    """Return the shape of the whole tensor, and by dim the positions of this rank's shard.

    Rows of the microbatch that are repeated have the positions of the first. The shape is None if
    it is symbolic: only shapes are computed.
    """
    sizes = [size for size in shape if isinstance(size, int)]
    if len(sizes) < len(shape):
        return None, []
    found: list[torch.Tensor | None] = [None] * len(sizes)
    repeated = _repeated_dim(mesh, where, key)
    if repeated is not None:
        assert isinstance(key, RepeatedKey), "rows are repeated by the key"
        sizes[repeated] //= key.count
        found[repeated] = torch.arange(sizes[repeated], device=device).repeat(key.count)
    for axis, placement in zip(mesh.mesh.names, where, strict=True):
        if isinstance(placement, Shard) and placement.dim < len(sizes):
            line = found[placement.dim]
            line = torch.arange(sizes[placement.dim], device=device) if line is None else line
            parts, place = mesh.size(axis), mesh.place(axis)
            found[placement.dim] = take(line, 0, _outer(placement), parts, place)
    return sizes, found


def _repeated_dim(mesh: Communicator, where: Placements, key: int) -> int | None:
    """Return the dim of the microbatch's rows where the key repeats them."""
    if not isinstance(key, RepeatedKey):
        return None
    dims = {
        p.dim
        for axis, p in zip(mesh.mesh.names, where, strict=True)
        if axis in key.axes and isinstance(p, Shard)
    }
    return dims.pop() if len(dims) == 1 else None


def _repeated(
    mesh: Communicator,
    shape: Sequence[Size],
    where: Placements,
    key: int,
    draw: Callable[[list[Size]], torch.Tensor],
) -> torch.Tensor:
    """Draw a whole tensor; if the rows of the microbatch are repeated, repeat the values."""
    size, dim = list(shape), _repeated_dim(mesh, where, key)
    if dim is None:
        return draw(size)
    assert isinstance(key, RepeatedKey), "rows are repeated by the key"
    size[dim] //= key.count
    return torch.cat([draw(size)] * key.count, dim)


def _cut(mesh: Communicator, whole: torch.Tensor, where: Placements) -> torch.Tensor:
    """Return this rank's shard of a tensor, in a storage of its own if it is smaller."""
    found = whole
    for axis, placement in zip(mesh.mesh.names, where, strict=True):
        if isinstance(placement, Shard) and placement.dim < found.dim():
            found = take(found, placement.dim, _outer(placement), mesh.size(axis), mesh.place(axis))
    return found if found is whole or whole.requires_grad else found.clone()


def _around(
    mesh: Communicator, piece: torch.Tensor, shape: Sequence[Size], where: Placements
) -> torch.Tensor:
    """Return a whole tensor with the shard in place, 1/2 elsewhere (also valid as a
    probability).
    """
    sizes: list[list[Size]] = [list(shape[: piece.dim()])]
    cuts = [
        (axis, p) for axis, p in zip(mesh.mesh.names, where, strict=True)
        if isinstance(p, Shard) and p.dim < piece.dim()
    ]  # fmt: skip
    dims = {p.dim for _, p in cuts}
    sizes[0] = [shape[d] if d in dims else piece.shape[d] for d in range(piece.dim())]
    for axis, p in cuts:
        size = list(sizes[-1])
        each = lengths(size[p.dim], mesh.size(axis), _outer(p))
        size[p.dim] = _outer(p) * each[mesh.place(axis)]
        sizes.append(size)
    for (axis, p), size in reversed(list(zip(cuts, sizes[:-1], strict=True))):
        whole = piece.new_full(size, 0.5) if piece.is_floating_point() else piece.new_zeros(size)
        each = lengths(size[p.dim], mesh.size(axis), _outer(p))
        inner = piece.unflatten(p.dim, (_outer(p), each[mesh.place(axis)]))
        part(whole, p.dim, _outer(p), each, mesh.place(axis)).copy_(inner)
        piece = whole
    return piece


def _outer(placement: Shard) -> int:
    assert isinstance(placement.outer, int), "lowering refuses random numbers for symbolic parts"
    return placement.outer


def _sized(op: _Op, args: tuple[Any, ...], shape: Sequence[Size]) -> list[Any]:
    """Return a factory's arguments with the global size."""
    names = [a.name for a in op._schema.arguments]  # type: ignore[attr-defined]
    return [list(shape) if n == "size" else a for n, a in zip(names, args, strict=False)]


def _attention(
    mesh: Communicator,
    shape: Sequence[Size],
    where: Placements,
    key: int,
    index: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Run attention like ATen's math path (``_scaled_dot_product_attention_math``).

    The dropout mask is drawn for all of [.., queries, keys], independent of the value width (the
    result's last dim).
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    query, keys, values = given["query"], given["key"], given["value"]
    dtype = query.dtype
    if dtype in (torch.float16, torch.bfloat16):
        query, keys, values = query.float(), keys.float(), values.float()
    scale = given.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if given.get("enable_gqa"):
        keys = keys.repeat_interleave(query.shape[-3] // keys.shape[-3], -3)
        values = values.repeat_interleave(query.shape[-3] // values.shape[-3], -3)
    root = math.sqrt(scale)
    scores = (query * root) @ (keys * root).transpose(-2, -1)
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        mask = _causal_rows(mesh, shape, where, keys.shape[-2], scores.device)
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -torch.inf)
        scores = scores + mask
    chances = _ATEN._safe_softmax.default(scores, -1)
    lead = len(shape) - 1
    rows = tuple(None if isinstance(p, Shard) and p.dim >= lead else p for p in where)
    noise = _mask(
        mesh, [*shape[:lead], keys.shape[-2]], rows, key, index, chances, given["dropout_p"]
    )
    found: torch.Tensor = (chances * noise) @ values
    return found.to(dtype)


def _causal_rows(
    mesh: Communicator, shape: Sequence[Size], where: Placements, keys: Size, device: torch.device
) -> torch.Tensor:
    """Return the rows of a causal mask for this rank's queries, dim -2 of a result of ``shape``."""
    at = len(shape) - 2
    along = tuple(
        Shard(0, p.outer) if isinstance(p, Shard) and p.dim == at else None for p in where
    )
    every: torch.Tensor = _ATEN.arange.default(shape[at], device=device)
    columns: torch.Tensor = _ATEN.arange.default(keys, device=device)
    return columns <= _cut(mesh, every, along).unsqueeze(-1)
