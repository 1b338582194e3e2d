"""The joint problem of real models: one rank for a stage costs what ``price`` says it costs."""

from __future__ import annotations

import random
from functools import cache

import pytest
from stage_runs import prepared
from torch import fx
from zoo import ZOO

from fxpart.capture import CapturedModel, capture
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError
from fxpart.pricing.joint import joint_problem
from fxpart.pricing.joint_space import SearchSpace
from fxpart.pricing.non_op_costs import NonOpCosts
from fxpart.pricing.partition import price
from fxpart.pricing.stage_parallelism import packing
from fxpart.solver.joint.objective import evaluate
from fxpart.solver.joint.problem import JointChoice, JointProblem
from fxpart.solver.objective import evaluate as evaluate_partition
from fxpart.solver.problem import PartitionChoice

MODELS = ["gpt2", "llama", "resnet50", "shared_mlp", "frozen"]
ALONE = SearchSpace(tensor=(1,))


@cache
def model(name: str) -> tuple[fx.GraphModule, CapturedModel]:
    """A zoo model, captured and prepared."""
    if not ZOO[name].available:
        pytest.skip(f"{name} needs {ZOO[name].needs}")
    built = ZOO[name].build()
    captured = capture(
        built.model,
        built.batch,
        loss=built.loss,
        batch_size=built.batch_size,
        batch_dims=built.batch_dims,
    )
    return prepared(captured), captured


def joint(name: str, cluster: str = "local:4", **options: object) -> JointProblem:
    graph, captured = model(name)
    given: dict[str, object] = {"batch_size": captured.batch_size}
    return joint_problem(graph, captured, Cluster.parse(cluster), **(given | options))[0]  # type: ignore[arg-type]


def option(problem: JointProblem, **wanted: object) -> int:
    """The first option of these degrees; data and tensor 1 and no recomputation if not said."""
    asked = {"data": 1, "tensor": 1, "expert": 1, "recompute": "none"} | wanted
    for index, o in enumerate(problem.options):
        layout = problem.layouts[o.layout]
        have = {
            "data": o.data, "recompute": o.recompute, "zero": o.zero, "pool": o.pool,
            "tensor": layout.tensor, "expert": layout.expert,
        }  # fmt: skip
        if all(have[key] == value for key, value in asked.items()):
            return index
    raise AssertionError(f"no option {asked}")


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["local:4", "8xh100"])
@pytest.mark.parametrize("name", MODELS)
def test_one_rank_for_a_stage_costs_what_price_says(name: str, cluster: str) -> None:
    """Every part, over random cuts, sizes and schedules; on one host all links are alike."""
    graph, captured = model(name)
    rows = captured.batch_size
    names = ("gpipe", "1f1b")
    old, _ = price(graph, captured, Cluster.parse(cluster), batch_size=rows, schedules=names)
    new = joint(name, cluster, schedules=names, space=ALONE)
    single = option(new)
    rng = random.Random(0)
    for _ in range(25):
        variant = rng.randrange(len(old.variants))
        stages = rng.randint(1, min(4, old.max_stages))
        starts = (0, *sorted(rng.sample(range(1, len(old.blocks)), stages - 1)))
        schedule = rng.choice(names)
        count = old.variants[variant].microbatches
        one = evaluate_partition(
            old, PartitionChoice(starts=starts, variant=variant, schedule=schedule)
        )  # type: ignore[arg-type]
        other = evaluate(
            new,
            JointChoice(
                microbatches=count,
                schedule=schedule,  # type: ignore[arg-type]
                starts=starts,
                options=(single,) * stages,
            ),
        )
        assert other.seconds == pytest.approx(one.seconds, rel=1e-9)
        for a, b in zip(one.stages, other.stages, strict=True):
            assert b.memory == a.memory
            assert b.memory_limit == a.memory_limit
            for part in ("forward_seconds", "backward_seconds", "transfer_seconds",
                         "optimizer_seconds"):  # fmt: skip
                assert getattr(b, part) == pytest.approx(getattr(a, part), rel=1e-9)
            assert b.tie_seconds == pytest.approx(a.sync_seconds, rel=1e-9)


