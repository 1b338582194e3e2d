"""annotate: which values keys mean, what is wrong with seeds, and what contradicts."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
import torch
from fxpart.passes import PREPARE, all_passes
from fxpart.passes.annotate import AnnotatePass
from fxpart.passes.propagation.axis_placements import fits, to_left, to_whole
from hypothesis import given
from hypothesis import strategies as st
from inplace_programs import Builder
from sharded_graphs import annotated, calls, drawn_graphs, placed, shardings, small, strategy
from torch import fx

from fxpart.compiler import MESH_KEY, PassManager, format_pipeline
from fxpart.errors import FxpartError
from fxpart.sharding import Mesh, Placement, Replicate, Shard
from fxpart.sharding.layout import local_shape

aten = torch.ops.aten


def wrong(graph: fx.GraphModule, mesh: str, seeds: Mapping[str, str]) -> list[tuple[str, str]]:
    with pytest.raises(FxpartError) as caught:
        annotated(graph, mesh, seeds)
    return [(p.code, f"{p.where}: {p.why}") for p in caught.value.problems]


def test_the_pipeline_text_round_trips() -> None:
    item = AnnotatePass("dp=2,tp=2", json.dumps({'layers.*."up"': "tp:S(1,3)"}), '{"a": "b"}')
    text = format_pipeline([item])
    assert PassManager(all_passes()).parse(text) == (item,)
    assert PassManager(all_passes()).parse('annotate{mesh="dp=2"}') == (AnnotatePass("dp=2"),)


@pytest.mark.slow
def test_all_kinds_of_keys() -> None:
    seeds = {
        "input:x": "dp:S(0)",
        "attention.[qk].weight": "tp:S(0)",
        "module:mlp.up": "tp:S(2)",
        "module:attention": "dp:S(0)",
        "node:gelu": "dp:S(1)",
        "op:linear_5": "tp:k,dp:-",
    }
    graph = annotated(small("layer"), "dp=2,tp=2", seeds)
    assert graph.meta[MESH_KEY] == Mesh.parse("dp=2,tp=2")
    assert (placed(graph, "x", 0), placed(graph, "x", 1)) == ("S(0)", "?")
    assert [placed(graph, f"attention.{n}.weight", 1) for n in "qkv"] == ["S(0)", "S(0)", "?"]
    linears = [n.name for n in calls(graph, "linear")]
    assert placed(graph, linears[4], 1) == "S(2)"  # up: after query, key, value, out
    assert placed(graph, calls(graph, "add")[0].name, 0) == "S(0)"
    assert placed(graph, "gelu", 0) == "S(1)"
    assert (strategy(graph, "linear_5", 0), strategy(graph, "linear_5", 1)) == ("", "k")
    said = [h for h in shardings(graph).values() if any(h.origins)]
    assert len(said) == 7
    assert shardings(graph)["gelu"].origins == ("annotation 'node:gelu'", "")
    sizes = [n for n in graph.graph.nodes if n.name not in shardings(graph)]
    assert {n.op for n in sizes if "size" not in n.name} == {"placeholder", "output"}


@pytest.mark.slow
def test_annotating_again_starts_anew() -> None:
    once = annotated(small("mlp"), "dp=2", {"up.weight": "dp:S(0)"})
    again = annotated(once, "tp=2", {"down.weight": "tp:S(1)"})
    assert (placed(again, "up.weight"), placed(again, "down.weight")) == ("?", "S(1)")
    assert placed(once, "up.weight") == "S(0)"


@pytest.mark.slow
def test_everything_wrong_is_said_at_once() -> None:
    seeds = {
        "upp.weight": "tp:S(0)",
        "node:gellu": "tp:R",
        "module:upp": "tp:R",
        "up.weight": "ep:S(0)",
        "down.weight": "tp:S(2)",
        "up.bias": "tp:P",
        "node:gelu": "big:S(1)",
        "op:linear": "tp:nothing",
        "op:gelu": "tp:d2",
    }
    found = wrong(small("mlp"), "tp=2,big=8", seeds)
    assert {code for code, _ in found} == {"FXP111"}
    texts = "\n".join(text for _, text in found)
    assert "no such parameter or buffer. Known names: norm.weight" in texts
    assert "the graph has no such node" in texts
    assert "the graph has no such module" in texts
    assert "the mesh has no axis 'ep', only tp, big" in texts
    assert "no dim 2" in texts
    assert "are not sums" in texts
    assert "dim 1 has size 6, and the axis has 8 ranks" in texts
    assert "'op:linear', linear: the op's rule does not allow it" in texts
    assert len(found) == 8


def test_axes_that_together_cut_too_much() -> None:
    ((code, text),) = wrong(small("mlp"), "a=4,b=4", {"up.weight": "a:S(1),b:S(1)"})
    assert code == "FXP111"
    assert "the axes together" in text
    annotated(small("mlp"), "a=4,b=4", {"up.weight": "a:S(0),b:S(0)"})


@pytest.mark.parametrize("option", ["seeds=3", 'seeds="[]"', 'seeds="{"', 'aliases="{\\"a\\":1}"'])
def test_options_that_are_no_json(option: str) -> None:
    with pytest.raises(FxpartError) as caught:
        PassManager(all_passes()).run(f'annotate{{mesh="dp=2",{option}}}', small("mlp"))
    assert caught.value.code == "FXP109"


def test_other_names_of_a_parameter() -> None:
    aliases = json.dumps({"head.weight": "up.weight", "idle.weight": ""})
    seeds = json.dumps({"head.*": "tp:S(0)", "idle.weight": "tp:S(0)"})
    graph = PassManager(all_passes()).run([AnnotatePass("tp=2", seeds, aliases)], small("mlp"))
    assert placed(graph, "up.weight") == "S(0)"
    both = json.dumps({"head.weight": "tp:S(0)", "up.weight": "tp:S(1)"})
    with pytest.raises(FxpartError) as caught:
        PassManager(all_passes()).run([AnnotatePass("tp=2", both, aliases)], small("mlp"))
    (problem,) = caught.value.problems
    assert problem.code == "FXP112"
    assert "'head.weight' requests tp:S(0), but 'up.weight' requests tp:S(1)" in problem.why


def test_contradictions_name_both_and_the_path() -> None:
    builder = Builder(w=torch.nn.Parameter(torch.randn(8, 8)))
    x = builder.input(4, 8)
    y = builder.call(aten.mm.default, x, builder.get("w"))
    turned = builder.call(aten.t.default, y)
    shaped = builder.call(aten.reshape.default, turned, [2, 4, 4])
    graph = PassManager(all_passes()).run(PREPARE, builder.finish(shaped))
    first, last = f"node:{y.name}", f"node:{shaped.name}"
    ((code, text),) = wrong(graph, "tp=2", {first: "tp:S(1)", last: "tp:S(2)"})
    assert code == "FXP112"
    assert f"'{first}' requests tp:S(1) of {y.name}, which is tp:S(0) here" in text
    assert f"'{last}' requests tp:S(2)" in text
    assert f"ops between them: {y.name}, {turned.name}, {shaped.name}" in text
    assert wrong(graph, "tp=2", {first: "tp:S(1)", last: "tp:R"})[0][0] == "FXP112"
    annotated(graph, "tp=2", {first: "tp:S(1)", last: "tp:S(0)"})  # the same pieces
    annotated(graph, "tp=2", {first: "tp:P", last: "tp:S(2)"})  # a sum may lie anywhere
    annotated(graph, "dp=2,tp=2", {first: "tp:S(1)", last: "dp:S(2)"})  # other axes
    # the view's factor is annotated: its operand is resharded on purpose
    fixed = {first: "tp:S(1)", last: "tp:S(2)", f"op:{shaped.name}": "tp:-"}
    annotated(graph, "tp=2", fixed)


def test_ops_that_compute_contradict_nothing() -> None:
    annotated(small("mlp"), "tp=2", {"module:up": "tp:S(1)", "node:gelu": "tp:S(2)"})
    annotated(small("mlp"), "tp=2", {"up.weight": "tp:S(0)", "module:up": "tp:S(1)"})


@pytest.mark.slow
@given(drawn_graphs())
def test_seeds_stand_where_they_were_put(drawn: object) -> None:
    from sharded_graphs import Drawn

    assert isinstance(drawn, Drawn)
    try:
        graph = annotated(drawn.graph, drawn.mesh, drawn.seeds)
    except FxpartError as caught:
        assert {p.code for p in caught.problems} <= {"FXP111", "FXP112"}
        return
    mesh = graph.meta[MESH_KEY]
    for key, text in drawn.seeds.items():
        axis, _, placement = text.partition(":")
        assert placed(graph, key.partition(":")[2] or key, mesh.index(axis)) == placement
    placements = [p for h in shardings(graph).values() for r in h.results for p in r]
    assert sum(p is not None for p in placements) == len(drawn.seeds)


PLACEMENT = st.one_of(
    st.none(), st.just(Replicate()), st.builds(Shard, st.integers(0, 1), st.sampled_from([1, 2, 4]))
)


@given(st.lists(PLACEMENT, min_size=3, max_size=3))
def test_positions_in_the_whole_dim(placements: list[Placement | None]) -> None:
    """Outer parts counted in the whole dim and as earlier axes left them: there and back."""
    mesh = Mesh.parse("a=2,b=2,c=2")
    whole = tuple(placements)
    left = to_left(whole, mesh)
    if left is None:
        assert not fits(whole, (64, 64), mesh)
        return
    assert to_left(to_whole(left, mesh), mesh) == left
    if fits(whole, (64, 64), mesh):
        cut = [sum(isinstance(p, Shard) and p.dim == d for p in whole) for d in (0, 1)]
        expected = tuple(64 >> c for c in cut)
        assert all(
            local_shape((64, 64), left, mesh, mesh_rank) == expected for mesh_rank in range(8)
        )
