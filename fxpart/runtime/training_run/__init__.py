"""Resumable training runs: checkpoints, the ledger of steps, signals, generations."""

from __future__ import annotations

from fxpart.runtime.training_run.options import Checkpoints

__all__ = ["Checkpoints"]
