"""Rules for per-channel image ops: batch and channels are factors, spatial dims are not sharded."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx

from .schema_call import (
    Dim,
    Entry,
    SchemaCall,
    Shape,
    UncoveredCallError,
    name_broadcast_dims,
    notation,
    with_argument,
)
from .sharding_rule import Arguments, ShardingRule, Size


def _places(call: SchemaCall) -> int:
    """Return the number of spatial dims: the digit before the final d of the op's name."""
    found = re.search(r"(\d)d", call.name)
    if found is None:
        raise UncoveredCallError
    return int(found[1])


def _pooling(call: SchemaCall) -> ShardingRule:
    """Rule for pooling and resizing; averaging and interpolation are linear."""
    space = _places(call)
    name, shape = call.operands[0]
    outer = name_broadcast_dims(len(shape) - space)
    inside: list[Dim] = [*outer, *[f"_s{i}" for i in range(space)]]
    out: list[Dim] = [*outer, *[f"_t{i}" for i in range(space)]]
    linear = [] if "max" in call.name else [name]
    return call.rule([inside], [out] * len(call.results), linear=linear)


def _shuffle(call: SchemaCall) -> ShardingRule:
    """Rule for pixel_shuffle and its inverse: channels are [c, positions in a block]."""
    shape, out = call.operands[0][1], call.results[0]
    few, many = (out, shape) if call.name == "aten.pixel_shuffle" else (shape, out)
    if not isinstance(many[-3], int) or not isinstance(few[-3], int):
        raise UncoveredCallError
    sizes: dict[str, Size] = {"c": few[-3], "_r": many[-3] // few[-3]}
    outer = name_broadcast_dims(len(shape) - 3)
    dims: list[list[Dim]] = []
    for prefix, held in (("_s", shape), ("_t", out)):
        channels: Dim = ("c", "_r") if held is many else ("c",)
        dims.append([*outer, channels, f"{prefix}0", f"{prefix}1"])
    return call.rule([dims[0]], [dims[1]], sizes=sizes, linear=["self"])


def _columns(call: SchemaCall) -> ShardingRule:
    """Rule for im2col and col2im: the dim of columns is [c, positions in a block]."""
    shape, out = call.operands[0][1], call.results[0]
    images, columns = (shape, out) if call.name == "aten.im2col" else (out, shape)
    if not isinstance(images[-3], int) or not isinstance(columns[-2], int):
        raise UncoveredCallError
    sizes: dict[str, Size] = {"c": images[-3], "_r": columns[-2] // images[-3]}
    outer = name_broadcast_dims(len(images) - 3)
    image: list[Dim] = [*outer, ("c",), "_s0", "_s1"]
    column: list[Dim] = [*outer, ("c", "_r"), "_t"]
    inside, outside = (image, column) if images is shape else (column, image)
    return call.rule([inside], [outside], sizes=sizes, linear=["self"])


def _affine_grid(call: SchemaCall) -> ShardingRule:
    """Rule for affine_grid_generator: one matrix per image of the size [n, c, places...]."""
    matrix, grid = call.operands[0][1], call.results[0]

    def localise(
        node: fx.Node, arguments: Arguments, _: Sequence[Shape], results: Sequence[Shape]
    ) -> Arguments:
        rows, *places = results[0][:-1]
        return with_argument(node, arguments, "size", [rows, 1, *places])  # any c: it is not read

    return call.rule(
        [["n", *[f"_m{i}" for i in range(len(matrix) - 1)]]],
        [["n", *[f"_p{i}" for i in range(len(grid) - 1)]]],
        linear=["theta"],
        localise=localise,
    )


_POOLS = [
    *(f"{kind}_pool{d}d" for kind in ("avg", "max", "adaptive_avg") for d in (1, 2, 3)),
    *(f"max_pool{d}d_with_indices" for d in (2, 3)),
    *(f"adaptive_max_pool{d}d" for d in (1, 2, 3)),
    *(f"_adaptive_avg_pool{d}d" for d in (2, 3)),
    *(f"upsample_{kind}" for kind in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d")),
    *(f"{exact}upsample_nearest{e}{d}d" for d in (1, 2, 3)
      for exact, e in (("", ""), ("_", "_exact"))),
]  # fmt: skip

_GRID2, _GRID3 = (
    "n c _h _w, n _y _x _two -> n c _y _x",
    "n c _d _h _w, n _z _y _x _p -> n c _z _y _x",
)


def _grid_sampler(call: SchemaCall) -> ShardingRule | None:
    """Rule for grid_sampler: that of its images' number of spatial dims."""
    grid = _GRID2 if len(call.results[0]) == 4 else _GRID3
    return notation(grid, linear=["input"])(call)


TABLE: dict[str, Entry] = {
    **{f"aten.{name}": _pooling for name in _POOLS},
    "aten.pixel_shuffle": _shuffle,
    "aten.pixel_unshuffle": _shuffle,
    "aten.im2col": _columns,
    "aten.col2im": _columns,
    "aten.affine_grid_generator": _affine_grid,
    "aten.grid_sampler": _grid_sampler,
    "aten.grid_sampler_2d": notation(_GRID2, linear=["input"]),
    "aten.grid_sampler_3d": notation(_GRID3, linear=["input"]),
}
