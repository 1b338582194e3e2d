"""Groups of copies: the dynamic programme against every choice, and numbers by hand."""

from __future__ import annotations

import random
from fractions import Fraction
from math import inf

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.partition_brute import solve_brute
from oracles.replicated_chain_brute import solve_replicated_chain_brute
from partition_problems import random_problem

from fxpart import collectives
from fxpart.errors import FxpartError
from fxpart.runtime.gradients import reduce_scatter
from fxpart.solver.problem import BlockValue, DeviceLimit, PartitionProblem, Variant, Weight
from fxpart.solver.replicated_chain.dp import solve_replicated_chain
from fxpart.solver.replicated_chain.gradient_reduction import (
    PIECE,
    IntervalGradients,
    compute_sparse_row_fraction,
    count_reduction_workspace,
    list_group_weights,
)
from fxpart.solver.replicated_chain.objective import evaluate
from fxpart.solver.replicated_chain.problem import (
    DeviceKind,
    ReplicatedChainChoice,
    ReplicatedChainProblem,
)
from fxpart.solver.replicated_chain.round_robin import (
    assign_round_robin,
    compute_makespans,
    find_shortest_round,
)
from fxpart.solver.tables import PartitionTables


def small(seed: int) -> ReplicatedChainProblem:
    """Up to 5 blocks and up to 4 devices of up to 2 kinds; memory is tight in about half."""
    base = random_problem(seed, 5)
    draw = random.Random(seed)
    types = len(base.step)
    kinds = tuple(
        DeviceKind(
            name=f"kind {t}", type=t, devices=draw.randint(1, 2),
            memory=draw.randint(80, 400) if draw.random() < 0.5 else 10**9,
            latency=draw.random() * 0.2, inverse_bandwidth=draw.random() * 0.02,
        )
        for t in range(types)
    )  # fmt: skip
    devices = sum(kind.devices for kind in kinds)
    most = min(len(base.blocks), devices)
    least = draw.choice([1, 1, 1, most])
    most = draw.choice([most, most, draw.randint(least, most)])
    weights = tuple(
        msgspec.structs.replace(w, sparse=draw.random() < 0.3 and not w.buffer)
        for w in base.weights
    )
    base = msgspec.structs.replace(base, min_stages=least, max_stages=most, weights=weights)
    ranks = draw.choice([0, 0, 0, devices])
    return ReplicatedChainProblem(base=base, kinds=kinds, ranks=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(120))
def test_as_good_as_every_choice(seed: int) -> None:
    """The bound is below the optimum, always; the answer is the optimum where it says so."""
    problem = small(seed)
    best, found = solve_replicated_chain_brute(problem), solve_replicated_chain(problem)
    assert found.bound <= best.objective * (1 + 1e-9)
    assert found.objective >= best.objective * (1 - 1e-9)
    if found.choice is not None:
        evaluation = evaluate(problem, found.choice)
        assert evaluation.feasible
        assert evaluation.seconds == pytest.approx(found.objective)
    if found.status == "optimal":
        assert found.objective == pytest.approx(best.objective)
    if found.status == "infeasible":
        assert best.choice is None


@pytest.mark.slow
def test_most_answers_are_proven() -> None:
    words = [solve_replicated_chain(small(seed)).status for seed in range(120)]
    assert words.count("optimal") + words.count("infeasible") > 100


@pytest.mark.parametrize("seed", range(40))
def test_one_copy_each_is_the_plain_problem(seed: int) -> None:
    """With one device there are no copies: the objective of fxpart.solver.objective."""
    base = random_problem(seed, 6)
    one = base.devices[0]
    plain = msgspec.structs.replace(base, devices=(one,), min_stages=1, max_stages=1)
    kind = DeviceKind(name="one", type=one.type, devices=1, memory=one.memory)
    found = solve_replicated_chain(ReplicatedChainProblem(base=plain, kinds=(kind,)))
    wanted = solve_brute(plain)
    assert found.objective == pytest.approx(wanted.objective)
    assert found.status == wanted.status


