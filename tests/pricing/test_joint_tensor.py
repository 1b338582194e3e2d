"""Tensor degrees of the joint problem against the exact way: propagate, choose, lower, price."""

from __future__ import annotations

import pytest
from wide_models import large

from fxpart.cluster.model import Cluster
from fxpart.planner.request import make_request
from fxpart.planner.sharding_decision import ShardingAssumptions, shard_graph
from fxpart.pricing.joint import joint_problem
from fxpart.pricing.joint_space import SearchSpace
from fxpart.pricing.partition import price
from fxpart.pricing.stage_parallelism import StageParallelism
from fxpart.solver.joint.objective import evaluate
from fxpart.solver.joint.problem import JointChoice, JointProblem, MicrobatchCost
from fxpart.solver.objective import evaluate as evaluate_partition
from fxpart.solver.problem import PartitionChoice

ROWS = 8
CLUSTER = "8xh100"


def problem(name: str, tensor: int, **options: object) -> JointProblem:
    graph, captured = large(name)
    space = SearchSpace(tensor=(1, tensor), recompute=("none",), zero=(0,), expert=(1,))
    given: dict[str, object] = {"batch_size": ROWS, "space": space}
    return joint_problem(graph, captured, Cluster.parse(CLUSTER), **(given | options))[0]  # type: ignore[arg-type]


def work(found: JointProblem, tensor: int, rows: int = ROWS) -> MicrobatchCost:
    return next(
        w for w in found.works if found.layouts[w.layout].tensor == tensor and w.rows == rows
    )


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_a_block_by_itself_costs_nearly_what_the_whole_graph_does(name: str, tensor: int) -> None:
    """Within 10 % of the time and 15 % of the memory of one stage.

    The exact way may leave values between blocks cut, and cut the batch among the same ranks.
    """
    graph, captured = large(name)
    cluster = Cluster.parse(CLUSTER)
    request = make_request(cluster, "adamw", "auto", {"mesh": f"tp={tensor}"}, 0)
    sharded = shard_graph(graph, captured, request, {}, ShardingAssumptions(1, request.stages[1]))
    exact, _ = price(
        sharded.local(0), captured, cluster, batch_size=ROWS, microbatches=1,
        sharing=StageParallelism.of(sharded),
    )  # fmt: skip
    one = evaluate_partition(exact, PartitionChoice(starts=(0,), variant=0, schedule="1f1b"))
    found = problem(name, tensor)
    index = next(
        i for i, o in enumerate(found.options)
        if o.data == 1 and found.layouts[o.layout].tensor == tensor
    )  # fmt: skip
    other = evaluate(
        found, JointChoice(microbatches=1, schedule="1f1b", starts=(0,), options=(index,))
    )
    assert other.seconds == pytest.approx(one.seconds, rel=0.10)
    assert other.stages[0].memory.total == pytest.approx(one.stages[0].memory.total, rel=0.15)


@pytest.mark.slow
def test_layers_are_cut_as_megatron_cuts_them() -> None:
    """Large parameters by the degree; one sum of a block's result forward, one of gradients back.

    Shoeybi et al. 2019, section 3; between blocks all is whole, norms are on every rank.
    """
    found = problem("gpt2", 4)
    whole, cut = found.layouts
    kinds = dict(zip(found.blocks, found.kinds, strict=True))
    for name in ("transformer.h.1.mlp", "transformer.h.0.mlp", "transformer.h.0.attn"):
        k = kinds[name]
        assert cut.dense.weight[k] == pytest.approx(whole.dense.weight[k] / 4, rel=0.01)
        assert cut.dense.optimizer[k] == pytest.approx(whole.dense.optimizer[k] / 4, rel=0.01)
        one, four = work(found, 1), work(found, 4)
        assert one.collective[k] == 0 < four.collective[k]
        computed = four.forward[k] + four.backward[k] - four.collective[k]
        assert computed < (one.forward[k] + one.backward[k]) * 0.4
        assert four.activation[k] < one.activation[k] * 0.7
    k = kinds["transformer.h.0.mlp"]
    ring = 8.4e-6 + 6 * 3.4e-6 + 2 * 3 / 4 * (ROWS * 512 * 4096 * 2) / (0.8 * 450e9)
    assert four.collective[k] == pytest.approx(2 * ring, rel=0.05)


@pytest.mark.slow
def test_values_between_blocks_stay_as_they_are() -> None:
    """Boundaries know no degrees; a rank receives and keeps them whole."""
    found = problem("gpt2", 2)
    alone = problem("gpt2", 1)
    assert found.boundaries == alone.boundaries
    assert {layout.tensor for layout in alone.layouts} == {1}


@pytest.mark.slow
def test_more_layers_are_not_more_kinds() -> None:
    """Two layers more add blocks alone: kinds, layouts and works stay."""
    space = SearchSpace(tensor=(1, 2), zero=(0,))
    sizes = []
    for layers in (4, 6):
        graph, captured = large("gpt2", layers)
        found, _ = joint_problem(
            graph, captured, Cluster.parse("16x8xh100"), batch_size=ROWS, space=space
        )
        sizes.append((len(found.blocks), found.layouts, found.works, found.options))
    assert sizes[1][0] == sizes[0][0] + 4
    assert sizes[1][1:] == sizes[0][1:]
