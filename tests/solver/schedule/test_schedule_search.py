"""Searched schedules against every order, the simulator, the verifier and the builders."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from built_schedules import BUILDERS
from oracles.order_brute import best_order

from fxpart.errors import FxpartError
from fxpart.schedule.action import ActionKind, StageEdge
from fxpart.schedule.builders import assign_loop_ranks, assign_v_ranks
from fxpart.schedule.dependence import chain
from fxpart.schedule.in_flight import activation_peak
from fxpart.schedule.lower import lower
from fxpart.schedule.make import make
from fxpart.schedule.plan_actions import format_plan_actions, parse_plan_actions
from fxpart.schedule.simulate import simulate
from fxpart.schedule.verify import check
from fxpart.solver.order.bounds import lower_bound, windows
from fxpart.solver.order.jobs import Jobs
from fxpart.solver.order.list_scheduler import ListScheduler, list_in_flight_caps, rules
from fxpart.solver.order.problem import ScheduleProblem, ScheduleSearchResult
from fxpart.solver.order.search import search_schedule


def seconds_of(rng: random.Random, whole: bool) -> float:
    return float(rng.randint(1, 9)) if whole else rng.uniform(0.2, 3)


def graph(rng: random.Random, stages: int) -> tuple[StageEdge, ...]:
    """A chain, mostly with skips, sometimes broken."""
    pairs = [(a, b) for a in range(stages) for b in range(a + 1, stages)]
    kept = [p for p in pairs if rng.random() < (0.95 if p[1] == p[0] + 1 else 0.2)]
    return tuple(StageEdge(a, b, rng.random() < 0.9) for a, b in kept)


def problem_of(
    seed: int, ranks: tuple[int, ...], m: int, *, split: bool = False, whole: bool = True
) -> ScheduleProblem:
    """Random costs, links and memory for stages on these ranks."""
    rng, stages = random.Random(seed), len(ranks)
    edges = chain(stages) if rng.random() < 0.5 else graph(rng, stages)
    forward = tuple(seconds_of(rng, whole) for _ in ranks)
    halves = tuple((seconds_of(rng, whole), seconds_of(rng, whole)) for _ in ranks)
    held = tuple(rng.randint(1, 4) for _ in ranks)
    most = [sum(h for h, r in zip(held, ranks, strict=True) if r == k) for k in sorted(set(ranks))]
    return ScheduleProblem(
        stage_rank=ranks,
        microbatches=m,
        edges=edges,
        forward=forward,
        backward=tuple(i + w for i, w in halves),
        halves=halves if split else None,
        transfer={(e.source, e.target): rng.choice((0.0, seconds_of(rng, whole))) for e in edges},
        links=rng.random() < 0.5,
        activation=held,
        memory=tuple(rng.choice((None, rng.randint(a, m * a))) for a in most),
    )


TINY = [
    *[((0, 1), m, False) for m in (2, 3, 4)],
    *[((0, 1, 2), m, False) for m in (2, 3)],
    *[((0, 1), m, True) for m in (2, 3)],
    ((0, 1, 2), 2, True),
    ((0, 1, 0, 1), 1, True),
    ((0, 1, 0), 2, False),
    ((0, 0, 1), 2, False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "m", "split"), TINY)
def test_as_good_as_the_best_of_all_orders(ranks: tuple[int, ...], m: int, split: bool) -> None:
    """Proven optimal, at the optimum; and no bound is above it."""
    for seed in range(10):
        problem = problem_of(seed, ranks, m, split=split)
        jobs = Jobs(problem, split=split)
        oracle = best_order(jobs)
        assert oracle is not None
        assert lower_bound(jobs, windows(jobs)) <= oracle[1]
        found = search_schedule(problem, time_limit=60, effort=5)
        assert (found.seconds, found.status) == (oracle[1], "optimal")
        assert found.bound == pytest.approx(found.seconds)


@pytest.mark.slow
def test_three_stages_four_microbatches_and_fractions() -> None:
    for seed in range(4):
        problem = problem_of(100 + seed, (0, 1, 2), 4, whole=False)
        found = search_schedule(problem, time_limit=60, effort=5)
        oracle = best_order(Jobs(problem, split=False))
        assert oracle is not None
        assert found.seconds == pytest.approx(oracle[1], rel=1e-9)
        assert found.status == "optimal"


PLACES = [
    (0, 1, 2, 3),
    assign_loop_ranks(6, 3),
    assign_v_ranks(6),
    (0, 1, 2),
    (0, 0, 1, 2, 1),
    assign_loop_ranks(8, 4),
]


def best_builder(problem: ScheduleProblem) -> float:
    """By the simulator: the least step of the named schedules that fit, infinite if none does."""
    best = float("inf")
    for name, builder in BUILDERS.items():
        if name == "forward" or (name.startswith("zb") and problem.halves is None):
            continue
        try:
            built = builder(problem.stage_rank, problem.microbatches, problem.edges)
        except FxpartError:
            continue
        held = activation_peak(built, problem.activation)
        limits = [held[r] if x is None else x for r, x in enumerate(problem.memory)]
        if all(a <= b for a, b in zip(held, limits, strict=True)):
            best = min(best, simulated(problem, built))
    return best


def simulated(problem: ScheduleProblem, built: object) -> float:
    """Seconds by the simulator; without links' limits it is given no transfers."""
    schedule = built if not problem.links else lower(built, problem.edges)  # type: ignore[arg-type]

    def transfer(stage: int, peer: int, kind: ActionKind) -> float:
        return problem.transfer[(stage, peer) if kind is ActionKind.SEND_F else (peer, stage)]

    return simulate(
        schedule,  # type: ignore[arg-type]
        problem.edges, problem.forward, problem.backward, transfer, split=problem.halves,
    ).step_seconds  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_never_worse_than_the_best_builder(part: int) -> None:
    """On 100 random problems with unequal stages; each schedule is safe, and fits."""
    better = 0
    for seed in range(20 * part, 20 * part + 20):
        rng = random.Random(seed)
        ranks, m = rng.choice(PLACES), rng.randint(2, 7)
        problem = problem_of(seed, ranks, m, split=rng.random() < 0.5, whole=False)
        found = search_schedule(problem, time_limit=2, effort=0.05)
        assert found.seconds <= found.builder_seconds
        if not problem.links:  # else the order of sends is the lowering's
            assert found.seconds <= best_builder(problem) * (1 + 1e-9)
            assert simulated(problem, found.schedule) == pytest.approx(found.seconds)
        assert found.bound <= found.seconds
        better += found.seconds < found.builder_seconds
        _is_safe(problem, found)
    assert better >= 5