def by_hand(cpus: int, gpus: int, microbatches: int = 12) -> ReplicatedChainProblem:
    """An embedding that takes a CPU 6 s and a GPU 9 s, a tower that takes a GPU 2 s, a CPU 20 s."""
    variant = Variant(
        microbatch_size=1, microbatches=microbatches,
        forward=((2.0, 5.0), (3.0, 0.5)), backward=((4.0, 15.0), (6.0, 1.5)),
        activation=(1, 1), workspace=(0, 0), value_bytes=(1,),
    )  # fmt: skip
    base = PartitionProblem(
        blocks=("tables", "tower"),
        devices=(DeviceLimit(name="x", type=0, memory=100, latency=0.0, inverse_bandwidth=0.0),),
        values=(BlockValue(producer=0, consumers=(1,), gradient=True),),
        weights=(), variants=(variant,), step=((0.0, 0.0), (0.0, 0.0)),
        max_stages=2,
    )  # fmt: skip
    return ReplicatedChainProblem(
        base=msgspec.structs.replace(base, devices=base.devices * 2),
        kinds=(
            DeviceKind(name="cpu", type=0, devices=cpus, memory=100),
            DeviceKind(name="gpu", type=1, devices=gpus, memory=100),
        ),
    )


def test_three_cpus_feed_a_gpu() -> None:
    """c / n_c = 6 / 3 = 2 = g / n_g: t is 6 + 2, the longest has 12 x 2 - 2 seconds left: 30."""
    found = solve_replicated_chain(by_hand(3, 1))
    assert found.status == "optimal" and found.choice is not None
    assert found.choice.counts == ((3, 0), (0, 1)) and found.choice.starts == (0, 1)
    assert found.objective == pytest.approx(6 + 2 + 12 * 2 - 2)
    groups = evaluate(by_hand(3, 1), found.choice).groups
    assert [g.pace for g in groups] == pytest.approx([2.0, 2.0])
    # Alone: the GPU takes 11 s for each, 132 s; three CPUs 26 s in three copies, 104 s.
    alone = ReplicatedChainChoice(variant=0, schedule="1f1b", starts=(0,), counts=((0, 1),))
    assert evaluate(by_hand(3, 1), alone).seconds == pytest.approx(132)
    both = ReplicatedChainChoice(variant=0, schedule="1f1b", starts=(0,), counts=((3, 0),))
    assert evaluate(by_hand(3, 1), both).seconds == pytest.approx(104)


def test_a_group_of_two_kinds() -> None:
    """One block, CPU 2 s, GPU 1 s: of 6 microbatches the GPU takes 4 and the CPU 2: 4 s."""
    problem = by_hand(1, 1, 6)
    variant = msgspec.structs.replace(
        problem.base.variants[0],
        forward=((1.0,), (0.5,)), backward=((1.0,), (0.5,)), activation=(0,), workspace=(0,),
        value_bytes=(),
    )  # fmt: skip
    base = msgspec.structs.replace(
        problem.base, blocks=("all",), values=(), variants=(variant,), step=((0.0,), (0.0,)),
        max_stages=1,
    )  # fmt: skip
    found = solve_replicated_chain(msgspec.structs.replace(problem, base=base))
    assert found.choice is not None and found.choice.counts == ((1, 1),)
    assert found.objective == pytest.approx(4.0)  # t = 2, M = 4
    group = evaluate(msgspec.structs.replace(problem, base=base), found.choice).groups[0]
    assert [group.turns.count(copy) for copy in (0, 1)] == [2, 4]


def with_tower_weight(memory: int) -> ReplicatedChainProblem:
    """Two copies of both blocks on CPUs, whose tower has a weight of 30 bytes and as many more."""
    problem = by_hand(2, 1, 6)
    tower = Weight(name="w", blocks=(1,), weight=30, gradient=30, optimizer=0)
    other = Weight(name="v", blocks=(0,), weight=10, gradient=10, optimizer=0)
    cpus = DeviceKind(name="cpu", type=0, devices=2, memory=memory)
    gpu = msgspec.structs.replace(problem.kinds[1], memory=1)  # nothing fits
    base = msgspec.structs.replace(
        problem.base, weights=(tower, other), no_cut_after=(0,), max_stages=1
    )
    return msgspec.structs.replace(problem, base=base, kinds=(cpus, gpu))


