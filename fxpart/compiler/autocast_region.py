"""The conversions that ``torch.autocast`` makes around one op, observed on fake tensors."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fxpart.compat import may_convert, silence_fake_errors, watch_casts
from fxpart.compiler.tensor_sizes import tensors

# graph.meta: one autocast is around the whole graph, whose regions share its conversions.
WHOLE_KEY = "fxpart_autocast"


@dataclass(frozen=True)
class AutocastRegion:
    """An autocast region that is on; cache: whether conversions of parameters are shared."""

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
    """By ``id`` of the tensors among the arguments: the dtype that autocast converts them to.

    args, kwargs: fake tensors. None if the op, inside itself, converts what is no argument, or if
    the conversions do not explain the dtype of its result, or if it does not run on fakes.
    """
    if not may_convert(op, region.device):
        return {}
    try:
        inside, results = _watch(region, op, args, kwargs, mode)
    except RuntimeError:  # an op that is made of others, and looks at sizes in between
        return None
    with silence_fake_errors():  # without autocast the operands may not fit together
        outside, _ = _watch(None, op, args, kwargs, mode)
    added = Counter((id(t), dtype) for t, dtype in inside)
    added.subtract((id(t), dtype) for t, dtype in outside)
    given = {id(t) for t in tensors([*args, *kwargs.values()])}
    found = {key: dtype for (key, dtype), count in added.items() if count > 0 and key in given}

    def convert(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(found[id(item)]) if id(item) in found else item
        if isinstance(item, (list, tuple)):
            return type(item)(convert(i) for i in item)
        return item

    with mode, torch.no_grad():
        mine, named = tuple(map(convert, args)), {k: convert(v) for k, v in kwargs.items()}
    plain, alone = _watch(None, op, mine, named, mode)
    known = given | {id(t) for t in tensors([*mine, *named.values()])}
    same = [t.dtype for t in tensors(alone)] == [t.dtype for t in tensors(results)]
    return found if same and _inner(plain, known) == _inner(inside, given) else None


def _inner(
    seen: list[tuple[torch.Tensor, torch.dtype]], given: set[int]
) -> Counter[tuple[str, str, str]]:
    """Conversions of what an op makes inside itself: shape, from which dtype to which."""
    return Counter((str(t.shape), str(t.dtype), str(d)) for t, d in seen if id(t) not in given)


def _watch(
    region: AutocastRegion | None,
    op: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: AbstractContextManager[Any],
) -> tuple[list[tuple[torch.Tensor, torch.dtype]], Any]:
    """Run the op with or without autocast; the conversions it made (kept alive), and its result."""
    around: AbstractContextManager[Any] = nullcontext()
    if region is not None:
        around = torch.autocast(region.device, dtype=region.dtype, cache_enabled=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mode, torch.no_grad(), around, watch_casts() as seen:
            try:
                result = op(*args, **kwargs)
            except RuntimeError:
                # Without autocast the operands' dtypes may not even fit together.
                if region is not None:
                    raise
                result = None
    return seen, result
