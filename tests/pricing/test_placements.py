"""Placement problems of graphs: what they cost, what is chosen, and that the choice runs."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
import zoo_graphs
from fxpart.passes import PREPARE, all_passes
from fxpart.passes.place import CHOSEN, PlacePass
from local_runs import assert_same, lower_all, run_lanes, run_whole
from sharded_graphs import MODELS, propagated, shardings
from torch import fx, nn

from fxpart.capture import CapturedModel, capture
from fxpart.cluster.model import Cluster
from fxpart.compiler import BLOCKS_KEY, PassManager
from fxpart.errors import FxpartError
from fxpart.pricing.placements import StrategyAssignment, build, choose_placements
from fxpart.sharding import Mesh
from fxpart.solver.placement.portfolio import evaluate, solve_placement
from fxpart.solver.placement.problem import PlacementArrays

CLUSTER = Cluster.parse("2x8xh100")


@cache
def model(name: str) -> tuple[CapturedModel, fx.GraphModule]:
    """One of MODELS in float64, prepared; not to be changed."""
    torch.manual_seed(0)
    made = MODELS[name]().double()
    captured = capture(made, (torch.randn(4, 6, 8, dtype=torch.float64),), batch_size=4)
    return captured, PassManager(all_passes()).run(PREPARE, captured.graph)


@cache
def gpt(layers: int = 2) -> tuple[CapturedModel, fx.GraphModule]:
    """GPT-3's layers on the meta device."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        made = GPT2LMHeadModel(
            GPT2Config(
                n_layer=layers, n_embd=12288, n_head=96, n_positions=2048, vocab_size=50257,
                attn_pdrop=0.0,
            )
        )  # fmt: skip
    ids = torch.zeros(16, 2048, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    captured = capture(made.bfloat16().train(), None, batch, batch_size=16)
    return captured, PassManager(all_passes()).run(PREPARE, captured.graph)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["x=8", "x=4,y=2"])
