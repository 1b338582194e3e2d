"""Run float32 code in double precision, with the random numbers of the float32 run.

A single process in double precision measures the rounding of the float32 run: see
:mod:`fxpart.verification.rounding_error`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxpart.compat import TorchDispatchMode
from fxpart.verification.single_process import is_random

WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_NARROWER = {wide: narrow for narrow, wide in WIDER.items()}
_DROPOUT = torch.ops.aten.native_dropout.default


class LowPrecisionInputError(Exception):
    """Raised for a value of lower precision than float32, for which this measure is meaningless."""


class Float64Mode(TorchDispatchMode):
    """Run every primitive, forward and backward, in float64 instead of float32.

    Arguments that name float32 become float64. Random numbers are drawn in float32 and converted,
    so masks equal those of the float32 run. A primitive without float64 support runs in float32.
    Raise :class:`LowPrecisionInputError` for a value or an argument of bfloat16, float16 and
    similar dtypes.
    """

    def __init__(self) -> None:
        """Create the mode for one block of code."""
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one primitive."""
        args, kwargs = _each(_known, args), _each(_known, kwargs or {})
        if is_random(func, args, kwargs):
            return _dropout(*args) if func is _DROPOUT else _in_float32(func, args, kwargs)
        try:
            found = func(*_each(to_float64, args), **_each(to_float64, kwargs))
        except (RuntimeError, NotImplementedError):
            found = _in_float32(func, args, kwargs)
        return _each(to_float64, found)


def to_float64(value: Any) -> Any:
    """Convert a float32 tensor or dtype to float64; return anything else unchanged."""
    if isinstance(value, torch.Tensor):
        return value.to(WIDER[value.dtype]) if value.dtype in WIDER else value
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def _known(value: Any) -> Any:
    """Return the value; raise LowPrecisionInputError below float32."""
    dtype = value.dtype if isinstance(value, torch.Tensor) else value
    if isinstance(dtype, torch.dtype):
        part = dtype.to_real() if dtype.is_complex else dtype
        if part.is_floating_point and part.itemsize < torch.float32.itemsize:
            raise LowPrecisionInputError(f"{dtype} in the graph")
    return value


def _in_float32(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the primitive in float32; return its results and written operands in float64."""
    narrow: dict[int, torch.Tensor] = {}

    def narrowed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in _NARROWER:
            return value
        return narrow.setdefault(id(value), value.to(_NARROWER[value.dtype]))

    found = func(*_each(narrowed, args), **_each(narrowed, kwargs))
    written: dict[int, torch.Tensor] = {}
    for index, argument in enumerate(func._schema.arguments):
        given = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.is_write and id(given) in narrow:
            written[id(narrow[id(given)])] = given.copy_(narrow[id(given)])
    return _each(lambda value: written.get(id(value), to_float64(value)), found)


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Run native_dropout with the float32 mask, without rounding the result to float32."""
    mask = _DROPOUT(x.to(_NARROWER.get(x.dtype, x.dtype)), p, train)[1]
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return (x if train is False else x * mask * scale), mask


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``change`` to the value, or to each item of a list, tuple or dict."""
    if isinstance(value, dict):
        return {key: _each(change, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_each(change, item) for item in value)
    return change(value)
