"""Samples of transfers and collectives as a machine without noise would give them."""

from __future__ import annotations

from typing import Any

from fxpart.profiling.collectives import CommunicationTask, tasks

LATENCY = {"send": 50e-6, "all_reduce": 200e-6, "all_gather": 120e-6}
SLOPE = {"send": 0.5e-9, "all_reduce": 2e-9, "all_gather": 1e-9}


def seconds(operation: str, size: float) -> float:
    """What one takes: a line."""
    return LATENCY.get(operation, 100e-6) + SLOPE.get(operation, 1.5e-9) * size


def answers(payload: dict[str, Any], world: int, rounds: int = 7) -> list[dict[str, Any]]:
    """What ranks would say on a machine without noise, but for one round that was disturbed."""

    def sample(task: CommunicationTask, rank: int, number: int) -> float:
        if task.operation == "answer":
            took = 2 * LATENCY["send"]
        elif task.operation == "send":  # the answer comes back
            took = seconds("send", task.size) + LATENCY["send"]
        else:  # the last rank of the group is the slowest
            took = seconds(task.operation, task.size) * (1 if rank == task.ranks[-1] else 0.8)
        return took * (9 if number == 3 else 1)

    todo = tasks(payload, world)
    return [
        {
            "samples": [
                [sample(task, rank, n) for n in range(rounds)] if rank in task.ranks else []
                for task in todo
            ]
        }
        for rank in range(world)
    ]
