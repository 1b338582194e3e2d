"""Dtype conversions that ``torch.autocast`` inserts for one op, observed on fake tensors."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fxpart.compat import (
    enable_autocast,
    may_convert,
    silence_fake_errors,
    size_hint,
    watch_casts,
)
from fxpart.compiler.tensor_sizes import tensors

# graph.meta: the whole graph is in one autocast context, so its regions share conversions.
WHOLE_KEY = "fxpart_autocast"
# graph.meta: the device types of the captured module and of the ranks, whose autocast applies.
DEVICES_KEY = "fxpart_devices"
_NARROW = (torch.bfloat16, torch.float16)
_ELIGIBLE = (torch.float32, *_NARROW)  # autocast leaves float64 alone


@dataclass(frozen=True)
class AutocastRegion:
    """An enabled autocast region. cache: whether conversions of parameters are cached."""

    device: str
    dtype: torch.dtype
    cache: bool


def conversions(
    region: AutocastRegion,
    op: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: AbstractContextManager[Any],
) -> dict[int, torch.dtype] | None:
    """Return the dtype to which autocast converts each tensor argument, by ``id`` of the tensor.

    args, kwargs: fake tensors; on another device than the region's, tensors of that device are
    observed in their place. Return None if the op internally converts tensors that are not
    arguments, if these conversions do not explain the dtype of its result, or if it cannot run on
    fake tensors.
    """
    if not may_convert(op, region.device):
        return {}
    given = tensors([*args, *kwargs.values()])
    if all(t.device.type == region.device for t in given):
        try:
            return _observe(region, op, args, kwargs, mode)
        except RuntimeError:  # a composite op that reads sizes as numbers
            pass
    stand_ins = {id(t): _stand_in(t, region.device, mode) for t in given}
    concrete = {name: _map(value, stand_ins) for name, value in kwargs.items()}
    try:
        found = _observe(region, op, tuple(_map(a, stand_ins) for a in args), concrete, mode)
    except RuntimeError:
        return None
    if found is None:
        return None
    return {key: found[id(new)] for key, new in stand_ins.items() if id(new) in found}


def _observe(
    region: AutocastRegion,
    op: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: AbstractContextManager[Any],
) -> dict[int, torch.dtype] | None:
    """Return the conversions of :func:`conversions`; RuntimeError if the op cannot run."""
    inside, results = _watch(region, op, args, kwargs, mode)
    with silence_fake_errors():  # operand dtypes may not match without autocast
        outside, _ = _watch(None, op, args, kwargs, mode)
    added = Counter((id(t), dtype) for t, dtype in inside)
    added.subtract((id(t), dtype) for t, dtype in outside)
    known = tensors([*args, *kwargs.values()])
    ids = {id(t) for t in known}
    found = {key: dtype for (key, dtype), count in added.items() if count > 0 and key in ids}
    seen = _AutocastRun(op, args, kwargs, mode, inside, results)
    for candidate in (
        found,
        # An op that also converts inside, without autocast, as attention without a fused kernel.
        {id(t): region.dtype for t in known if t.dtype in _ELIGIBLE and t.dtype != region.dtype},
        # ``sum`` and others get a result dtype in place of converted operands.
        {id(t): torch.float32 for t in known if t.dtype in _NARROW},
    ):
        if seen.is_explained_by(candidate):
            return candidate
    return None


@dataclass(frozen=True)
class _AutocastRun:
    """What an op did under autocast. inside: its conversions. results: what it returned."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mode: AbstractContextManager[Any]
    inside: list[tuple[torch.Tensor, torch.dtype]]
    results: Any

    def is_explained_by(self, found: dict[int, torch.dtype]) -> bool:
        """Return whether the op does the same on converted operands, without autocast.

        found: dtype by ``id`` of an argument.
        """
        known = tensors([*self.args, *self.kwargs.values()])

        def convert(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return item.to(found[id(item)]) if id(item) in found else item
            if isinstance(item, (list, tuple)):
                return type(item)(convert(i) for i in item)
            return item

        with self.mode, torch.no_grad():
            args = tuple(map(convert, self.args))
            kwargs = {k: convert(v) for k, v in self.kwargs.items()}
        plain, results = _watch(None, self.op, args, kwargs, self.mode)
        if [t.dtype for t in tensors(results)] != [t.dtype for t in tensors(self.results)]:
            return False
        before = {id(t) for t in known}
        after = before | {id(t) for t in tensors([*args, *kwargs.values()])}
        if _inner(plain, after) == _inner(self.inside, before):
            return True
        outer = _inner([(t, found[id(t)]) for t in known if id(t) in found], set())
        return _inner(self.inside, set()) == _inner(plain, set()) + outer


def _stand_in(tensor: torch.Tensor, device: str, mode: AbstractContextManager[Any]) -> torch.Tensor:
    """Return a fake tensor of the example's sizes on the device."""
    sizes = [size_hint(size) for size in tensor.shape]
    with mode:
        return torch.empty(sizes, dtype=tensor.dtype, device=device)


def _map(item: Any, stand_ins: dict[int, torch.Tensor]) -> Any:
    """Return an argument with stand-ins for its tensors and numbers for its symbols."""
    if isinstance(item, torch.Tensor):
        return stand_ins[id(item)]
    if isinstance(item, torch.SymInt):
        return size_hint(item)
    if isinstance(item, (list, tuple)):
        return type(item)(_map(each, stand_ins) for each in item)
    return item


def _inner(
    seen: list[tuple[torch.Tensor, torch.dtype]], argument_ids: set[int]
) -> Counter[tuple[str, str, str]]:
    """Count conversions of tensors other than arguments, by shape and both dtypes."""
    return Counter(
        (str(t.shape), str(t.dtype), str(d)) for t, d in seen if id(t) not in argument_ids
    )


def _watch(
    region: AutocastRegion | None,
    op: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: AbstractContextManager[Any],
) -> tuple[list[tuple[torch.Tensor, torch.dtype]], Any]:
    """Run the op with or without autocast; return its conversions (kept alive) and its result."""
    around: AbstractContextManager[Any] = nullcontext()
    if region is not None:
        around = enable_autocast(region.device, region.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mode, torch.no_grad(), around, watch_casts() as seen:
            try:
                result = op(*args, **kwargs)
            except RuntimeError:
                # Without autocast the dtypes of the operands may not match.
                if region is not None:
                    raise
                result = None
    return seen, result
