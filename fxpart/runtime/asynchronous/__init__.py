"""Training that never drains: a stream of microbatches through stages that update by themselves."""

from __future__ import annotations

from fxpart.runtime.asynchronous.trainer import AsyncTrainer

__all__ = ["AsyncTrainer"]
