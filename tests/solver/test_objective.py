"""The objective against a second implementation, written from the definition alone."""

from __future__ import annotations

import random

import pytest
from built_schedules import BUILDERS
from msgspec.structs import replace
from oracles.partition_brute import choices
from partition_problems import filling, random_problem, with_zero_bubble

from fxpart.errors import FxpartError
from fxpart.schedule.action import Schedule, StageEdge
from fxpart.schedule.dependence import chain
from fxpart.schedule.simulate import simulate
from fxpart.solver.objective import evaluate
from fxpart.solver.problem import (
    BlockValue,
    DeviceLimit,
    PartitionChoice,
    PartitionProblem,
    Variant,
    Weight,
)


def again(problem: PartitionProblem, choice: PartitionChoice) -> tuple[float, bool]:
    """Step time and whether every memory suffices, block by block, with dictionaries and loops."""
    one, n = problem.variants[choice.variant], len(problem.blocks)
    stage_of = {b: sum(s <= b for s in choice.starts) - 1 for b in range(n)}
    count, m = len(choice.starts), one.microbatches
    split = choice.schedule == "zb-h1"
    time, load, fits = [(2 + split) * problem.action] * count, [problem.once] * count, True
    for b in range(n):
        kind = problem.devices[stage_of[b]].type
        time[stage_of[b]] += one.forward[kind][b] + one.backward[kind][b]
        time[stage_of[b]] += one.split.seconds[kind][b] if split else 0.0
        load[stage_of[b]] += problem.step[kind][b]
    need, state, updating = [0] * count, [0] * count, [0] * count
    flying = {
        "gpipe": [m] * count,
        "1f1b": [min(m, count - s) for s in range(count)],
        "zb-h1": [min(m, count)] * count,
    }[choice.schedule]
    for s in range(count):
        mine = [b for b in range(n) if stage_of[b] == s]
        need[s] += max(one.workspace[b] for b in mine)
        saved = {b: max(one.activation[b], one.split.kept[b] if split else 0) for b in mine}
        need[s] += flying[s] * sum(saved.values())
    for value, size in zip(problem.values, one.value_bytes, strict=True):
        for s in {stage_of[c] for c in value.consumers} - {stage_of[value.producer]}:
            device = problem.devices[s]
            once = device.latency + size * device.inverse_bandwidth
            if value.sent:
                time[s] += once + (once if value.gradient else 0.0)
            need[s] += flying[s] * size
        home = stage_of[value.producer]
        if not value.saved and any(stage_of[c] != home for c in value.consumers):
            need[home] += flying[home] * size
    for weight in problem.weights:
        holders = {stage_of[b] for b in weight.blocks}
        for s in holders:
            state[s] += weight.weight + weight.gradient + weight.optimizer
            updating[s] = max(updating[s], weight.temporary)
            if len(holders) > 1 and weight.gradient:
                link = problem.devices[1 if s == 0 else s]
                once = link.latency + weight.gradient * link.inverse_bandwidth
                load[s] += m * once + once  # one out for each microbatch, one back a step
    fits = all(
        state[s] + max(need[s], updating[s]) <= problem.devices[s].memory for s in range(count)
    )
    fill = filling(choice.schedule, m, count)
    longest = max((m - fill) * t + f for t, f in zip(time, load, strict=True))
    return fill * sum(time) + longest, fits


@pytest.mark.slow
def test_agrees_with_a_second_implementation() -> None:
    seen = {True: 0, False: 0}
    for seed in range(150):
        problem = with_zero_bubble(random_problem(seed), seed)
        for choice in choices(problem):
            evaluation = evaluate(problem, choice)
            seconds, fits = again(problem, choice)
            assert evaluation.seconds == pytest.approx(seconds, rel=1e-12)
            assert evaluation.feasible == fits
            seen[fits] += 1
    assert min(seen.values()) > 100  # both answers were really put to the test


def by_hand(**changes: object) -> PartitionProblem:
    """Four blocks, a skip from 0 to 2 and 3, a weight tied between 0 and 3, two devices."""
    problem = PartitionProblem(
        blocks=("a", "b", "c", "d"),
        devices=(
            DeviceLimit(name="x", type=0, memory=1000, latency=0.0, inverse_bandwidth=0.0),
            DeviceLimit(name="y", type=1, memory=1000, latency=0.5, inverse_bandwidth=0.25),
        ),
        values=(
            BlockValue(producer=0, consumers=(1,), gradient=True),
            BlockValue(producer=0, consumers=(2, 3), gradient=False),
            BlockValue(producer=1, consumers=(2,), gradient=True, saved=False),
            BlockValue(producer=2, consumers=(3,), gradient=True),
        ),
        weights=(
            Weight(name="tied", blocks=(0, 3), weight=10, gradient=8, optimizer=20),
            Weight(name="own", blocks=(2,), weight=3, gradient=3, optimizer=6),
            Weight(name="mean", blocks=(1, 2), weight=5, gradient=0, optimizer=0, buffer=True),
        ),
        variants=(
            Variant(
                microbatch_size=1,
                microbatches=3,
                forward=((1.0, 2.0, 3.0, 4.0), (10.0, 20.0, 30.0, 40.0)),
                backward=((2.0, 4.0, 6.0, 8.0), (20.0, 40.0, 60.0, 80.0)),
                activation=(7, 11, 13, 17),
                workspace=(1, 9, 4, 2),
                value_bytes=(4, 8, 12, 16),
            ),
        ),
        step=((0.1, 0.2, 0.3, 0.4), (1.0, 2.0, 3.0, 4.0)),
        max_stages=2,
    )
    return replace(problem, **changes)


