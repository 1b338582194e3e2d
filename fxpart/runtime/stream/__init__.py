"""Training that never drains: a stream of microbatches through stages that update by themselves."""

from __future__ import annotations

from fxpart.runtime.stream.trainer import StreamTrainer

__all__ = ["StreamTrainer"]
