"""The state of this process's generators of random numbers: torch's, NumPy's and Python's.

A program's random ops do not look at it (:mod:`fxpart.rng`); shuffled data and a user's own code
do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fxpart.errors import FxpartError, Problem


def capture_torch_generators() -> dict[str, torch.Tensor]:
    """torch's generators, by kind."""
    found = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def capture_plain_generators() -> dict[str, Any]:
    """Python's and NumPy's, by kind; plain data."""
    state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    inner = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in state["state"].items()}
    return {"python": random.getstate(), "numpy": {**state, "state": inner}}


def restore_generators(given: Mapping[str, Any], where: str) -> None:
    """Go on from what the two gave, by kind; kinds that are not there stay as they are.

    Raises FXP510 for what is no generator's state, with ``where`` for its place.
    """
    ways: dict[str, Callable[[Any], object]] = {
        "torch": lambda state: torch.set_rng_state(state.cpu()),
        "cuda": lambda state: torch.cuda.set_rng_state(state) if torch.cuda.is_available() else 0,
        "numpy": np.random.set_state,
        "python": random.setstate,
    }
    for kind, put in ways.items():
        if kind in given:
            try:
                put(given[kind])
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as cause:
                problem = Problem("FXP510", where, f"{kind}: {cause}", "use another checkpoint")
                raise FxpartError([problem]) from cause
