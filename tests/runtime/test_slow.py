"""A rank that has become slow is told with numbers; noise, pauses and other batches are not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from fxpart.runtime.monitor.straggler_detector import Straggler, StragglerDetector

BASE = (10e6, 12e6, 9e6, 11e6)  # nanoseconds a step


def told(
    rows: Iterator[tuple[int, ...]], planned: dict[int, float] | None = None
) -> tuple[list[Straggler], StragglerDetector]:
    pace, found = StragglerDetector([(0,), (1,), (2,), (3,)]), []
    pace.listeners.append(found.append)
    if planned is not None:
        pace.expect(planned)
    for step, row in enumerate(rows):
        pace.note(step, row)
    return found, pace


def steps(
    count: int, factor: Callable[[int, int, random.Random], float], seed: int = 0
) -> Iterator[tuple[int, ...]]:
    draw = random.Random(seed)
    for step in range(count):
        yield tuple(int(base * factor(step, rank, draw)) for rank, base in enumerate(BASE))


def noise(draw: random.Random) -> float:
    return draw.lognormvariate(0, 0.1)


def test_three_times_slower_is_told_once_with_numbers() -> None:
    def factor(step: int, rank: int, draw: random.Random) -> float:
        return noise(draw) * (3 if rank == 2 and 100 <= step < 300 else 1)

    found, pace = told(steps(400, factor))
    first, second = found
    assert (first.rank, first.stage, first.over, first.by) == (2, 2, False, "before")
    assert 114 <= first.step <= 125  # three steps of four of a window of 20
    assert 2.7 < first.times < 3.3
    assert 24e-3 < first.seconds < 30e-3 and 8e-3 < first.before < 10e-3
    assert all(0.8 < each < 1.3 for each in first.others)
    text = str(first)
    assert text.startswith("rank 2 (stage 2) is ") and "times slower than before at step" in text
    assert f"{1e3 * first.seconds:.3g} ms of computation" in text
    assert (second.rank, second.over) == (2, True) and 305 <= second.step <= 325
    assert "no longer slow" in str(second)
    assert pace.slow == ()


def test_two_ranks_and_the_first() -> None:
    pace, found = StragglerDetector([(0,), (1,)]), []
    pace.listeners.append(found.append)
    for step in range(100):
        pace.note(step, (30_000_000 if step >= 50 else 10_000_000, 12_000_000))
    assert [(each.rank, each.times) for each in found] == [(0, 3.0)]
    assert pace.slow == (0,) and pace.seconds() == {0: 0.03, 1: 0.012}


@pytest.mark.parametrize("seed", range(20))
def test_noise_and_pauses_and_batches_are_not_told(seed: int) -> None:
    """Log-normal noise, a pause of 0.2 s in every tenth step, batches of 1 to 16 times the size."""

    def factor(step: int, rank: int, draw: random.Random) -> float:
        size = 1 + 15 * (step % 7 == 0 or step > 500)
        pause = 20 if rank == 1 and draw.random() < 0.1 else 0
        return draw.lognormvariate(0, 0.3) * size + pause

    assert told(steps(1000, factor, seed))[0] == []


def test_a_slow_drift_of_all_is_nobodys_fault() -> None:
    def factor(step: int, rank: int, draw: random.Random) -> float:
        return noise(draw) * (1 + step / 50)

    assert told(steps(500, factor))[0] == []


def test_slow_from_the_beginning_by_the_plan() -> None:
    def factor(step: int, rank: int, draw: random.Random) -> float:
        return noise(draw) * (3 if rank == 3 else 1)

    rows = list(steps(60, factor))
    assert told(iter(rows))[0] == []
    planned = {rank: 2 * base / 1e9 for rank, base in enumerate(BASE)}  # a machine twice as fast
    (found,), _ = told(iter(rows), planned)
    assert (found.rank, found.by) == (3, "the plan says") and 2.6 < found.times < 3.4
    assert "22 ms by the plan" in str(found)
    # Predictions that are wrong alike, or by half, name nobody.
    planned[3] *= 3
    planned[1] *= 2
    assert told(iter(rows), planned)[0] == []


def test_what_is_not_known_is_not_looked_at() -> None:
    pace, found = StragglerDetector([(0,), (1,)]), []
    pace.listeners.append(found.append)
    for step in range(100):
        pace.note(step, (0, 10))  # a GPU
        pace.note(step, (10,))  # one process
        pace.note(step, ())
    assert found == [] and pace.seconds() == {}
    for step in range(100):
        pace.note(step, (100_000 * (1 + 5 * (step > 50)), 100_000))  # a third of a millisecond
    assert [each.rank for each in found] == [0]


def test_lanes_and_virtual_stages_are_one_stage() -> None:
    pace = StragglerDetector([(0, 1), (2, 3), (0, 1), (2, 3)], warns=True)
    with pytest.warns(UserWarning, match=r"rank 3 \(stage 1\) is 4\.0 times slower than before"):
        for step in range(60):
            slow = 4 if step > 30 else 1
            pace.note(step, (10_000_000, 10_000_000, 10_000_000, 10_000_000 * slow))
