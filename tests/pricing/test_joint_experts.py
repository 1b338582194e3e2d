"""Mixtures of experts in the joint problem: experts dealt out among replicas."""

from __future__ import annotations

import pytest
from wide_models import LENGTH, large

from fxpart.cluster.model import Cluster
from fxpart.pricing.joint import joint_problem
from fxpart.pricing.joint_space import SearchSpace, expert_degrees
from fxpart.solver.joint.objective import evaluate
from fxpart.solver.joint.problem import JointChoice, JointProblem

ROWS, EXPERTS, CHOSEN, WIDTH, INNER = 8, 8, 2, 4096, 11008


def problem(**options: object) -> JointProblem:
    graph, captured = large("mixtral")
    space = SearchSpace(tensor=(1,), recompute=("none", "full"), **options)  # type: ignore[arg-type]
    cluster = Cluster.parse("8xh100")
    return joint_problem(graph, captured, cluster, batch_size=ROWS, space=space)[0]


@pytest.mark.slow
def test_each_replica_has_its_part_of_the_experts_and_sends_rows() -> None:
    """Bytes by formula: two matrices [2I, H] and [H, I] for each expert of each of two layers."""
    found = problem()
    assert [layout.expert for layout in found.layouts] == [1, 2, 4, 8]
    total = 2 * EXPERTS * 3 * WIDTH * INNER * 2  # layers, experts, matrices' elements, bfloat16
    alone = found.layouts[0]
    assert alone.experts is None
    for index, layout in enumerate(found.layouts[1:], 1):
        assert layout.experts is not None
        dealt = sum(layout.experts.weight[k] for k in found.kinds)
        assert dealt == total // layout.expert
        rest = sum(layout.dense.weight[k] for k in found.kinds)
        assert rest + total == sum(alone.dense.weight[k] for k in found.kinds)
        data = {o.data for o in found.options if o.layout == index}
        assert data and all(d % layout.expert == 0 for d in data)
        for o in found.options:
            if o.layout == index:
                assert (o.reduce_experts.inverse > 0) == (o.data > layout.expert)


@pytest.mark.slow
def test_rows_travel_there_and_back_in_both_directions() -> None:
    """Four all-to-all for each mixture: (n - 1) / n of k rows for each token, over the ring."""
    found = problem(expert=(1, 8))
    rows = 1
    works = {
        found.layouts[w.layout].expert: w
        for w in found.works
        if w.rows == rows and w.recompute == "none"
    }
    moved = rows * LENGTH * CHOSEN * WIDTH * 2 * 7 / 8
    each = 8.4e-6 + 7 * 3.4e-6 + moved / (0.8 * 450e9)
    collective = sum(works[8].collective[k] for k in found.kinds)
    assert collective == pytest.approx(2 * 4 * each, rel=0.01)
    assert sum(works[1].collective) == 0
    full = next(
        w for w in found.works
        if w.rows == rows and w.recompute == "full" and found.layouts[w.layout].expert == 8
    )  # fmt: skip
    again = sum(full.collective[k] for k in found.kinds)
    assert again == pytest.approx(1.5 * collective, rel=0.01), "the forward is run again"


@pytest.mark.slow
def test_experts_dealt_out_need_less_memory() -> None:
    found = problem(zero=(0,))
    needs = []
    for expert in (1, 8):
        index = next(
            i for i, o in enumerate(found.options)
            if o.data == 8 and found.layouts[o.layout].expert == expert and o.recompute == "none"
        )  # fmt: skip
        choice = JointChoice(microbatches=1, schedule="1f1b", starts=(0,), options=(index,))
        needs.append(evaluate(found, choice).stages[0].memory)
    assert needs[1].weights < needs[0].weights / 3
    assert needs[1].activations <= needs[0].activations


def test_degrees_of_experts() -> None:
    assert expert_degrees(0, 64) == (1,)
    assert expert_degrees(8, 4) == (1, 2, 4)
    assert expert_degrees(256, 1024) == (1, 8, 16, 32, 64, 128, 256)
    assert expert_degrees(6, 16) == (1, 2, 3, 6)
