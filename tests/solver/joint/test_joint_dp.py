"""The joint planner against enumeration and against itself: optima, bounds, limits, determinism."""

from __future__ import annotations

import random
from itertools import count
from math import inf

import msgspec
import pytest
from joint_problems import random_problem, rich_problem, transformer
from msgspec.structs import replace
from oracles.joint_brute import solve_joint_brute

from fxpart.errors import FxpartError
from fxpart.solver.joint import interleaved_search
from fxpart.solver.joint.arrays import JointArrays
from fxpart.solver.joint.bounds import CheapBounds
from fxpart.solver.joint.constraints.apply import with_options
from fxpart.solver.joint.enumeration import choices
from fxpart.solver.joint.feasibility import find_feasible_joint_choice
from fxpart.solver.joint.objective import JointScorer, evaluate
from fxpart.solver.joint.portfolio import solve
from fxpart.solver.joint.problem import JointProblem, JointSolution, StagePin
from fxpart.solver.joint.stage_tables import SearchScope
from fxpart.solver.joint.tables import JointTables
from fxpart.solver.progress import Progress
from fxpart.solver.schedule_costs import get_fill_fraction

ROUNDING = 1e-9


def check(problem: JointProblem, *, proven: bool = True) -> JointSolution:
    """Compare with enumeration; returns what that finds."""
    best, found = solve_joint_brute(problem), solve(problem, time_limit=600)
    assert found.bound <= best.objective * (1 + 1e-12)
    assert [c for c in found.candidates if not evaluate(problem, c).feasible] == []
    if proven:
        assert found.status == best.status
        assert (found.choice is None) == (best.choice is None)
    if found.choice is not None:
        assert found.objective == evaluate(problem, found.choice).seconds
        assert found.candidates[0] == found.choice
    if found.status == "optimal":
        assert found.objective == pytest.approx(best.objective, rel=ROUNDING, abs=0.0)
    return best


@pytest.mark.slow
def test_forty_random_problems() -> None:
    best = [check(random_problem(seed)) for seed in range(20)]
    best += [check(rich_problem(seed)) for seed in range(20)]
    assert 10 <= sum(b.choice is None for b in best) <= 30


def by_stage(problem: JointProblem, seed: int) -> JointProblem:
    """With one data degree, and a tensor degree for each stage."""
    rng = random.Random(seed)
    data = rng.choice([option.data for option in problem.options])
    kept = [option for option in problem.options if option.data == data]
    tensor = sorted({problem.layouts[option.layout].tensor for option in kept})
    given = tuple(rng.choice(tensor) for _ in range(rng.randint(1, min(3, len(problem.blocks)))))
    pools = tuple(replace(pool, devices=9, memory=2 * pool.memory) for pool in problem.pools)
    return msgspec.structs.replace(
        with_options(problem, kept), uniform=False, stage_tensor=given, min_stages=len(given),
        max_stages=len(given), pools=pools,
    )  # fmt: skip


def test_tensor_degrees_by_stage() -> None:
    """Plans, bounds, and whether anything fits are those of enumeration."""
    made = [by_stage(draw(seed), seed) for draw in (random_problem, rich_problem)
            for seed in range(20)]  # fmt: skip
    best = [check(problem) for problem in made]
    for problem, one in zip(made, best, strict=True):
        assert (find_feasible_joint_choice(problem, inf) is None) == (one.choice is None)
    unequal = [len(set(p.stage_tensor)) > 1 for p in made]
    assert sum(u and b.choice is not None for u, b in zip(unequal, best, strict=True)) > 2
    wrong = msgspec.structs.replace(made[0], stage_tensor=(1,) * 9)
    with pytest.raises(FxpartError, match="FXP206"):
        solve(wrong)