@pytest.mark.parametrize("name", ["mlp", "fused"])
def test_elimination_and_highs_agree_on_real_graphs(name: str, mesh: str) -> None:
    captured, graph = model(name)
    problem = build(graph, captured, CLUSTER, mesh=Mesh.parse(mesh), budget=1e12).problem
    one = solve_placement(problem, solver="elimination")
    assert one.status == "optimal"
    if "," not in mesh:
        two = solve_placement(problem, solver="highs", time_limit=120.0)
        assert one.seconds == pytest.approx(two.seconds, rel=1e-6)
    draw = random.Random(0)
    numbers = PlacementArrays(problem)
    for _ in range(50):
        choice = tuple(draw.randrange(n) for n in numbers.sizes)
        assert numbers.evaluate(choice).seconds >= one.bound * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=2", pytest.param("dp=2,tp=2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    ["mlp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fused", "attention", "layer"))],
)
def test_what_is_chosen_runs_like_one_piece(name: str, mesh: str) -> None:
    """Also with the least memory, and for choices at random: every strategy is a real one."""
    captured, graph = model(name)
    whole = propagated(graph, mesh, {})
    built = build(whole, captured, CLUSTER, budget=1e12)
    free = solve_placement(built.problem)
    tight = solve_placement(msgspec.structs.replace(built.problem, budget=free.least))
    assert free.choice is not None and tight.choice is not None
    draw = random.Random(mesh + name)
    sizes = PlacementArrays(built.problem).sizes
    others = [tuple(draw.randrange(n) for n in sizes) for _ in range(2)]
    inputs = [torch.randn(4, 6, 8, dtype=torch.float64)]
    wanted = run_whole(graph, captured.state, inputs, 7)
    for choice in dict.fromkeys([free.choice, tight.choice, *others]):
        choice = built.shard_inputs(choice)
        chosen = StrategyAssignment(
            Mesh.parse(mesh), built.strategies(choice), built.placements(choice)
        )
        ready = PassManager(all_passes()).run([PlacePass(chosen.text())], whole)
        found = run_lanes(lower_all(ready), captured.state, inputs, 7, wanted)
        # the loss, a mean of squares, is kept in float32
        assert_same(found, wanted, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_zoo_runs_with_what_is_chosen_under_tight_memory(name: str) -> None:
    captured, graph = zoo_graphs.captured(name), zoo_graphs.prepared(name)
    whole = propagated(graph, "dp=2,tp=2", {})
    least = solve_placement(build(whole, captured, CLUSTER, budget=0.0).problem).least
    chosen, _ = choose_placements(whole, captured, CLUSTER, budget=1.02 * least)
    assert any(any(strategy) for strategy in chosen.strategies.values())
    ready = PassManager(all_passes()).run([PlacePass(chosen.text())], whole)
    given = zoo_graphs.inputs(name)
    wanted = run_whole(graph, captured.state, given, 7)
    found = run_lanes(lower_all(ready), captured.state, given, 7, wanted)
    assert_same(found, wanted, rtol=1e-4)


@pytest.mark.slow
def test_placements_that_fit_with_recomputation_only() -> None:
    """Eight microbatches in flight: stages store what blocks hand on, and one block's tensors."""
    captured, graph = zoo_graphs.captured("gpt2"), zoo_graphs.prepared("gpt2")
    whole = propagated(graph, "tp=2", {})
    blocks = len(whole.meta[BLOCKS_KEY])
    least, less = (
        solve_placement(
            build(whole, captured, CLUSTER, in_flight=8, inside=inside, budget=0.0).problem
        ).least
        for inside in (None, 1 / blocks)
    )
    assert less < 0.6 * least
    budget = (least + less) / 2
    with pytest.raises(FxpartError, match="FXP204"):
        choose_placements(whole, captured, CLUSTER, in_flight=8, budget=budget)
    _, certificate = choose_placements(
        whole, captured, CLUSTER, in_flight=8, budget=budget, recompute=True
    )
    assert certificate.memory <= budget and certificate.status == "optimal"


@pytest.mark.slow
def test_state_under_zero_needs_a_part_of_the_memory() -> None:
    """Adam: 4 bytes of weight, 4 of gradient, 8 of state for each parameter in float32."""
    captured, graph = zoo_graphs.captured("gpt2"), zoo_graphs.prepared("gpt2")
    whole = propagated(graph, "dp=4,tp=2", {})
    size = sum(captured.state[name].nbytes for name in captured.parameters)
    needed = [
        choose_placements(whole, captured, CLUSTER, budget=1e12, zero=(level, (0,)))[1]
        for level in range(4)
    ]
    assert len({certificate.seconds for certificate in needed}) == 1
    assert all(certificate.free for certificate in needed)
    saved = [needed[0].memory - certificate.memory for certificate in needed]
    wanted = [0.0, 2 * size * 3 / 4, 3 * size * 3 / 4, 4 * size * 3 / 4]
    assert saved == pytest.approx(wanted, rel=1e-3)  # step counters are not in these
    budget = 1.01 * needed[3].memory
    assert choose_placements(whole, captured, CLUSTER, budget=budget, zero=(3, (0,)))[1].free
    assert not choose_placements(whole, captured, CLUSTER, budget=budget)[1].free


@pytest.mark.slow
def test_chosen_placements_are_written_where_axes_are_open() -> None:
    captured, graph = model("layer")
    whole = propagated(graph, "dp=2,tp=2", {"input:x": "dp:S(0)", "mlp.up.weight": "tp:S(0)"})
    before = shardings(whole)
    assert any(None in s.strategy for s in before.values())
    chosen, certificate = choose_placements(whole, captured, CLUSTER, batch_size=4)
    ready = PassManager(all_passes()).run([PlacePass(chosen.text())], whole)
    after = shardings(ready)
    assert before.keys() == after.keys()
    for name, old in before.items():
        new = after[name]
        assert None not in new.strategy
        assert all(None not in placements for placements in new.results)
        for axis, strategy in enumerate(old.strategy):
            if strategy is not None:
                assert new.strategy[axis] == strategy
            for had, have in zip(old.results, new.results, strict=True):
                assert had[axis] is None or had[axis] == have[axis]
            source = whole_node(ready, name).op != "call_function"
            was_open = old.results[0][axis] is None if source else strategy is None
            assert (new.origins[axis] == CHOSEN) == was_open, (name, new)
    assert certificate.bound <= certificate.seconds
    assert certificate.memory <= certificate.budget
    assert not certificate.unruled
    text = json.dumps(chosen.text())
    assert shardings(PassManager(all_passes()).run(f"place{{choice={text}}}", whole)) == after


def whole_node(graph: fx.GraphModule, name: str) -> fx.Node:
    """A node by its name."""
    return next(n for n in graph.graph.nodes if n.name == name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ("nothing=b|b", "no such node"),
        ("x", "no such node"),
        ("linear=b", "1 strategies do not match the 2 axes"),
        ("linear=zebra|", "has no strategy"),
        ("x=dp:S(0)", "has no placement"),
        ("x=dp:S(0),tp:Q", "it is not S"),
    ],
)
def test_a_wrong_choice_is_refused(choice: str, why: str) -> None:
    whole = propagated(model("mlp")[1], "dp=2,tp=2", {})
    with pytest.raises(FxpartError, match="FXP109") as caught:
        PassManager(all_passes()).run([PlacePass(choice)], whole)
    assert why in str(caught.value)
    with pytest.raises(FxpartError, match="FXP109"):
        PassManager(all_passes()).run([PlacePass("")], model("mlp")[1])


