"""Cuts of a stream: the dynamic programme against every choice, and a stage's needs by hand."""

from __future__ import annotations

import random
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.partition_brute import choices
from partition_problems import random_problem

from fxpart.errors import FxpartError
from fxpart.schedule.versions import WeightVersionCounters, count_chain_warmup
from fxpart.schedule.weight_modes import MODES
from fxpart.solver.asynchronous.dp import solve_async_pipeline
from fxpart.solver.asynchronous.objective import AsyncPipelineScorer, busy_seconds
from fxpart.solver.asynchronous.problem import AsyncPipelineProblem
from fxpart.solver.asynchronous.weight_mode_requirements import (
    compute_weight_mode_requirements,
    count_prediction_bytes,
    explain_unsupported_weight_mode,
)
from fxpart.solver.problem import PartitionChoice

STREAMS = [name for name, mode in MODES.items() if not mode.flush]


def problem(seed: int) -> AsyncPipelineProblem:
    """A random problem under a random mode, with predictions that cost something in some blocks.

    Every other problem has factors on the seconds, some of them infinite.
    """
    base, r = random_problem(seed), random.Random(seed)
    base = msgspec.structs.replace(base, schedules=("1f1b",))
    passes = tuple(tuple(r.choice((0.0, r.random())) for _ in base.blocks) for _ in base.step)
    weights, counts = r.choice(STREAMS), range(base.min_stages, base.max_stages + 1)
    steps = tuple(
        tuple(r.choice((1.0, 1 + r.random(), inf)) for _ in counts) for _ in base.variants
    )
    return AsyncPipelineProblem(
        problem=base, weights=weights, passes=passes, steps=steps if seed % 2 else ()
    )


@pytest.mark.slow
@given(st.integers(0, 10_000))
def test_the_programme_finds_what_enumeration_finds(seed: int) -> None:
    given_problem = problem(seed)
    found = solve_async_pipeline(given_problem)
    scorer = AsyncPipelineScorer(given_problem)
    every = [(scorer.evaluate(c), c) for c in choices(given_problem.problem)]
    best = min(
        (
            e.seconds * given_problem.get_factor(c.variant, len(c.starts))
            for e, c in every
            if e.feasible
        ),
        default=inf,
    )
    assert found.objective == pytest.approx(best) and found.bound == found.objective
    assert found.status == ("infeasible" if best == inf else "optimal")
    kinds = set()
    for choice in found.candidates:
        kind = (choice.variant, len(choice.starts))
        mine = [e.seconds for e, c in every if e.feasible and (c.variant, len(c.starts)) == kind]
        assert scorer.evaluate(choice).seconds == pytest.approx(min(mine))
        kinds.add(kind)
    assert len(kinds) == len(found.candidates)


@given(st.integers(0, 10_000), st.integers(0, 100))
def test_a_stage_is_priced_by_hand(seed: int, pick: int) -> None:
    given_problem = problem(seed)
    base = given_problem.problem
    every = list(choices(base))
    if not every:
        return
    choice = every[pick % len(every)]
    variant, count = base.variants[choice.variant], len(choice.starts)
    found = AsyncPipelineScorer(given_problem).evaluate(choice)
    if explain_unsupported_weight_mode(
        given_problem.weights, count_chain_warmup(count), variant.microbatches
    ):
        assert not found.feasible
        return
    ends = (*choice.starts[1:], len(base.blocks))
    for k, (stage, last) in enumerate(zip(found.stages, ends, strict=True)):
        mine = set(range(choice.starts[k], last))
        asked = compute_weight_mode_requirements(
            given_problem.weights, count_chain_warmup(count), variant.microbatches, k
        )
        held = [w for w in base.weights if mine & set(w.blocks)]
        assert stage.copies == asked.copies * sum(w.weight for w in held if w.gradient)
        assert stage.cost.in_flight == count - k
        passes = sum(given_problem.passes[base.devices[k].type][b] for b in mine)
        assert stage.predict_seconds == pytest.approx(asked.passes * passes)
    assert found.seconds == max(busy_seconds(s, variant.microbatches) for s in found.stages)


