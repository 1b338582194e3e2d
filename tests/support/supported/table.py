"""All behaviors, in the order of the page."""

from __future__ import annotations

from supported import gradients, layers, losses, optimizers, state  # noqa: F401
from supported.behavior import BEHAVIORS

__all__ = ["BEHAVIORS"]
