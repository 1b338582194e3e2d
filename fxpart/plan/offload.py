"""What a plan keeps in host memory instead of the devices' memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Offload = Literal["none", "optimizer", "activations", "both"]
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "activations", "both")
AUTO = "auto"  # as the constraint: the planner selects one of them
# Bytes of activations that wait for a copy, in sizes of the largest one, for each direction.
AHEAD = 2
_OPTIMIZER: tuple[Offload, ...] = ("optimizer", "both")
_ACTIVATIONS: tuple[Offload, ...] = ("activations", "both")


def offload_of(constraints: Mapping[str, object]) -> Offload:
    """Return the constraint's value, "none" without one and where the planner selects."""
    given = constraints.get("offload", "none")
    return next((each for each in OFFLOADS if each == given), "none")


def offloads_optimizer(offload: str) -> bool:
    """Return whether optimizer state is in host memory, and the host updates the parameters."""
    return offload in _OPTIMIZER


def offloads_activations(offload: str) -> bool:
    """Return whether tensors for the backward wait in host memory."""
    return offload in _ACTIVATIONS