def _is_safe(problem: ScheduleProblem, found: ScheduleSearchResult) -> None:
    lines = format_plan_actions(found.schedule)
    read = parse_plan_actions(lines, problem.stage_rank, problem.microbatches)
    assert read == found.schedule
    made = make(read, problem.stage_rank, problem.microbatches, problem.edges)
    assert not check(made, problem.edges)
    held = activation_peak(found.schedule, problem.activation)
    for peak, limit in zip(held, problem.memory, strict=True):
        assert limit is None or peak <= limit


def test_time_is_that_of_the_simulator() -> None:
    """For chains with links also, whose transfers go in the order in which values are made."""
    for seed in range(30):
        rng = random.Random(seed)
        ranks = rng.choice([(0, 1, 2), (0, 1, 2, 3), (0, 1, 0, 1)])
        problem = replace(
            problem_of(seed, ranks, 4, split=seed % 2 == 1, whole=False), edges=chain(len(ranks))
        )
        problem = replace(
            problem, transfer={(e.source, e.target): rng.uniform(0, 2) for e in problem.edges}
        )
        jobs = Jobs(problem, split=seed % 2 == 1)
        for rule in rules(jobs, windows(jobs).tail)[:3]:
            orders = ListScheduler(jobs).run(rule)
            timed = jobs.timed(orders)
            assert timed is not None
            wanted = simulated(problem, jobs.schedule(orders))
            assert timed.seconds == pytest.approx(wanted, rel=1e-9)


