"""State of random generators: the global ones of torch, NumPy and Python, and the user's.

Random ops of a program do not depend on it (:mod:`fxpart.rng`); shuffled data and user code do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fxpart.accelerator import find_accelerator, get_device_module
from fxpart.errors import FxpartError, Problem

State = dict[str, Any]


def capture_torch_generators() -> dict[str, torch.Tensor]:
    """Return the states of torch's generators by kind."""
    found = {"torch": torch.get_rng_state()}
    kind = find_accelerator()
    if kind is not None and get_device_module(kind).is_initialized():
        found[kind] = get_device_module(kind).get_rng_state()
    return found


def capture_plain_generators() -> dict[str, Any]:
    """Return the states of Python's and NumPy's generators by kind, as plain data."""
    state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    inner = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in state["state"].items()}
    return {"python": random.getstate(), "numpy": {**state, "state": inner}}


def restore_generators(given: Mapping[str, Any], where: str) -> None:
    """Restore captured states by kind; missing kinds stay unchanged.

    Raises FXP510 with ``where`` for an invalid state.
    """
    setters: dict[str, Callable[[Any], object]] = {
        "torch": lambda state: torch.set_rng_state(state.cpu()),
        "numpy": np.random.set_state,
        "python": random.setstate,
    }
    accelerator = find_accelerator()
    if accelerator is not None:
        setters[accelerator] = get_device_module(accelerator).set_rng_state
    for kind, set_state in setters.items():
        if kind in given:
            try:
                set_state(given[kind])
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as cause:
                problem = Problem("FXP510", where, f"{kind}: {cause}", "use another checkpoint")
                raise FxpartError([problem]) from cause


def capture_generator_states() -> State:
    """Return the state of the global generators of torch, NumPy and Python."""
    shared = {kind: _bytes(tensor) for kind, tensor in capture_torch_generators().items()}
    return {**shared, **capture_plain_generators()}


def restore_generator_states(
    state: Mapping[str, Any], where: str = "the run's random state"
) -> None:
    """Restore what :func:`capture_generator_states` returned; FXP510 with ``where`` if invalid."""
    restore_generators(
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
