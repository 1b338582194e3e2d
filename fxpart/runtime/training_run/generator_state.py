"""State of random generators, the global ones and the user's, as plain values."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fxpart.runtime.checkpointing import random_state

State = dict[str, Any]


def capture_generator_states() -> State:
    """Return the state of the global generators of torch, NumPy and Python."""
    shared = {
        kind: _bytes(tensor) for kind, tensor in random_state.capture_torch_generators().items()
    }
    return {**shared, **random_state.capture_plain_generators()}


def restore_generator_states(
    state: Mapping[str, Any], where: str = "the run's random state"
) -> None:
    """Restore what :func:`capture_generator_states` returned; FXP510 with ``where`` if invalid."""
    random_state.restore_generators(
        {k: _tensor(v) if isinstance(v, bytes) else v for k, v in state.items()}, where
    )


def is_generator(value: Any) -> bool:
    """Return whether a value is a random generator."""
    return isinstance(
        value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    )


def get_generator_state(generator: Any) -> Any:
    """Return the state of a generator."""
    if isinstance(generator, torch.Generator):
        return _bytes(generator.get_state())
    if isinstance(generator, np.random.Generator):
        return _of_numpy(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _of_numpy(generator.get_state(legacy=False))
    return generator.getstate()


def set_state(generator: Any, state: Any) -> None:
    """Restore the state of a generator."""
    if isinstance(generator, torch.Generator):
        generator.set_state(_tensor(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _to_numpy(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_to_numpy(state))
    else:
        generator.setstate(state)


def _bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _of_numpy(state: Any) -> Any:
    """Convert arrays to ("array", dtype, bytes)."""
    if isinstance(state, np.ndarray):
        return ("array", state.dtype.str, state.tobytes())
    return {k: _of_numpy(v) for k, v in state.items()} if isinstance(state, dict) else state


def _to_numpy(state: Any) -> Any:
    if isinstance(state, tuple):
        return np.frombuffer(state[2], dtype=state[1]).copy()
    return {k: _to_numpy(v) for k, v in state.items()} if isinstance(state, Mapping) else state
