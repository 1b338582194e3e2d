"""Random schedules of every sort over real ranks: each value and gradient that comes is checked."""

from __future__ import annotations

from collections import Counter

import pytest
import transfer_programs as programs
from ranks import Pool

from fxpart.runtime import InProcess
from fxpart.schedule.action import ActionKind, Schedule, StageEdge, parse
from fxpart.schedule.make import make

TINY, LARGE = 5, 2 << 20  # elements of float32: 20 bytes and 8 MiB


@pytest.mark.slow
def test_cases_are_of_every_sort() -> None:
    """Builders, any order, split backwards, several stages a rank, copies of stages, skips."""
    found = Counter[str]()
    for seed in range(60):
        given = programs.case(seed, TINY)
        schedule = given.schedule
        found[schedule.name] += 1
        found["copies"] += bool(schedule.replicas)
        found["virtual"] += len(set(schedule.stage_rank)) < schedule.stages
        found["split"] += any(a.kind is ActionKind.W for actions in schedule.ranks for a in actions)
        found["skip"] += any(
            abs(a.stage - a.peer) > 1 for actions in schedule.ranks for a in actions if a.peer
        )
    sorts = ("1f1b", "gpipe", "interleaved", "breadth-first", "zb-h1", "zb-v", "found")
    assert all(found[sort] for sort in (*sorts, "copies", "virtual", "split", "skip")), found


@pytest.mark.slow
def test_in_process_every_value_is_right() -> None:
    checked = Counter[str]()
    for seed in range(12):
        checked += programs.here(seed, TINY)
    assert checked["F"] > 100 and checked["B"] > 100


def test_a_wrong_value_is_seen() -> None:
    """A transport that exchanges two messages of one kind is told by the first check."""

    class Mixed(InProcess):
        def send(self, source: int, target: int, channel: int, tensor: object) -> object:
            return super().send(source, target, channel, tensor + 1)  # type: ignore[operator]

    seed = next(s for s in range(20) if not programs.case(s, TINY).schedule.replicas)
    with pytest.raises(AssertionError):
        programs.executed(programs.case(seed, TINY), Mixed(programs.WORLD), Counter())


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [False, True])
@pytest.mark.parametrize(("elements", "seeds"), [(TINY, range(12)), (LARGE, range(100, 104))])
def test_over_real_ranks_every_value_is_right(
    pool: Pool, elements: int, seeds: range, shared_memory: bool
) -> None:
    results = pool.run(programs.run, list(seeds), elements, shared_memory, ranks=4)
    total = sum((Counter(found) for found in results), Counter[str]())
    assert total["executed"] + total["driven"] == 4 * len(seeds)
    if elements == TINY:
        assert total["driven"] and total["F"] > 300 and total["B"] > 200
    received = sum(
        a.kind in (ActionKind.RECV_F, ActionKind.RECV_B)
        for seed in seeds
        for actions in programs.case(seed, elements).schedule.ranks
        for a in actions
    )
    assert total["transfers"] == received


def test_a_stage_reads_a_value_after_the_backward_of_its_maker() -> None:
    """On one rank, where no gradient comes back: no named schedule does so."""
    edges = (StageEdge(0, 1, False), StageEdge(0, 2))
    spec = programs.program(3, edges, TINY)
    words = ("0F0", "2F0", "2B0", "0B0", "1F0", "1B0")
    order = Schedule("found", 3, 1, (tuple(map(parse, words)),), (0, 0, 0))
    given = programs.Case(make(order, (0, 0, 0), 1, edges), spec, TINY)
    checked = Counter[str]()
    programs.executed(given, InProcess(1), checked)
    assert checked == {"F": 2, "B": 1}
