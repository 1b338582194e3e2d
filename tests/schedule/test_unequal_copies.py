"""Copies of unequal speed: a faster one takes more turns of a round."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.schedule.action import Schedule, StageEdge, list_group_stages
from fxpart.schedule.builders.replica_warmup import count_warmup_forwards
from fxpart.schedule.make import make
from fxpart.schedule.simulate import simulate
from fxpart.schedule.spec import get_in_flight_limits
from fxpart.schedule.text import from_text, to_text

ROUND = ((0, 0, 1), (2,))


def two_and_one(microbatches: int, name: str = "1f1b") -> Schedule:
    """Stage 0 is twice as fast as its copy, stage 1; both feed stage 2."""
    edges = (StageEdge(0, 2), StageEdge(1, 2))
    return make(name, range(3), microbatches, edges, replicas=ROUND[:1])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(1, 30))
def test_a_round_is_repeated(turns: list[int], microbatches: int) -> None:
    schedule = Schedule("x", 5, microbatches, (), tuple(range(5)), (tuple(turns),))
    for m in range(microbatches):
        takers = [k for k in list_group_stages(turns) if schedule.runs(k, m)]
        assert takers == [turns[m % len(turns)]]
    taken = [m for k in list_group_stages(turns) for m in schedule.list_microbatches(k)]
    assert sorted(taken) == list(range(microbatches))
    assert schedule.list_microbatches(4) == tuple(range(microbatches))


def test_all_are_busy_where_turns_follow_speed() -> None:
    """Rounds of 3, of which the fast copy (1 s) does two and the slow one (2 s) one, as their
    consumer (2/3 s) takes each: all work 2/3 s for each microbatch."""
    seconds = [1.0, 2.0, 2 / 3]
    for name in ("gpipe", "1f1b"):
        found = simulate(two_and_one(12, name), seconds_edges(), seconds, seconds)
        assert found.busy == pytest.approx((16.0, 16.0, 16.0))
    equal = make("1f1b", range(3), 12, seconds_edges(), replicas=((0, 1),))
    slow = simulate(equal, seconds_edges(), seconds, seconds).step_seconds
    assert simulate(two_and_one(12), seconds_edges(), seconds, seconds).step_seconds < slow


def seconds_edges() -> tuple[StageEdge, ...]:
    return StageEdge(0, 2), StageEdge(1, 2)


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        (((0, 1), (2, 3, 4)), (3, 3, 1, 1, 1)),  # ceil(5 / 2), ceil(3 / 3)
        (((0, 0, 1), (2, 3, 4)), (3, 2, 1, 1, 1)),  # (1.5 + 3) / 1.5, (3 + 3) / 3
        # Stage 2 does two of three: 1.5 s each, stage 3 one in 3 s. (2 + 3) / 2, 1 each; but before
        # its backward of 0 stage 2 does no more than 0, so that the feeders need no more.
        (((0, 1), (2, 2, 3)), (3, 3, 1, 1)),
    ],
)
def test_ahead_by_hand(replicas: tuple[tuple[int, ...], ...], expected: tuple[int, ...]) -> None:
    edges = tuple(StageEdge(a, b) for a in (0, 1) for b in list_group_stages(replicas[1]))
    assert count_warmup_forwards(len(expected), 12, edges, replicas) == expected


def drawn(seed: int) -> tuple[int, list[tuple[int, ...]], tuple[StageEdge, ...]]:
    """Groups of random rounds, joined in a chain with skips."""
    source = Random(seed)
    units: list[tuple[int, ...]] = []
    first = 0
    for _ in range(source.randint(2, 4)):
        size = source.randint(1, 3)
        unit = tuple(range(first, first + size))
        turns = [*unit, *source.choices(unit, k=source.randint(0, 4))]
        source.shuffle(turns)
        units.append(tuple(turns))
        first += size
    pairs = {(i, i + 1) for i in range(len(units) - 1)}
    pairs |= {(i, j) for j in range(2, len(units)) for i in range(j - 1) if source.random() < 0.3}
    edges = tuple(
        StageEdge(a, b) for i, j in sorted(pairs) for a in list_group_stages(units[i])
        for b in list_group_stages(units[j])
    )  # fmt: skip
    return first, units, edges


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_no_round_deadlocks(seed: int) -> None:
    """Proved by the verifier for sends that wait; what is in flight is as the builder says."""
    stages, units, edges = drawn(seed)
    groups = [unit for unit in units if len(list_group_stages(unit)) > 1]
    count = Random(seed).randint(1, 24)
    for name in ("gpipe", "1f1b", "forward"):
        made = make(name, range(stages), count, edges, replicas=groups)
        assert from_text(to_text(made)) == made
    made = make("1f1b", range(stages), count, edges, replicas=groups)
    held = simulate(made, edges, [1.0] * stages, [2.0] * stages).in_flight
    assert all(h <= most for h, most in zip(held, get_in_flight_limits(made) or (), strict=True))
