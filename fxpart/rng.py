"""Random ops that draw the same numbers whatever the plan: by seed, step, microbatch and op.

A random op of the graph is called through :func:`seeded`: the default generator of the op's device
is seeded for this one call and put back afterwards. So neither the number of ranks, nor the order
in which stages run, nor a restart changes a single number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_MASK = (1 << 64) - 1
_LOCK = threading.RLock()  # one generator serves all threads


def mix(*words: int) -> int:
    """A 63-bit hash of integers: splitmix64 (Steele, Lea, Flood, OOPSLA 2014), chained."""
    state = 0
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class RepeatedKey(int):
    """The key of a microbatch whose rows are repeated, so that their random numbers are, too.

    count: how often each row is there. axes: of the mesh, over which ranks share rows.
    """

    count: int
    axes: frozenset[str]

    @classmethod
    def of(cls, key: int, count: int, axes: frozenset[str]) -> RepeatedKey:
        """Return the key with how often rows are repeated."""
        found = cls(key)
        found.count, found.axes = count, axes
        return found


def microbatch_key(seed: int, step: int, microbatch: int) -> int:
    """The key that stage modules take as first argument; all numbers 0-based."""
    return mix(seed, step, microbatch)


def seeded(key: int, index: int, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``op(*args, **kwargs)`` with the generator seeded by ``mix(key, index)``, then restored.

    key: the microbatch's key. index: the op's number among the graph's random ops.
    """
    generator = _generator(args, kwargs)
    with _LOCK:
        state = generator.get_state()
        generator.manual_seed(mix(key, index))
        try:
            return op(*args, **kwargs)
        finally:
            generator.set_state(state)


def _generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    """The default generator of the op's device: its ``device`` argument, or its first tensor's."""
    device = kwargs.get("device")
    if device is None:
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), torch.device("cpu"))
    device = torch.device(device)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
