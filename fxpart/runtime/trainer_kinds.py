"""Kinds of trainers, which checkpoints distinguish without importing the trainers' modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from fxpart.runtime.asynchronous.trainer import AsyncTrainer
    from fxpart.runtime.asynchronous.trainer_base import AsyncTrainerBase
    from fxpart.runtime.stateful_trainer import StatefulTrainer
    from fxpart.runtime.trainer import Trainer


def is_synchronous(trainer: StatefulTrainer) -> TypeGuard[Trainer]:
    """Return whether a trainer flushes its pipeline at every optimizer step."""
    return trainer.kind == "synchronous"


def is_asynchronous(trainer: StatefulTrainer) -> TypeGuard[AsyncTrainerBase]:
    """Return whether a trainer updates its stages without flushes, by schedule or from queues."""
    return trainer.kind in ("asynchronous", "queue")


def is_scheduled_asynchronous(trainer: StatefulTrainer) -> TypeGuard[AsyncTrainer]:
    """Return whether a trainer updates its stages without flushes, by a fixed schedule."""
    return trainer.kind == "asynchronous"
