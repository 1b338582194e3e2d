"""Random ops whose numbers depend on seed, step, microbatch and op, not on the plan.

A random op of the graph is called through :func:`seeded`: the default generator of the op's device
is seeded for this call and restored afterwards. Results therefore do not depend on the number of
ranks, the order of stages, or restarts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from fxpart.accelerator import get_device_module, is_accelerator

_MASK = (1 << 64) - 1
_LOCK = threading.RLock()  # All threads share one generator.


def mix(*words: int) -> int:
    """Return a 63-bit hash of integers: splitmix64 (Steele, Lea, Flood, OOPSLA 2014), chained."""
    state = 0
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class RepeatedKey(int):
    """The key of a microbatch whose rows are repeated, so that its random numbers repeat too.

    count: how often each row is repeated. axes: the mesh axes over which ranks share rows.
    """

    count: int
    axes: frozenset[str]

    @classmethod
    def of(cls, key: int, count: int, axes: frozenset[str]) -> RepeatedKey:
        """Return the key with the repetition count and axes."""
        found = cls(key)
        found.count, found.axes = count, axes
        return found


def microbatch_key(seed: int, step: int, microbatch: int) -> int:
    """Return the key that stage modules take as first argument; all numbers are 0-based."""
    return mix(seed, step, microbatch)


def seeded(key: int, index: int, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``op(*args, **kwargs)`` with the generator seeded by ``mix(key, index)``.

    key: the microbatch's key. index: the op's number among the graph's random ops.
    """
    return draw(mix(key, index), op, *args, **kwargs)


def draw(seed: int, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``op(*args, **kwargs)`` with the generator of its device seeded by ``seed``."""
    generator = _generator(args, kwargs)
    with _LOCK:
        state = generator.get_state()
        generator.manual_seed(seed)
        try:
            return op(*args, **kwargs)
        finally:
            generator.set_state(state)


def _generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    """Return the default generator of the op's device: its ``device`` argument or first tensor."""
    device = kwargs.get("device")
    if device is None:
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), torch.device("cpu"))
    device = torch.device(device)
    if not is_accelerator(device):
        return torch.default_generator
    module = get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    found: torch.Generator = module.default_generators[index]
    return found
