"""A run that can be gone on with: checkpoints, the ledger of its steps, signals, generations."""

from __future__ import annotations

from fxpart.runtime.training_run.options import Checkpoints

__all__ = ["Checkpoints"]
