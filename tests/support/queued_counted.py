"""Bytes that copies hold for their queues, counted as a trainer runs with pauses of any length."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from fxpart.runtime.queues.worker import ReplicaWorker
from fxpart.runtime.weights.weight_stash import storage_bytes


def bytes_of(*found: Any) -> int:
    return storage_bytes(t for tensors in found for t in tensors if t is not None)


class Most:
    """By stage the most bytes of each kind, as a trainer runs with pauses of any length."""

    def __init__(
        self, trainer: Any, batch: Callable[[int], Any], seed: int, patch: pytest.MonkeyPatch
    ) -> None:
        self.of: dict[int, dict[str, int]] = {}
        draw, turn = random.Random(seed), ReplicaWorker.turn

        def paused(worker: ReplicaWorker) -> bool:
            if draw.random() < 0.6:
                return True
            moved = turn(worker)
            self.look(worker)
            return moved

        patch.setattr(ReplicaWorker, "turn", paused)
        for step in range(8):
            trainer.step(batch(step))
        trainer.drain()

    def look(self, worker: ReplicaWorker) -> None:
        parts = [part.dense.values() for part in worker._gradients.values()]
        given = [t for each in worker._gathered.values() for _, t in each.values()]
        now = {
            "gradients": bytes_of(*parts),
            "summing": bytes_of(*parts, *given, *worker._totals.values()),
            "sent": bytes_of(*worker._results.values()),
            "flying": len(worker._states),
            "sets": len(worker.weights._stash),
        }
        most = self.of.setdefault(worker.copy, now)
        for name, value in now.items():
            most[name] = max(most[name], value)