@pytest.mark.slow
def test_what_does_not_fit_says_so() -> None:
    captured, graph = gpt()
    with pytest.raises(FxpartError, match="FXP204") as caught:
        choose_placements(graph, captured, CLUSTER, mesh=Mesh.parse("tp=2"), budget=1e9)
    assert "GiB" in str(caught.value)


MEGATRON = {
    "transformer.h.*.attn.c_attn.weight": "tp:S(1,3)",
    "transformer.h.*.attn.c_attn.bias": "tp:S(0,3)",
    "transformer.h.*.attn.c_proj.weight": "tp:S(0)",
    "transformer.h.*.attn.c_proj.bias": "tp:R",
    "transformer.h.*.mlp.c_fc.weight": "tp:S(1)",
    "transformer.h.*.mlp.c_fc.bias": "tp:S(0)",
    "transformer.h.*.mlp.c_proj.weight": "tp:S(0)",
    "transformer.h.*.mlp.c_proj.bias": "tp:R",
    "transformer.wte.weight": "tp:S(0)",
}


def solved(graph: fx.GraphModule, mesh: str, seeds: dict[str, str], **options: Any) -> Any:
    """The best step with these annotations, and the strategies."""
    captured, _ = gpt()
    whole = propagated(graph, mesh, seeds, close=options.pop("close", False))
    built = build(whole, captured, CLUSTER, **{"budget": 1e15} | options)
    found = solve_placement(built.problem)
    assert found.status == "optimal" and found.choice is not None
    return found, built.strategies(found.choice), built


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "microbatches"), [("tp=8", 1), ("tp=8", 16), ("dp=2,tp=8", 1)])
def test_never_worse_than_megatron(mesh: str, microbatches: int) -> None:
    graph = gpt()[1]
    seeds = MEGATRON | ({"input:input_ids": "dp:S(0)"} if "dp" in mesh else {})
    theirs, _, _ = solved(graph, mesh, seeds, close=True, microbatches=microbatches)
    free, _, _ = solved(graph, mesh, {}, microbatches=microbatches)
    assert free.seconds <= theirs.seconds
    # nor with the memory that theirs take
    fit, _, _ = solved(graph, mesh, {}, microbatches=microbatches, budget=theirs.bytes)
    assert fit.seconds <= theirs.seconds and fit.bytes <= theirs.bytes


@pytest.mark.slow
def test_equal_to_megatron_where_that_is_optimal() -> None:
    """Single rows on 8 GPUs: columns, then rows, heads apart."""
    graph = gpt()[1]
    theirs, wanted, _ = solved(graph, "tp=8", MEGATRON, microbatches=16)
    free, found, _ = solved(graph, "tp=8", {}, microbatches=16)
    assert free.seconds == pytest.approx(theirs.seconds, rel=1e-9)
    products = [
        n.name for n in graph.graph.nodes
        if "addmm" in n.name or ("attention" in n.name and n.op == "call_function")
    ]  # fmt: skip
    assert len(products) == 10
    assert {name: found[name] for name in products} == {name: wanted[name] for name in products}
    assert [found[name][0] for name in products[:5]] == ["n/3", "b0", "k", "n", "k"]
    # The sequence is a symbol here, and only annotations cut symbols other than the batch.
    norms = [n.name for n in graph.graph.nodes if "layer_norm" in n.name]
    assert {found[name][0] for name in norms if name in found} == {""}


