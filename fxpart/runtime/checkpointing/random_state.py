"""State of this process's random generators: torch, NumPy and Python.

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
