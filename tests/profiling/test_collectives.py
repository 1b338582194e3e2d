"""Timed transfers and collectives: from samples to lines by closed form, and a run over gloo."""

from __future__ import annotations

from typing import Any

import pytest
from quiet_network import answers, seconds
from ranks import Pool

from fxpart.profiling import collectives
from fxpart.profiling.collectives import (
    OPERATIONS,
    WHOLE,
    CommunicationTask,
    measure,
    request,
    results,
    tasks,
)


def test_every_task_once_in_a_round() -> None:
    payload = request([(0, 1), (1, 0)], [[0, 1], [0, 1, 2, 3]], sizes=[1024, 4096])
    todo = tasks(payload, 4)
    assert len(todo) == len(set(todo)) == 2 * 3 + 2 * len(OPERATIONS) + 2 * len(WHOLE)
    assert CommunicationTask("broadcast", (0, 1), 1024) not in todo, (
        "the runtime broadcasts to all alone"
    )
    assert all(1 <= task.times <= 16 for task in todo)
    assert CommunicationTask("send", (0, 1), 1 << 24).times == 1


def test_lines_are_found_again() -> None:
    payload = request([(0, 1), (2, 0)], [[0, 1], [0, 1, 2, 3]])
    found = results(payload, answers(payload, 4))
    assert {(each.operation, each.ranks) for each in found} == {
        ("send", (0, 1)), ("send", (2, 0)),
        *((name, (0, 1)) for name in OPERATIONS), *((name, (0, 1, 2, 3)) for name in WHOLE),
    }  # fmt: skip
    for each in found:
        assert each.rounds == 7
        for size, took in each.points:
            assert took == pytest.approx(seconds(each.operation, size))
        assert each.fit.latency == pytest.approx(seconds(each.operation, 0))
        assert each.fit.worst < 1e-9 and max(map(abs, each.held_out)) < 1e-9
        curve = collectives.curve(each, 1, "here")
        assert (curve.ranks, curve.points) == (len(each.ranks), each.points)
        assert curve.latency == each.fit.latency


def test_half_of_the_shortest_round_trip_is_the_answer() -> None:
    """A shortest message that was disturbed throughout does not make the others too fast."""
    payload = request([(0, 1)], [], sizes=[4, 1024])
    given = answers(payload, 2)
    given[0]["samples"][0] = [1e-2] * 7
    (found,) = results(payload, given)
    assert [size for size, _ in found.points] == [4, 1024]
    shortest = min(given[0]["samples"][1])
    assert found.points[0][1] == pytest.approx(shortest / 2)
    assert found.points[1][1] == pytest.approx(min(given[0]["samples"][2]) - shortest / 2)


def on_rank(payload: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    return measure(dist.get_rank(), dist.get_world_size(), payload)


@pytest.mark.slow
def test_over_gloo(pool: Pool) -> None:
    payload = request(
        [(0, 1), (3, 2)], [[0, 1], [0, 1, 2, 3]], sizes=[64, 1 << 17], budget=0.01, least=2
    )
    given = pool.run(on_rank, payload, ranks=4)
    for task, *samples in zip(tasks(payload, 4), *(g["samples"] for g in given), strict=True):
        for rank, taken in enumerate(samples):
            assert len(taken) == (2 if rank in task.ranks else 0), (task, rank)
    for each in results(payload, given):
        assert all(took > 0 for _, took in each.points)
        assert each.fit.latency >= 0 and each.fit.inverse_bandwidth >= 0
