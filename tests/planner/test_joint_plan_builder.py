"""Plans of joint choices: valid, true to the problem, and compared with the right neighbours."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator

import joint_plans
import joint_problems
import msgspec
import pytest

from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError
from fxpart.plan.model import Alternative, Plan
from fxpart.planner.joint_plan_builder import make_joint_plan
from fxpart.planner.prediction.alternatives import AlternativeComparison
from fxpart.report.explanation_text import explain
from fxpart.report.html import report_html
from fxpart.solver.joint.objective import JointScorer, degrees, evaluate
from fxpart.solver.joint.portfolio import solve
from fxpart.solver.joint.problem import JointChoice, JointProblem, JointSolution

TENS = range(15)  # of seeds; those whose problem has a plan are compared


def seeds(*tens: int) -> list[int]:
    """The seeds of some tens whose random problem has a plan."""
    numbers = (10 * ten + one for ten in tens or TENS for one in range(10))
    found = [seed for seed in numbers if joint_plans.solved(seed) is not None]
    assert found
    return found


def case(seed: int) -> tuple[JointProblem, JointSolution, JointChoice, Plan]:
    """A solved random problem and its plan."""
    found = joint_plans.solved(seed)
    assert found is not None and found[1].choice is not None
    return found[0], found[1], found[1].choice, found[2]


@pytest.mark.parametrize("ten", TENS)
def test_plans_are_valid_and_round_trip(ten: int) -> None:
    for seed in seeds(ten):
        problem, solution, choice, plan = case(seed)
        assert plan.problems() == ()
        text = plan.dumps()
        assert Plan.loads(text) == plan and Plan.loads(text).dumps() == text
        assert joint_plans.plan_of(problem, solution).dumps() == text  # the same again
        assert plan.certificate.lower_bound <= plan.certificate.objective
        assert plan.certificate.status == solution.status
        # Each stage runs on devices of its own pool, and no device twice.
        for stage, option in zip(plan.stages, choice.options, strict=True):
            pool = problem.pools[problem.options[option].pool]
            assert (
                {plan.device(rank).model for rank in stage.ranks} == {pool.name} == {stage.device}
            )
        assert sorted(r for s in plan.stages for r in s.ranks) == list(range(plan.world))
        assert [s.parameters for s in plan.stages] == [
            sum(100 + b for first, last in s.spans for b in range(first, last + 1))
            for s in plan.stages
        ]
        assert explain(plan) and report_html(plan)


@pytest.mark.parametrize("ten", TENS[:5])
def test_edges_are_those_of_the_boundaries(ten: int) -> None:
    for seed in seeds(ten):
        problem, _, choice, plan = case(seed)
        stage_of = [
            sum(start <= b for start in choice.starts) - 1 for b in range(len(problem.blocks))
        ]
        wanted: dict[tuple[int, int], bool] = {}
        for value in problem.boundaries:
            for consumer in value.consumers:
                pair = (stage_of[value.producer], stage_of[consumer])
                if pair[0] != pair[1]:
                    wanted[pair] = wanted.get(pair, False) or value.gradient
        assert {(a, b): back for a, b, back in plan.edges} == wanted


def changed(problem: JointProblem, choice: JointChoice, what: str) -> JointChoice | None:
    """The choice that the words of a change describe; None for another depth."""
    if match := re.fullmatch(r"(\d+) microbatches instead of (\d+)", what):
        assert int(match[2]) == choice.microbatches
        return msgspec.structs.replace(choice, microbatches=int(match[1]))
    if match := re.fullmatch(r"(\S+) instead of (\S+)", what):
        assert match[2] == choice.schedule
        return msgspec.structs.replace(choice, schedule=match[1])
    if match := re.fullmatch(
        r"(?:without (\S+)|(\S+) (\S+) (?:instead of .+|on every stage))", what
    ):
        name = match[1] or match[2]
        place = {"tensor": 1, "expert": 2, "ZeRO": 3, "recompute": 4}[name]
        value = match[3] or {"ZeRO": "0", "recompute": "none"}[name]
        options = []
        for option in choice.options:
            wanted: list[object] = list(degrees(problem, option))
            if name == "tensor":
                wanted[0] = degrees(problem, option)[0] * degrees(problem, option)[1] // int(value)
            wanted[place] = value if name == "recompute" else int(value)
            if wanted[0] == 1:
                wanted[3] = 0
            pool = problem.options[option].pool
            options.append(
                next(
                    index
                    for index, other in enumerate(problem.options)
                    if other.pool == pool and list(degrees(problem, index)) == wanted
                )
            )
        return msgspec.structs.replace(choice, options=tuple(options))
    assert what in ("one stage fewer", "one stage more")
    return None


@pytest.mark.parametrize("ten", TENS)
def test_changes_cost_what_they_say(ten: int) -> None:
    for seed in seeds(ten):
        problem, _, choice, plan = case(seed)
        seen = set()
        for row in plan.changes:
            other = changed(problem, choice, row.what)
            if other is None:
                continue
            found = evaluate(problem, other)
            assert other != choice and other not in seen
            seen.add(other)
            assert (row.step_seconds if found.feasible else row.unfit_seconds) == found.seconds
            assert (row.step_seconds is not None) == found.feasible
            assert (row.microbatches, row.schedule) == (other.microbatches, other.schedule)
        costs = [row.step_seconds or row.unfit_seconds or 0.0 for row in plan.changes]
        assert costs == sorted(costs)
        # Every count next to the plan's is there, unless it breaks more than memory.
        counts = sorted({*problem.microbatches, choice.microbatches})
        at = counts.index(choice.microbatches)
        for other in counts[max(0, at - 1) : at] + counts[at + 1 : at + 2]:
            found = evaluate(problem, msgspec.structs.replace(choice, microbatches=other))
            full = sum(s.memory.total > s.memory_limit for s in found.stages)
            if found.stages and len(found.faults) == full:
                assert any(row.what.startswith(f"{other} microbatches") for row in plan.changes)


def one_less(problem: JointProblem, choice: JointChoice) -> Iterator[JointChoice]:
    """Every way to make two stages one, on the devices of either, or with all their replicas."""
    for k in range(len(choice.options) - 1):
        pair = choice.options[k : k + 2]
        for index, option in enumerate(problem.options):
            alike = [
                index == one
                or (
                    option.pool == problem.options[one].pool
                    and option.data == sum(problem.options[two].data for two in pair)
                    and degrees(problem, index)[1:] == degrees(problem, one)[1:]
                )
                for one in pair
            ]
            if any(alike):
                yield msgspec.structs.replace(
                    choice,
                    starts=choice.starts[: k + 1] + choice.starts[k + 2 :],
                    options=(*choice.options[:k], index, *choice.options[k + 2 :]),
                )


# In the last two tens the fastest merge of some problems does not fit.
@pytest.mark.parametrize("ten", [*TENS, 15, 25])
def test_one_stage_less_is_the_best_merge(ten: int) -> None:
    for seed in seeds(ten):
        problem, _, choice, plan = case(seed)
        row = next((row for row in plan.changes if row.what == "one stage fewer"), None)
        found = [evaluate(problem, other) for other in one_less(problem, choice)]
        fits = [one.seconds for one in found if one.feasible]
        if fits:
            assert row is not None and row.step_seconds == pytest.approx(min(fits), rel=1e-12)
            assert row.stages == len(choice.options) - 1
        else:
            assert row is None or row.step_seconds is None


def test_reasons_name_what_grows() -> None:
    words = Counter(
        "memory" if " needs " in row.why else row.why.split(":")[0]
        for seed in seeds()
        for row in (*case(seed)[3].alternatives, *case(seed)[3].changes)
    )
    assert {"memory", "computation", "idle", "transfers between stages"} <= set(words)
    assert "not found within the time limit" not in words


def test_a_scale_multiplies_all_seconds() -> None:
    problem, solution, choice, plan = case(next(s for s in seeds() if len(case(s)[3].changes) > 3))
    scorer = JointScorer(problem)
    twice = AlternativeComparison(scorer, choice, scorer.evaluate(choice), 2.0)
    for rows, wanted in (
        (twice.changes(), plan.changes),
        (twice.candidates(solution), plan.alternatives),
    ):
        for row, one in zip(rows, wanted, strict=True):
            assert row.what == one.what
            for field in ("step_seconds", "unfit_seconds"):
                known = getattr(one, field)
                assert getattr(row, field) == (None if known is None else 2 * known)
    other = evaluate(problem, choice)
    part = re.compile(r"(.+): (.+) s instead of (.+) s")
    for row, one in zip(twice.changes(), plan.changes, strict=True):
        if (after := part.fullmatch(row.why)) and (before := part.fullmatch(one.why)):
            assert after[1] == before[1]
            assert float(after[2]) == pytest.approx(2 * float(before[2]), rel=0.02)
    assert other.seconds == plan.prediction.step_seconds


@pytest.mark.parametrize("ten", TENS[:5])
def test_reasons_hold(ten: int) -> None:
    for seed in seeds(ten):
        problem, solution, choice, plan = case(seed)
        others = [other for other in solution.candidates if other != choice]
        for row, other in zip(plan.alternatives, others, strict=False):
            found = evaluate(problem, other)
            full = [k for k, s in enumerate(found.stages) if s.memory.total > s.memory_limit]
            if full:
                assert int(re.match(r"stage (\d+) needs", row.why)[1]) in full  # type: ignore[index]
            else:
                assert found.seconds >= plan.prediction.step_seconds * (1 - 1e-9)


def test_a_tight_memory_binds() -> None:
    """Without recompute the model would be faster, and does not fit: explain says so."""
    whole = joint_problems.transformer(24, [16], hidden=4096, batch=64)
    tight = msgspec.structs.replace(
        whole, pools=(msgspec.structs.replace(whole.pools[0], memory=6 * 10**9),)
    )
    plan = joint_plans.plan_of(tight, solve(tight, time_limit=10.0))
    free = joint_plans.plan_of(whole, solve(whole, time_limit=10.0))
    assert plan.problems() == free.problems() == ()
    assert free.prediction.step_seconds < plan.prediction.step_seconds
    assert "Memory is the limit: " in explain(plan)
    assert "No rejected alternative would be" in explain(free)


def large() -> Plan:
    """A plan of 96 layers on 16,384 devices."""
    problem = joint_problems.transformer(96, [16384])
    option = next(
        i for i in range(len(problem.options)) if degrees(problem, i)[:5] == (128, 8, 1, 1, "none")
    )
    choice = JointChoice(
        microbatches=12, schedule="1f1b", options=(option,) * 16,
        starts=tuple(k * 98 // 16 for k in range(16)),
    )  # fmt: skip
    cost = evaluate(problem, choice).seconds
    solution = JointSolution(
        status="best found", choice=choice, objective=cost, bound=cost / 2, solver="none",
        candidates=(choice,),
    )  # fmt: skip
    return make_joint_plan(
        joint_plans.model_of(problem), Cluster.parse("2048x8xh100"), problem, solution,
        batch_size=problem.batch, optimizer="adamw", seed=0, provenance={}, constraints={},
    )  # fmt: skip


@pytest.mark.slow
def test_a_plan_of_16384_ranks_stays_small() -> None:
    plan = large()
    assert plan.world == 16384 and plan.problems() == ()
    text = plan.dumps()
    assert Plan.loads(text) == plan
    devices = msgspec.json.format(msgspec.json.encode(plan.cluster), indent=2).count(b"\n")
    assert text.count("\n") - devices < 1500
    assert '"ranks": "15360-16383"' in text
    assert len(explain(plan).splitlines()) < 100 and len(report_html(plan)) < 200_000
    # Ranks that do not follow each other cost a little more text, and nothing else.
    order = list(range(16384))
    random.Random(1).shuffle(order)
    placed = [order[k * 1024 : (k + 1) * 1024] for k in range(16)]
    moved = msgspec.structs.replace(
        plan,
        stages=tuple(msgspec.structs.replace(s, ranks=tuple(placed[s.index])) for s in plan.stages),
        prediction=msgspec.structs.replace(
            plan.prediction,
            ranks=tuple(
                msgspec.structs.replace(e, ranks=tuple(placed[e.stage]))
                for e in plan.prediction.ranks
            ),
        ),
    )
    assert moved.problems() == () and Plan.loads(moved.dumps()) == moved


def test_placed_stages_keep_their_devices() -> None:
    problem, solution, choice, plan = case(next(s for s in seeds() if len(case(s)[2].options) == 2))
    there = [set(s.ranks) for s in plan.stages]
    pools = [problem.options[option].pool for option in choice.options]
    cluster = joint_plans.cluster_of(problem)
    backwards = []
    taken: set[int] = set()
    for pool, ranks in zip(pools, there, strict=True):
        free = [
            index
            for index, device in reversed(list(enumerate(cluster.devices)))
            if device.model == problem.pools[pool].name and index not in taken
        ][: len(ranks)]
        taken.update(free)
        backwards.append(tuple(free))
    moved = joint_plans.plan_of(problem, solution, backwards)
    assert moved.problems() == ()
    for stage, devices in zip(moved.stages, backwards, strict=True):
        assert [moved.device(rank) for rank in stage.ranks] == [
            cluster.devices[index] for index in devices
        ]


def test_another_cluster_is_refused() -> None:
    problem, solution, _, _ = case(next(s for s in seeds() if len(case(s)[0].pools) == 1))
    more = (*problem.pools, msgspec.structs.replace(problem.pools[0], name="more"))
    cluster = joint_plans.cluster_of(msgspec.structs.replace(problem, pools=more))
    with pytest.raises(FxpartError, match="2 device types, but the costed problem has 1"):
        make_joint_plan(
            joint_plans.model_of(problem), cluster, problem, solution,
            batch_size=problem.batch, optimizer="adamw", seed=0, provenance={}, constraints={},
        )  # fmt: skip


def test_interleaved_stages_have_pieces() -> None:
    problem = joint_problems.transformer(24, [16], hidden=4096, batch=64)
    problem = msgspec.structs.replace(
        problem, schedules=("interleaved",), min_stages=2, max_stages=4
    )
    solution = solve(problem, time_limit=10.0)
    plan = joint_plans.plan_of(problem, solution)
    assert plan.problems() == () and plan.virtual == 2 and plan.edges == ()
    covered = sorted(b for s in plan.stages for a, z in s.spans for b in range(a, z + 1))
    assert covered == list(range(26))
    assert Plan.loads(plan.dumps()) == plan
    assert not any("schedule" in reason for reason in plan.runnable)
    assert "2 virtual stages per rank" in explain(plan) and report_html(plan)


def test_what_runs_is_told() -> None:
    one = next(case(s)[3] for s in seeds() if case(s)[3].world == len(case(s)[3].stages))
    plain = msgspec.structs.replace(
        one, schedule="1f1b", weights="flush",
        stages=tuple(msgspec.structs.replace(s, recompute="none", zero=0) for s in one.stages),
    )  # fmt: skip
    assert plain.runnable == ()
    again = (msgspec.structs.replace(plain.stages[0], recompute="full"), *plain.stages[1:])
    assert msgspec.structs.replace(plain, stages=again, schedule="zb-h1").runnable == ()
    wide = (msgspec.structs.replace(plain.stages[0], ranks=(0, 1)), *plain.stages[1:])
    assert len(msgspec.structs.replace(plain, stages=wide).runnable) == 1
    stream = msgspec.structs.replace(plain, schedule="async", weights="stash")
    assert stream.runnable == ()
    shared = tuple(msgspec.structs.replace(s, zero=1) for s in plain.stages)
    assert "ZeRO" in " ".join(msgspec.structs.replace(stream, stages=shared).runnable)
    assert Alternative(stages=1, microbatches=1, step_seconds=None, why="").what == ""