@pytest.mark.slow
def test_replicas_take_parts_of_the_batch_and_sum_gradients() -> None:
    problem = joint("gpt2", "8xh100", batch_size=16, space=ALONE)
    for index in (option(problem, data=4, zero=0), option(problem, data=4, zero=2)):
        found = problem.options[index]
        works = {w.rows for w in problem.works if w.layout == found.layout}
        assert {16 // (4 * m) for m in problem.microbatches if 16 % (4 * m) == 0} <= works
        assert found.reduce.inverse > 0
    plain = problem.options[option(problem, data=4, zero=0)]
    cut = problem.options[option(problem, data=4, zero=2)]
    size, device = 10**8, Cluster.parse("8xh100").devices[0]
    # All pack the same bytes into buckets, or out of them; what is sent beside that is half each.
    packed = size * packing("partial", "replicate") * NonOpCosts(device).copying
    whole, half, back = (line(size) - packed for line in (plain.reduce, cut.reduce, cut.gather))
    assert half == pytest.approx(whole / 2, rel=0.1)
    assert half + back == pytest.approx(whole, rel=0.1)
    levels = {o.zero for o in problem.options if o.data == 4}
    assert levels == {0, 2, 3}, "1 costs the seconds of 2 and more memory"
    assert {o.zero for o in problem.options if o.data == 1} == {0}


@pytest.mark.slow
def test_blocks_made_again_keep_less_and_take_longer() -> None:
    problem = joint("gpt2", "8xh100", space=ALONE)
    for rows in {w.rows for w in problem.works}:
        works = {w.recompute: w for w in problem.works if w.rows == rows and w.layout == 0}
        none, full = works["none"], works["full"]
        for k in range(len(none.forward)):
            assert full.forward[k] == none.forward[k]
            if full.activation[k] < none.activation[k]:
                again = full.backward[k] - none.backward[k]
                assert again == pytest.approx(none.forward[k])
                most = none.workspace[k] + none.activation[k]
                assert none.activation[k] - full.activation[k] <= full.workspace[k] <= most
            else:
                assert full.backward[k] == none.backward[k]
    kept = sum(full.activation[k] for k in problem.kinds)
    assert kept < 0.3 * sum(none.activation[k] for k in problem.kinds)


@pytest.mark.slow
def test_equal_layers_are_one_kind() -> None:
    """Four layers: those in the middle cost once; the first and the last differ."""
    problem = joint("gpt2", space=ALONE)
    kinds = dict(zip(problem.blocks, problem.kinds, strict=True))
    assert kinds["transformer.h.1.attn"] == kinds["transformer.h.2.attn"]
    assert kinds["transformer.h.1.mlp"] == kinds["transformer.h.2.mlp"]
    assert kinds["transformer.h.1.mlp"] != kinds["transformer.h.1.attn"]
    assert max(problem.kinds) + 1 < len(problem.blocks)


@pytest.mark.slow
def test_a_space_limits_what_is_chosen_from() -> None:
    space = SearchSpace(
        tensor=(1,), data=(1, 3), zero=(1,), recompute=("full",), uniform=True, max_stages=2
    )
    problem = joint("gpt2", "6xa100", batch_size=12, microbatches=2, space=space)
    assert {(o.data, o.zero, o.recompute) for o in problem.options} == {
        (1, 1, "full"),
        (3, 1, "full"),
    }
    assert problem.microbatches == (2,)
    assert (problem.max_stages, problem.uniform) == (2, True)
    assert {w.rows for w in problem.works} == {6, 2}


@pytest.mark.slow
def test_options_are_capped_far_from_powers_of_two_first() -> None:
    problem = joint(
        "gpt2", "8xh100", batch_size=64, space=SearchSpace(tensor=(1,), most_options=36)
    )
    assert len(problem.options) <= 36
    assert {1, 2, 4, 8} <= {o.data for o in problem.options}
    assert 7 not in {o.data for o in problem.options}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"batch_size": 4, "microbatches": 5}, "FXP105"),
        ({"schedules": ()}, "FXP109"),
        ({"schedules": ("zigzag",)}, "FXP109"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, object], code: str) -> None:
    with pytest.raises(FxpartError) as caught:
        joint("gpt2", **options)  # type: ignore[arg-type]
    assert {p.code for p in caught.value.problems} == {code}


@pytest.mark.parametrize(
    "options", [{"tensor": (0,)}, {"zero": (4,)}, {"zero": ()}, {"recompute": ("most",)}]
)
def test_a_wrong_space_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(FxpartError) as caught:
        SearchSpace(**options)  # type: ignore[arg-type]
    assert {p.code for p in caught.value.problems} == {"FXP109"}


@pytest.mark.slow
def test_the_same_input_gives_the_same_numbers() -> None:
    assert joint("gpt2") == joint("gpt2")
