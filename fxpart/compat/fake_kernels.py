"""Shapes of the results of ops that torch cannot run on the meta device."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss for each row, and the saved probabilities of all prefixes of its target.

    Targets [rows, length] have at most ``length`` labels; of targets in one row, each may have all.
    """
    length, rows = log_probs.shape[0], log_probs.shape[1:-1]
    prefixes = 2 * targets.shape[-1] + 1
    return log_probs.new_empty(rows), log_probs.new_empty((*rows, length, prefixes))


def _ctc_loss_backward(grad: torch.Tensor, log_probs: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(log_probs)


def _add_missing() -> None:
    """Register the functions above, but not where an application has registered its own."""
    for name, function in (
        ("aten::_ctc_loss.Tensor", _ctc_loss),
        ("aten::_ctc_loss_backward.Tensor", _ctc_loss_backward),
    ):
        with suppress(RuntimeError):
            torch.library.register_fake(name, function)


_add_missing()
