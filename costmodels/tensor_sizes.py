"""Elements and bytes of tensors, as numbers or sympy expressions."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from fxpart.errors import error

if TYPE_CHECKING:
    from fxpart.costs import Size, TensorSpec

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of sizes, 1 for none."""
    result: Size = 1
    for size in sizes:
        result = result * size
    return result


def sum_sizes(sizes: Iterable[Size]) -> Size:
    """Return the sum, 0 for none."""
    total: Size = 0
    for size in sizes:
        total = total + size
    return total


def elements(tensor: TensorSpec) -> Size:
    """Return the number of elements of the tensor."""
    return product(tensor.shape)


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element; FXP108 for an unknown dtype."""
    size = ITEM_BYTES.get(dtype)
    if size is None:
        raise error(
            "FXP108",
            where=f"a tensor of dtype {dtype}",
            why="its element size is not known",
            fix="cast the tensor, or add the dtype to fxpart.costmodels.tensor_sizes",
        )
    return size


@lru_cache(maxsize=1 << 14)
def tensor_bytes(tensor: TensorSpec) -> Size:
    """Return the tensor's bytes without padding."""
    return elements(tensor) * item_bytes(tensor.dtype)


def is_floating(dtype: str) -> bool:
    """Return whether gradients and multiply-add rates apply to the dtype."""
    return dtype.startswith(("float", "bfloat", "complex"))


def floating_dtype(tensors: Iterable[TensorSpec]) -> str:
    """Return the dtype of the first tensor with floating-point numbers; float32 without one."""
    return next((t.dtype for t in tensors if is_floating(t.dtype)), "float32")