def test_out_of_time_the_bound_is_still_below_the_optimum() -> None:
    for seed in range(40):
        given_problem = problem(seed)
        best, quick = (
            solve_async_pipeline(given_problem),
            solve_async_pipeline(given_problem, time_limit=0.0),
        )
        assert (quick.choice is None) == (best.choice is None)
        if best.choice is not None:
            assert quick.bound <= best.objective <= quick.objective


@pytest.mark.parametrize(
    ("mode", "copies"),
    [
        # The table of the notes with one microbatch to an update, K = 4: beside the weights.
        ("stash", (3, 2, 1, 0)),
        ("vertical", (3, 3, 3, 3)),
        ("naive", (0, 0, 0, 0)),
        ("spectrain", (1, 1, 1, 1)),
        ("pipeoptim", (1, 1, 1, 0)),
        ("nadam-stash", (3, 2, 1, 0)),
    ],
)
def test_copies_are_the_table_of_the_notes(mode: str, copies: tuple[int, ...]) -> None:
    assert (
        tuple(
            compute_weight_mode_requirements(mode, count_chain_warmup(4), 1, k).copies
            for k in range(4)
        )
        == copies
    )


def test_predictions_are_counted_by_minibatch() -> None:
    # K = 4, eight microbatches to an update: of a minibatch's forwards on stage 0 three miss it
    # and read one set; the last stage's backwards look half as far as stage 0: floor(1 / 2) = 0.
    ahead = count_chain_warmup(4)
    assert [
        compute_weight_mode_requirements("spectrain", ahead, 8, k).passes for k in range(4)
    ] == [1, 1, 1, 0]
    assert [
        compute_weight_mode_requirements("spectrain-v2", ahead, 8, k).passes for k in range(4)
    ] == [1, 1, 1, 0]
    # One microbatch to an update: every forward, and from stage 2 on every backward; on the last
    # stage both look as far from the same version.
    assert [
        compute_weight_mode_requirements("spectrain", ahead, 1, k).passes for k in range(4)
    ] == [1, 1, 2, 1]
    assert [compute_weight_mode_requirements("pipemare", ahead, 1, k).passes for k in range(4)] == [
        2,
        2,
        2,
        0,
    ]
    assert [compute_weight_mode_requirements("naive", ahead, 1, k).passes for k in range(4)] == [
        0,
        0,
        0,
        0,
    ]
    assert [compute_weight_mode_requirements("stash", ahead, 8, k).staleness for k in range(4)] == [
        1,
        1,
        1,
        0,
    ]


def test_a_pass_reads_weights_and_state_and_writes_weights() -> None:
    assert count_prediction_bytes("spectrain", 100, 200) == 400
    assert count_prediction_bytes("pipemare", 100, 200) == 300
    # Reads the weights before and after and the last update; writes weights and update.
    assert count_prediction_bytes("2bw-ef", 100, 200) == 500
    ahead = count_chain_warmup(4)
    for k in range(4):
        plain, fed = (compute_weight_mode_requirements(m, ahead, 4, k) for m in ("2bw", "2bw-ef"))
        assert (fed.passes, fed.copies) == (plain.passes + 1, plain.copies + 1)
    assert compute_weight_mode_requirements("2bw-ef", (1,), 4, 0).passes == 0


def test_two_buffers_need_as_many_microbatches_as_are_in_flight() -> None:
    assert explain_unsupported_weight_mode(
        "2bw", count_chain_warmup(4), 3
    ) and not explain_unsupported_weight_mode("2bw", count_chain_warmup(4), 4)
    base = problem(3).problem
    one = AsyncPipelineProblem(problem=base, weights="2bw", passes=base.step)
    many = PartitionChoice(
        variant=0, schedule="1f1b", starts=tuple(range(min(len(base.devices), 2)))
    )
    m = base.variants[0].microbatches
    found = AsyncPipelineScorer(one).evaluate(many)
    assert any("buffers" in f for f in found.faults) == (m < len(many.starts))
    with pytest.raises(FxpartError):
        WeightVersionCounters(count_chain_warmup(2), 1).check(MODES["2bw"])