def test_every_part_by_hand() -> None:
    evaluation = evaluate(by_hand(), PartitionChoice(variant=0, schedule="1f1b", starts=(0, 2)))
    first, second = evaluation.stages
    assert (first.forward_seconds, first.backward_seconds) == (3.0, 6.0)
    assert first.transfer_seconds == 0.0
    assert first.sync_seconds == pytest.approx(4 * (0.5 + 8 * 0.25))  # the second device's link
    assert first.optimizer_seconds == pytest.approx(0.3)
    assert (second.forward_seconds, second.backward_seconds) == (70.0, 140.0)
    # the skip once without a gradient, although two blocks use it; the neighbour there and back
    assert second.transfer_seconds == pytest.approx((0.5 + 2.0) + 2 * (0.5 + 3.0))
    assert second.sync_seconds == pytest.approx(4 * (0.5 + 8 * 0.25))
    assert (first.in_flight, second.in_flight) == (2, 1)
    assert first.memory.activations == 2 * (7 + 11) + 9
    assert second.memory.activations == 13 + 17 + 4
    assert (first.memory.transfers, second.memory.transfers) == (2 * 12, 8 + 12)
    assert (second.memory.weights, second.memory.gradients) == (13, 11)
    assert (second.memory.optimizer, second.memory.buffers) == (26, 5)
    assert second.memory.total == 13 + 11 + 26 + 5 + 34 + 20
    longest = 2 * second.seconds + second.step_only_seconds
    assert evaluation.seconds == pytest.approx(first.seconds + second.seconds + longest)


def test_gpipe_keeps_every_microbatch_and_has_the_same_objective() -> None:
    problem = by_hand(schedules=("1f1b", "gpipe"))
    one = evaluate(problem, PartitionChoice(variant=0, schedule="1f1b", starts=(0, 2)))
    other = evaluate(problem, PartitionChoice(variant=0, schedule="gpipe", starts=(0, 2)))
    assert other.seconds == one.seconds
    assert [s.in_flight for s in other.stages] == [3, 3]


@pytest.mark.parametrize("m", [1, 2, 7])
def test_ties_cost_a_message_for_each_microbatch_and_one_back(m: int) -> None:
    problem = by_hand()
    problem = replace(problem, variants=(replace(problem.variants[0], microbatches=m),))
    tied = evaluate(problem, PartitionChoice(variant=0, schedule="1f1b", starts=(0, 2)))
    alone = evaluate(
        replace(problem, weights=problem.weights[1:]),
        PartitionChoice(variant=0, schedule="1f1b", starts=(0, 2)),
    )
    assert [s.sync_seconds for s in tied.stages] == [(m + 1) * (0.5 + 8 * 0.25)] * 2
    assert [s.sync_seconds for s in alone.stages] == [0.0, 0.0]


def _bare(
    f: list[float], b: list[float], m: int, schedule: str
) -> tuple[float, Schedule, tuple[StageEdge, ...]]:
    """The objective of stages without transfers, ties and optimizer, and their schedule."""
    n = len(f)
    variant = Variant(
        microbatch_size=1,
        microbatches=m,
        forward=(tuple(f),),
        backward=(tuple(b),),
        activation=(0,) * n,
        workspace=(0,) * n,
        value_bytes=(),
    )
    problem = PartitionProblem(
        blocks=tuple(f"b{i}" for i in range(n)),
        devices=tuple(
            DeviceLimit(name=f"d{i}", type=0, memory=1, latency=0.0, inverse_bandwidth=0.0)
            for i in range(n)
        ),
        values=(),
        weights=(),
        variants=(variant,),
        step=((0.0,) * n,),
        schedules=("1f1b", "gpipe"),
        max_stages=n,
    )
    choice = PartitionChoice(variant=0, schedule=schedule, starts=tuple(range(n)))  # type: ignore[arg-type]
    return evaluate(problem, choice).seconds, BUILDERS[schedule](n, m), chain(n)


