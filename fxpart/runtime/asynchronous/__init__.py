"""Asynchronous pipeline training without flushes: each stage updates its own weights."""

from __future__ import annotations

from fxpart.runtime.asynchronous.trainer import AsyncTrainer

__all__ = ["AsyncTrainer"]
