"""propagate: its laws over random graphs, its work, and what becomes of single ops."""

from __future__ import annotations

import operator

import pytest
import torch
from fxpart.passes import PREPARE, all_passes
from fxpart.passes.propagate import PropagatePass
from fxpart.passes.propagation.axis_propagation import AxisPropagation, propagate_axes
from fxpart.passes.propagation.axis_rules import GraphRules
from fxpart.passes.propagation.propagation_graph import build_propagation_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from inplace_programs import Builder
from layers_of_ops import deep
from sharded_graphs import (
    Drawn,
    annotated,
    calls,
    drawn_graphs,
    placed,
    propagated,
    shardings,
    shuffled,
    small,
    strategy,
)
from torch import fx

from fxpart.annotations import dump_annotations, why
from fxpart.annotations.files import parse_annotations
from fxpart.annotations.graph_values import sharding
from fxpart.compiler import MESH_KEY, PassManager
from fxpart.errors import FxpartError
from fxpart.sharding import PARTIAL, REPLICATE, Mesh, Shard

aten = torch.ops.aten


@pytest.mark.slow
def test_closing_leaves_nothing_open() -> None:
    graph = propagated(small("layer"), "dp=2,tp=2", {"mlp.up.weight": "tp:S(0)"}, close=True)
    for held in shardings(graph).values():
        assert None not in held.strategy
        assert all(None not in result for result in held.results)
        assert all(held.origins)


@pytest.mark.parametrize(("rows", "columns", "expected"), [(64, 8, "m"), (8, 64, "n")])
def test_the_fewer_bytes_win(rows: int, columns: int, expected: str) -> None:
    """Two inputs ask for two factors of one product: the smaller one is gathered."""
    builder = Builder()
    x, y = builder.input(rows, 16), builder.input(16, columns)
    product = builder.call(aten.mm.default, x, y)
    graph = PassManager(all_passes()).run(PREPARE, builder.finish(product))
    seeds = {f"input:{x.name}": "a:S(0)", f"input:{y.name}": "a:S(1)"}
    assert strategy(propagated(graph, "a=2", seeds), product.name) == expected


def run_alone(graph: fx.GraphModule) -> fx.GraphModule:
    """propagate without the verifier (a shuffled graph has its blocks out of order)."""
    return PropagatePass().run(graph)


def from_seeds(drawn: Drawn) -> fx.GraphModule | None:
    """The annotated graph; None where the drawn annotations contradict each other."""
    try:
        return annotated(drawn.graph, drawn.mesh, drawn.seeds)
    except FxpartError as caught:
        assert {p.code for p in caught.problems} <= {"FXP111", "FXP112"}
        return None


@pytest.mark.slow
@settings(max_examples=60)
@given(drawn_graphs(), st.integers(0, 99))
def test_laws(drawn: Drawn, seed: int) -> None:
    start = from_seeds(drawn)
    if start is None:
        return
    before = shardings(start)
    mixed = run_alone(shuffled(start, seed))
    graph = PassManager(all_passes()).run("propagate", start)
    after = shardings(graph)
    assert shardings(mixed) == after, "the order of nodes does not matter"
    assert shardings(PassManager(all_passes()).run("propagate", graph)) == after, "once is enough"
    for name, held in before.items():
        for mine, given_ in zip(after[name].results, held.results, strict=True):
            kept = [m for m, g in zip(mine, given_, strict=True) if g is not None]
            assert kept == [g for g in given_ if g is not None], "annotations stay"
    _check_layouts(graph)


def _check_layouts(graph: fx.GraphModule) -> None:
    """Every strategy is possible, and what is not annotated lies as its op leaves it."""
    mesh: Mesh = graph.meta[MESH_KEY]
    rules = GraphRules(mesh)
    for n in graph.graph.nodes:
        held = sharding(n)
        if held is None or n.op != "call_function":
            continue
        ruled = rules.of(n)
        if ruled is None:
            assert held.strategy == ("",) * len(mesh.axes)
            continue
        made = ruled.joint(held.strategy)
        assert made is not None
        for axis, origin in enumerate(held.origins):
            if held.strategy[axis] is not None and not origin.startswith("annotation"):
                ours = [result[axis] for result in held.results]
                assert ours == [result[axis] for result in made.results]


