"""What ops were seen to do in this process: graphs that are made again observe nothing twice.

A model that is planned anew, cut for lanes, captured again or for evaluation has the same kinds of
calls in graph after graph, and running one on fake tensors takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import sympy
import torch

from fxpart.compat import symbol_facts

MOST = 256  # surroundings; a model has one for each kind of batch


def get_observations(mode: AbstractContextManager[Any]) -> dict[Hashable, Any]:
    """What was seen where all is as now beside an op's arguments; the caller reads and adds.

    That is what the mode knows of symbolic sizes, and torch's settings that choose kernels and
    types.
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
    """Whether sizes hold in any graph: numbers, or made of symbols that the signature names.

    A symbol that an op makes itself (how many entries are not zero) has another name each time.
    """
    symbols = {s for size in sizes if isinstance(size, sympy.Basic) for s in size.free_symbols}
    return symbols <= _symbols(signature)


def _symbols(item: Hashable) -> set[sympy.Basic]:
    if isinstance(item, sympy.Basic):
        return set(item.free_symbols)
    if isinstance(item, tuple):
        return {symbol for part in item for symbol in _symbols(part)}
    return set()