def test_copies_need_memory_while_they_sum() -> None:
    """80 bytes of weights and gradients, 40 while copies sum them; the passes need 82 to 84."""
    two = ReplicatedChainChoice(variant=0, schedule="1f1b", starts=(0,), counts=((2, 0),))
    for memory, fits in ((120, True), (119, False)):
        found = evaluate(with_tower_weight(memory), two)
        assert found.groups[0].summing == 40 and found.feasible is fits
        if not fits:
            assert found.faults == ("group 0 needs 120 bytes of 119 (cpu)",)
        answer = solve_replicated_chain(with_tower_weight(memory))
        assert answer.status == "optimal" and answer.choice is not None
        assert (answer.choice.counts == ((2, 0),)) is fits
    one = evaluate(with_tower_weight(119), msgspec.structs.replace(two, counts=((1, 0),)))
    assert one.feasible and one.groups[0].summing == 0


def test_pieces_are_the_runtimes_own() -> None:
    assert PIECE == reduce_scatter.BUCKET == collectives.BUCKET
    assert count_reduction_workspace([]) == 0
    assert count_reduction_workspace([PIECE] * 5) == 2 * PIECE  # one packed while another is sent
    assert count_reduction_workspace([3 * PIECE, 1]) == 3 * PIECE  # what is larger goes alone


@pytest.mark.parametrize("seed", range(60))
def test_gradients_of_every_interval(seed: int) -> None:
    problem = small(seed).base
    tables = PartitionTables(problem)
    bands = IntervalGradients(tables)
    for unit, first in enumerate(tables.firsts):
        for more, last in enumerate(tables.lasts[unit:]):
            mine = list_group_weights(problem.weights, int(first), int(last))
            assert bands.dense[unit, more] == sum(w.gradient for w in mine if not w.sparse)
            assert bands.rows[unit, more] == sum(w.rows for w in mine)
            assert bands.summing[unit, more] == count_reduction_workspace(
                [w.gradient for w in mine]
            )


def test_rows_that_travel_while_copies_sum() -> None:
    """To one and back: each of the others sends what it has, and is given all."""
    for n in range(2, 9):
        sent = (n - 1) * Fraction(1, n) + (n - 1)
        assert 2 * (n - 1) * compute_sparse_row_fraction(n) == pytest.approx(float(sent))
    assert compute_sparse_row_fraction(1) == 1


def test_a_choice_of_another_problem() -> None:
    wrong = ReplicatedChainChoice(variant=0, schedule="1f1b", starts=(0,), counts=((1,),))
    with pytest.raises(FxpartError, match="2 kinds"):
        evaluate(by_hand(1, 1), wrong)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.floats(0.01, 10)), min_size=1, max_size=3),
    st.integers(1, 20),
)
def test_makespans_are_those_of_the_turns(kinds: list[tuple[int, float]], m: int) -> None:
    """The vectorised one, the greedy one, and no split of the microbatches is better."""
    counts, seconds = [n for n, _ in kinds], [s for _, s in kinds]
    each = [s for n, s in kinds for _ in range(n)]
    order = assign_round_robin(each, m)
    wanted = max(order.count(copy) * s for copy, s in enumerate(each))
    longest, _, least = compute_makespans([np.array([[s]]) for s in seconds], counts, m)
    assert longest[0, 0] == pytest.approx(wanted, rel=1e-9)
    taken = [order.count(copy) for copy in range(len(each))]
    if len({round(n * s, 9) for n, s in zip(taken, each, strict=True)}) == len(each):
        assert least[0, 0] == min(taken)
    best = _best(each, m)
    assert wanted == pytest.approx(best, rel=1e-9)


def _best(each: list[float], m: int) -> float:
    """The least longest time of any split, by the times that one can end at."""
    ends = sorted({n * s for s in each for n in range(1, m + 1)})
    return next((end for end in ends if sum(int(end / s + 1e-9) for s in each) >= m), inf)


def test_rounds() -> None:
    assert assign_round_robin((1, 1, 3), 7) == (0, 1, 0, 1, 0, 1, 2)
    assert find_shortest_round((0, 1, 0, 1, 0)) == (0, 1)
    assert find_shortest_round((0, 0, 1)) == (0, 0, 1)
    assert find_shortest_round(assign_round_robin((1.0, 2.0), 9)) == (0, 0, 1)