@pytest.mark.slow
def test_problems_are_deterministic_and_layers_share_tables() -> None:
    captured, graph = gpt()
    first, second = (
        build(graph, captured, CLUSTER, mesh=Mesh.parse("dp=2,tp=8"), budget=1e15).problem
        for _ in range(2)
    )
    assert first == second
    more_captured, more = gpt(4)
    deeper = build(more, more_captured, CLUSTER, mesh=Mesh.parse("dp=2,tp=8"), budget=1e15).problem
    assert len(deeper.nodes) > len(first.nodes) + 60
    assert len(deeper.kinds) <= len(first.kinds) + 2
    assert len(deeper.matrices) <= len(first.matrices) + 2


@pytest.mark.slow
def test_the_objective_counts_each_op_on_its_local_shapes() -> None:
    """All replicated: every op whole, no reshard, every parameter and gradient whole."""
    captured, graph = model("mlp")
    mesh = Mesh.parse("x=4")
    whole = propagated(graph, "x=4", {}, close=True)
    built = build(whole, captured, CLUSTER, mesh=mesh, budget=1e12)
    found = solve_placement(built.problem)
    alone = build(graph, captured, Cluster.parse("1xh100"), mesh=Mesh(), budget=1e12)
    single = solve_placement(alone.problem)
    assert found.choice is not None
    assert set(built.strategies(found.choice).values()) == {("",)}
    assert found.seconds == pytest.approx(single.seconds)
    assert found.bytes == single.bytes
    weights = sum(t.numel() * t.element_size() for t in captured.state.values())
    assert found.bytes > 4 * weights  # weight, gradient and AdamW's two


@pytest.mark.slow
def test_memory_falls_with_the_mesh() -> None:
    captured, graph = gpt()
    least = [
        solve_placement(
            build(graph, captured, CLUSTER, mesh=Mesh.parse(f"x={n}"), budget=0.0).problem
        ).least
        for n in (2, 4, 8)
    ]
    assert least[0] > 1.8 * least[1] > 3.2 * least[2]


@pytest.mark.slow
def test_certificates_hold_for_the_settled_choice() -> None:
    """Inputs are cut where rows are, and the certificate is that of what is returned."""
    captured, graph = model("layer")
    whole = propagated(graph, "tp=2", {})
    built = build(whole, captured, CLUSTER, budget=1e12)
    found = solve_placement(built.problem)
    assert found.choice is not None
    settled = built.shard_inputs(found.choice)
    assert evaluate(built.problem, settled).seconds >= found.bound * (1 - 1e-9)
    strategies = built.strategies(settled)
    symbols = {n.name: built.symbols[n] for n in built.ops}
    cut = any(strategies[n][0] in symbols[n] for n in strategies)
    assert cut == any("S" in str(p) for p in built.placements(settled)["x"])


@pytest.mark.slow
def test_points_hold_what_lives_together() -> None:
    """The logits and what is made of them are not kept, but are there all at once."""
    captured, graph = gpt()
    mesh = Mesh.parse("x=1")
    problem = build(graph, captured, CLUSTER, mesh=mesh, budget=1e15).problem
    assert 1 <= len(problem.points) <= 8
    logits = 16 * 2047 * 50257
    numbers = PlacementArrays(problem)
    choice = tuple(0 for _ in numbers.sizes)
    # bfloat16 and float32 side by side
    assert numbers.peak(choice) >= 6 * logits
    standing = sum(float(numbers.standing[k][0]) for k in problem.nodes)
    assert numbers.evaluate(choice).bytes == standing + numbers.peak(choice)


def test_inference_keeps_no_gradients() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x)

    frozen = Model().requires_grad_(False)
    captured = capture(frozen, (torch.randn(4, 8),), batch_size=4)
    graph = PassManager(all_passes()).run(PREPARE, captured.graph)
    built = build(graph, captured, CLUSTER, mesh=Mesh.parse("x=1"), budget=1e12)
    found = solve_placement(built.problem)
    held = sum(t.numel() * t.element_size() for t in captured.state.values())
    rows = 4 * 8 * 4
    # the input; and the result with its square, of which the loss is made
    assert found.bytes == held + rows + 2 * rows