def test_a_busy_machine_changes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits count the process's own work: here each look at the clock is a minute later."""
    problem = transformer(12, [16])
    assert solve(problem, time_limit=0.0).status == "best found"
    clock = count(0.0, 60.0)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    assert solve(problem, time_limit=30.0).status == "optimal"


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.5, 0.999, 1.5])
def test_what_is_slow_enough_is_not_searched(factor: float) -> None:
    """The bound is proven up to that time and never above the optimum."""
    optima = [(p, solve(p, time_limit=600)) for p in map(rich_problem, range(20))]
    checked = 0
    for problem, best in optima:
        if best.choice is not None:
            enough = factor * best.objective
            found = solve(problem, time_limit=600, enough=enough)
            least = min(enough, best.objective) * (1 - 1e-6)
            assert least <= found.bound <= best.objective * (1 + 1e-12)
            assert factor < 1 or found.objective == best.objective
            checked += 1
    assert checked > 5


@pytest.mark.slow
@pytest.mark.parametrize("start", range(40, 540, 100))
def test_five_hundred_random_problems(start: int) -> None:
    best = [check(random_problem(seed)) for seed in range(start, start + 100)]
    assert 0 < sum(b.choice is None for b in best) < 50


@pytest.mark.slow
@pytest.mark.parametrize("start", range(40, 540, 100))
def test_five_hundred_with_pins_experts_and_three_pools(start: int) -> None:
    best = [check(rich_problem(seed)) for seed in range(start, start + 100)]
    assert sum(b.choice is not None for b in best) > 25


@pytest.mark.slow
def test_interleaved_that_is_not_enumerated_has_a_sound_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interleaved_search, "_FEW", 0)
    problems = [rich_problem(seed) for seed in range(90)]
    problems = [p for p in problems if "interleaved" in p.schedules]
    best = [check(p, proven=False) for p in problems]
    assert sum(b.choice is not None and b.choice.virtual > 1 for b in best) >= 3


@pytest.mark.slow
def test_cheap_bounds_are_below_every_choice() -> None:
    compared = 0
    for seed in range(60):
        problem = rich_problem(seed)
        scorer, bounds = JointScorer(problem), CheapBounds(JointArrays(problem))
        least: dict[tuple[int, str, int, int], float] = {}
        groups = JointArrays(problem).groups()
        for choice in choices(problem):
            evaluation = scorer.evaluate(choice)
            if evaluation.feasible:
                group = next(g for g, ids in enumerate(groups) if choice.options[0] in ids)
                key = (choice.microbatches, choice.schedule, choice.virtual, group)
                least[key] = min(least.get(key, inf), evaluation.seconds)
        for (m, schedule, virtual, group), seconds in least.items():
            bound = bounds.bound(m, schedule, groups[group], virtual)  # type: ignore[arg-type]
            assert bound <= seconds * (1 + 1e-12)
            compared += 1
    assert compared > 20


@pytest.mark.slow
def test_entries_are_stages_as_the_objective_defines_them() -> None:
    """Every entry of some problems: seconds up to rounding, and memory to the byte."""
    compared = 0
    for seed in range(30):
        problem = replace(rich_problem(seed), schedules=("1f1b", "async", "zb-h1"))
        stacked, scorer = JointArrays(problem), JointScorer(problem)
        tables = JointTables(stacked)
        runs = tables.runs
        for m in problem.microbatches:
            for schedule in problem.schedules:
                share = get_fill_fraction(schedule, m, 3)
                for options in stacked.groups():
                    entries = tables.entries(SearchScope(m, schedule, options, 3, 3), inf)
                    for e in range(0, len(entries), 7):
                        index, cls = int(entries.option[e]), int(entries.cls[e])
                        work = scorer.work(problem.options[index], m)
                        assert work is not None
                        run = ((int(runs.first[cls]), int(runs.last[cls])),)
                        most = min(int(entries.flights[e]), 10**6)
                        for flying in (most, most + 1):
                            extra, limit = 0, 10**6
                            if schedule == "async":
                                limit = scorer.copied.limit(m)
                                extra = scorer.copied.extra(m, flying)
                            stage = scorer.stage(index, work, run, m, flying, extra)
                            fits = stage.memory.total <= stage.memory_limit
                            assert fits == (flying == most) or most == limit
                        load = (m - share) * stage.seconds + stage.step_only_seconds
                        assert entries.filling[e] == pytest.approx(share * stage.seconds, abs=1e-9)
                        assert entries.load[e] == pytest.approx(load, rel=1e-12, abs=1e-9)
                        compared += 1
    assert compared > 500