@pytest.mark.slow
@settings(max_examples=40)
@given(drawn_graphs())
def test_completed_annotations_come_back(drawn: Drawn) -> None:
    start = from_seeds(drawn)
    if start is None:
        return
    graph = PassManager(all_passes()).run("propagate", start)
    for suffix in (".toml", ".json"):
        entries = parse_annotations(dump_annotations(graph, suffix), suffix)
        again = propagated(drawn.graph, drawn.mesh, entries)
        for name, held in shardings(graph).items():
            mine = shardings(again)[name]
            assert (mine.strategy, mine.results) == (held.strategy, held.results)


@pytest.mark.slow
def test_work_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules are looked up once per distinct op; each op is looked at a few times at most."""
    looked = 0
    original = AxisPropagation._choose

    def counted(self: AxisPropagation, op: object) -> object:
        nonlocal looked
        looked += 1
        return original(self, op)  # type: ignore[arg-type]

    monkeypatch.setattr(AxisPropagation, "_choose", counted)
    seen = []
    for layers in (4, 16):
        looked = 0
        graph = annotated(deep(layers), "dp=2,tp=2", {"input:x": "dp:S(0)", "up*": "tp:S(0)"})
        rules = GraphRules(graph.meta[MESH_KEY])
        ops = build_propagation_graph(graph, rules)
        propagate_axes(ops, range(2), rules)
        assert all(op.strategy[0] for op in ops if not op.leaf)
        seen.append((looked / len(ops), rules.looked_up))
    (few, distinct), (many, same) = seen
    assert distinct == same
    assert many < 1.1 * few < 8


def test_placements_of_a_strategy() -> None:
    """The example of fxpart.passes.rules: what a factor means for operands and results."""
    rules = GraphRules(Mesh.parse("tp=2"))
    ruled = rules.of(calls(annotated(small("mlp"), "tp=2", {}), "linear")[0])
    assert ruled is not None
    made = ruled.along("k", 0)
    assert made is not None
    assert made.operands == ((Shard(2),), (Shard(1),), (PARTIAL,))
    assert made.results == ((PARTIAL,),)
    assert made.gradients[2] == (REPLICATE,)


def built(builder: Builder, *outputs: fx.Node) -> fx.GraphModule:
    return PassManager(all_passes()).run(PREPARE, builder.finish(*outputs))


def test_one_choice_is_taken() -> None:
    """Nothing of these ops can be cut: no rule, a whole dim, fewer elements than ranks."""
    builder = Builder()
    x, y = builder.input(8), builder.input(3)
    ordered = builder.call(operator.getitem, builder.call(aten.sort.default, x), 0)
    whole = builder.call(aten.cumsum.default, ordered, 0)
    small_ = builder.call(aten.gelu.default, y)
    graph = propagated(built(builder, whole, small_), "a=4", {})
    for name in (ordered.args[0].name, whole.name, small_.name):  # type: ignore[union-attr]
        assert strategy(graph, name) == ""
        assert "every rank computes it whole" in why(graph, name)
    assert placed(graph, x.name) == "R"


def test_constants_are_cut_where_all_users_want_the_same_piece() -> None:
    builder = Builder(table=torch.ones(8, 6))
    x = builder.input(8, 6)
    held = builder.get("table")
    mask = builder.call(aten.ones.default, [8, 6])
    twice = builder.call(aten.mul.Tensor, mask, 2.0)
    y = builder.call(aten.mul.Tensor, x, twice)
    y = builder.call(aten.add.Tensor, y, held)
    z = builder.call(aten.add.Tensor, y, mask)
    module = built(builder, z)
    for dim in (0, 1):
        graph = propagated(module, "a=2", {f"input:{x.name}": f"a:S({dim})"})
        assert [placed(graph, n.name) for n in (z, mask, twice, held)] == [f"S({dim})"] * 4


def test_constants_that_users_want_differently_are_whole() -> None:
    builder = Builder()
    x, y = builder.input(8, 6), builder.input(8, 6)
    mask = builder.call(aten.ones.default, [8, 6])
    one, two = (builder.call(aten.mul.Tensor, v, mask) for v in (x, y))
    seeds = {f"input:{x.name}": "a:S(0)", f"input:{y.name}": "a:S(1)"}
    graph = propagated(built(builder, one, two), "a=2", seeds)
    assert [placed(graph, n.name) for n in (one, two, mask)] == ["S(0)", "S(1)", "R"]