@pytest.mark.slow
def test_lists_never_get_stuck_and_keep_the_memory() -> None:
    """Whatever the stage graph, the ranks, and however little memory above the least."""
    for seed in range(20):
        rng = random.Random(seed)
        stages = rng.randint(1, 6)
        wish = [rng.randint(0, 2) for _ in range(stages)]
        ranks = tuple(sorted(set(wish)).index(rank) for rank in wish)
        problem = problem_of(seed, ranks, rng.randint(1, 6), split=seed % 2 == 1, whole=False)
        jobs = Jobs(problem, split=seed % 2 == 1)
        tails = windows(jobs).tail
        for cap in (None, *list_in_flight_caps(jobs)):
            for rule in rules(jobs, tails):
                orders = ListScheduler(jobs, cap).run(rule)
                assert jobs.fits(orders)
                place = {job: index for mine in orders for index, job in enumerate(mine)}
                assert all(place[b] < place[job] for job, b in enumerate(jobs.before) if b >= 0)
                assert sum(map(len, orders)) == len(jobs.action)
                assert not check(lower(jobs.schedule(orders), problem.edges), problem.edges)


def test_it_beats_the_builders_on_unequal_stages() -> None:
    """A slow first stage and a quick last one: 1F1B waits where a searched order does not."""
    problem = ScheduleProblem(
        (0, 1, 2, 3), 8, chain(4), (1.0, 3.0, 2.0, 1.0), (2.0, 5.0, 2.0, 4.0),
        transfer={(0, 1): 1.0, (1, 2): 1.0, (2, 3): 1.0},
    )  # fmt: skip
    began = time.monotonic()
    found = search_schedule(problem)
    assert time.monotonic() - began < 5
    assert found.status == "optimal"
    assert found.seconds < found.builder_seconds
    assert search_schedule(problem) == found
    assert found.gap == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_a_large_problem_has_a_list_and_a_bound() -> None:
    """16 stages and 64 microbatches: beyond CP-SAT, within its time."""
    rng = random.Random(3)
    forward = tuple(rng.uniform(1, 1.5) for _ in range(16))
    problem = ScheduleProblem(
        tuple(range(16)), 64, chain(16), forward, tuple(2 * f for f in forward), memory=(16,) * 16
    )
    began = time.monotonic()
    found = search_schedule(problem, time_limit=2)
    assert time.monotonic() - began < 30
    assert found.seconds <= found.builder_seconds
    assert found.gap < 0.05


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"forward": (1.0,)}, "forward"),
        ({"backward": (1.0, float("nan"))}, "backward"),
        ({"halves": ((1.0, 1.0),)}, "halves"),
        ({"microbatches": 0}, "sizes"),
        ({"stage_rank": (0, 2)}, "without gaps"),
        ({"memory": (1,)}, "memory"),
        ({"activation": (1, -1)}, "activation"),
        ({"transfer": {(0, 1): -1.0}}, "transfer"),
        ({"edges": (StageEdge(1, 0),)}, "FXP901"),
        ({"activation": (1, 5), "memory": (None, 4)}, "rank 1, stages 1"),
    ],
)
def test_refusals(change: dict[str, object], why: str) -> None:
    good = ScheduleProblem((0, 1), 2, chain(2), (1.0, 1.0), (2.0, 2.0))
    with pytest.raises(FxpartError, match=why):
        search_schedule(replace(good, **change))  # type: ignore[arg-type]


def test_one_stage_and_no_time_at_all() -> None:
    found = search_schedule(ScheduleProblem((0,), 3, (), (0.0,), (0.0,)))
    assert (found.seconds, found.status, found.gap) == (0, "optimal", 0)
    quick = search_schedule(
        ScheduleProblem((0, 1), 2, chain(2), (0.0, 1.0), (0.0, 2.0)), time_limit=0.0
    )
    assert quick.seconds == 6
    assert not check(lower(quick.schedule, chain(2)), chain(2))