@pytest.mark.slow
def test_objective_and_schedule_in_time() -> None:
    """What the objective is to the simulated schedule: as its docstring says, and no more."""
    r, short = random.Random(5), {"gpipe": 0, "1f1b": 0}
    for _ in range(200):
        n, m = r.randint(1, 5), r.randint(1, 6)
        f = [float(r.randint(0, 9)) for _ in range(n)]
        other = [float(r.randint(0, 9)) for _ in range(n)]
        ratio = r.choice([0.0, 0.5, 1.0, 2.0])
        for b, in_proportion in (([ratio * x for x in f], True), (other, False)):
            taken = dict[str, float]()
            for schedule in ("gpipe", "1f1b"):
                seconds, actions, edges = _bare(f, b, m, schedule)
                taken[schedule] = simulate(actions, edges, f, b).step_seconds
                short[schedule] += taken[schedule] > seconds
            peaks = max(f) + max(b)
            assert taken["1f1b"] <= taken["gpipe"] == sum(f) + sum(b) + (m - 1) * peaks
            assert taken["gpipe"] >= seconds
            if in_proportion:
                assert taken["gpipe"] == seconds
    assert min(short.values()) > 0  # for neither schedule is it an upper bound in general


@pytest.mark.parametrize(("schedule", "taken"), [("1f1b", 60.0), ("gpipe", 63.0)])
def test_where_forward_and_backward_peak_on_different_stages(schedule: str, taken: float) -> None:
    f, b = [0.0, 10.0, 1.0, 1.0], [10.0, 0.0, 0.0, 1.0]
    seconds, actions, edges = _bare(f, b, 3, schedule)
    assert seconds == 43.0
    assert simulate(actions, edges, f, b).step_seconds == taken


def test_one_stage_pays_neither_transfers_nor_ties() -> None:
    (stage,) = evaluate(by_hand(), PartitionChoice(variant=0, schedule="1f1b", starts=(0,))).stages
    assert (stage.transfer_seconds, stage.sync_seconds, stage.memory.transfers) == (0.0, 0.0, 0)


def test_broken_constraints_are_faults() -> None:
    problem = by_hand(no_cut_after=(1,), min_stages=2, schedules=("gpipe",))
    whole = evaluate(problem, PartitionChoice(variant=0, schedule="gpipe", starts=(0,)))
    assert whole.faults == ("1 stages, allowed are 2 to 2",)
    cut = evaluate(problem, PartitionChoice(variant=0, schedule="1f1b", starts=(0, 2)))
    assert cut.faults == ("schedule 1f1b, allowed are gpipe", "cut after block 1")
    small = replace(problem.devices[1], memory=100)
    full = evaluate(
        replace(problem, devices=(problem.devices[0], small)),
        PartitionChoice(variant=0, schedule="gpipe", starts=(0, 3)),
    )
    assert len(full.faults) == 1
    assert "y has 100" in full.faults[0]


def test_the_optimizers_temporaries_have_to_fit_too() -> None:
    """After the passes: beside the state, without activations; the largest of a stage's weights."""
    problem, whole = by_hand(), PartitionChoice(variant=0, schedule="1f1b", starts=(0,))
    (stage,) = evaluate(problem, whole).stages
    state = stage.memory.total - stage.memory.activations - stage.memory.transfers
    assert stage.updating == state and stage.needed == stage.memory.total
    passes = stage.memory.activations + stage.memory.transfers
    for more in (passes, passes + 1):
        sizes = (more - 1, more, 0)
        weights = tuple(
            replace(w, temporary=size) for w, size in zip(problem.weights, sizes, strict=True)
        )
        limited = tuple(replace(d, memory=state + passes) for d in problem.devices)
        found = evaluate(replace(problem, weights=weights, devices=limited), whole)
        assert found.stages[0].updating == state + more
        assert found.feasible == (more == passes)


@pytest.mark.parametrize(
    ("variant", "starts"),
    [(0, ()), (0, (1,)), (0, (0, 0)), (0, (0, 4)), (0, (0, 1, 2)), (1, (0,)), (-1, (0,))],
)
def test_choices_of_another_problem_are_refused(variant: int, starts: tuple[int, ...]) -> None:
    with pytest.raises(FxpartError) as caught:
        evaluate(by_hand(), PartitionChoice(variant=variant, schedule="1f1b", starts=starts))
    assert caught.value.code == "FXP109"


def test_every_choice_has_whole_stages() -> None:
    r = random.Random(0)
    for seed in range(40):
        problem = random_problem(seed)
        for choice in r.sample(list(choices(problem)) or [None], 1):
            if choice is not None:
                stages = evaluate(problem, choice).stages
                covered = [b for s in stages for b in range(s.first, s.last + 1)]
                assert covered == list(range(len(problem.blocks)))
