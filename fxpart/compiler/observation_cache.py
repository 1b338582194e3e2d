"""Process-wide cache of observed op behavior, so that equal calls are observed only once.

Running an op on fake tensors takes milliseconds, and graphs of one model repeat the same calls:
when it is planned again, sharded per mesh rank, or captured again.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import sympy
import torch

from fxpart.compat import symbol_facts

MOST = 256  # cached environments; a model has one per kind of batch


def get_observations(mode: AbstractContextManager[Any]) -> dict[Hashable, Any]:
    """Return the cache for the current environment; the caller reads and extends it.

    The environment is what the mode knows about symbolic sizes, and the torch settings that select
    kernels and dtypes.
    """
    return _table(
        (
            symbol_facts(mode),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.mkldnn.enabled,
        )
    )


_DEVICES = ("cpu", "cuda")


@lru_cache(maxsize=MOST)
def _table(facts: Hashable) -> dict[Hashable, Any]:
    return {}


def is_reusable_size(sizes: list[Any], signature: Hashable) -> bool:
    """Return whether sizes are valid in any graph: they use only symbols of the signature.

    A symbol that an op creates itself (such as the number of nonzero entries) differs on each call.
    """
    return _symbols(tuple(sizes)) <= _symbols(signature)


def _symbols(item: Hashable) -> set[sympy.Basic]:
    if isinstance(item, sympy.Basic):
        return set(item.free_symbols)
    if isinstance(item, tuple):
        return {symbol for part in item for symbol in _symbols(part)}
    return set()