@pytest.mark.parametrize(
    ("devices", "limit"), [([128], 0.01), ([1024], 0.01), ([512, 512], 0.01), ([8192, 8192], 0.01)]
)
@pytest.mark.slow
def test_large_models_are_proven_within_a_hundredth(devices: list[int], limit: float) -> None:
    problem = transformer(96, devices)
    found = solve(problem, time_limit=600)
    assert found.choice is not None
    assert evaluate(problem, found.choice).feasible
    assert found.objective * (1 - limit) <= found.bound <= found.objective
    assert 1 < len(found.candidates) <= 9
    sorts = {
        (len(c.options), c.microbatches, c.schedule, *sorted(set(c.options)))
        for c in found.candidates
    }
    assert len(sorts) == len(found.candidates)
    seconds = [evaluate(problem, c).seconds for c in found.candidates]
    assert seconds == sorted(seconds)
    again = solve(problem, time_limit=600)
    assert msgspec.json.encode(again) == msgspec.json.encode(found)


@pytest.mark.slow
def test_uniform_degrees_cost_no_less() -> None:
    problem = transformer(24, [64])
    free, uniform = solve(problem), solve(replace(problem, uniform=True))
    assert free.status == uniform.status == "optimal"
    assert free.objective <= uniform.objective
    assert uniform.choice is not None
    assert len(set(uniform.choice.options)) == 1


@pytest.mark.slow
def test_without_time_there_is_a_plan_and_a_bound() -> None:
    problem = transformer(24, [64, 64])
    best, found = solve(problem), solve(problem, time_limit=0)
    assert found.choice is not None
    assert evaluate(problem, found.choice).feasible
    assert 0 < found.bound <= best.bound * (1 + ROUNDING) <= found.objective * (1 + 2 * ROUNDING)


def test_an_interrupt_gives_what_is_known() -> None:
    problem, told = transformer(24, [64]), list[Progress]()
    best = solve(problem)

    def interrupt(progress: Progress) -> None:
        told.append(progress)
        if len(told) == 2:
            raise KeyboardInterrupt

    found = solve(problem, progress=interrupt)
    assert len(told) == 2
    assert found.choice is not None
    assert 0 < found.bound <= best.objective <= found.objective
    assert found.status in ("within gap", "best found")


@pytest.mark.slow
def test_progress_never_gets_worse() -> None:
    told = list[Progress]()
    found = solve(transformer(24, [32, 32]), progress=told.append)
    bounds, incumbents = [p.bound for p in told], [p.incumbent for p in told]
    assert len(told) >= 2
    assert bounds == sorted(bounds)
    assert incumbents == sorted(incumbents, reverse=True)
    assert bounds[-1] <= found.bound
    assert incumbents[-1] >= found.objective


@pytest.mark.slow
def test_pins_hold_where_the_number_of_stages_is_open() -> None:
    problem = transformer(12, [8])
    problem = replace(problem, max_stages=6, pins=(StagePin(first=4, last=5, stage=2),))
    found = solve(problem)
    assert found.status == "optimal"
    assert found.choice is not None
    starts = found.choice.starts
    assert starts[2] <= 4
    assert (*starts, 14)[3] > 5


def test_every_fault_is_told() -> None:
    problem = random_problem(0)
    wrong = replace(
        problem,
        kinds=problem.kinds[:-1],
        batch=0,
        virtual=(1,),
        pins=(StagePin(first=3, last=99, stage=0),),
        no_cut_after=(77,),
    )
    with pytest.raises(FxpartError) as caught:
        solve(wrong)
    assert [p.code for p in caught.value.problems] == ["FXP206"] * 5
    table = replace(problem.works[0], activation=(1,) * 9)
    with pytest.raises(FxpartError, match="9 entries"):
        solve(replace(problem, works=(table, *problem.works[1:])))
    with pytest.raises(FxpartError, match="FXP109"):
        solve(problem, solver="simplex")
