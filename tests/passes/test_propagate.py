"""propagate: Megatron's placements from one annotation, data parallelism, and its laws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fxpart.passes import all_passes
from sharded_graphs import (
    annotated,
    calls,
    placed,
    propagated,
    shardings,
    small,
    strategy,
)
from torch import fx
from zoo import ZOO
from zoo_graphs import captured, prepared

from fxpart.annotations import sharding_text, why
from fxpart.annotations.graph_values import is_item, sharding
from fxpart.compiler import PassManager
from fxpart.errors import FxpartError

aten = torch.ops.aten


GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def names(graph: fx.GraphModule, op: str) -> list[str]:
    return [n.name for n in calls(graph, op)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["up.weight", "down.weight", "up.bias", "node:gelu"])
def test_the_feed_forward_block_follows_from_one_annotation(seed: str) -> None:
    """Megatron-LM (Shoeybi et al. 2019), section 3: columns, then rows, then one sum."""
    text = {"up.weight": "tp:S(0)", "down.weight": "tp:S(1)", "up.bias": "tp:S(0)"}
    graph = propagated(small("mlp"), "tp=2", {seed: text.get(seed, "tp:S(2)")})
    up, down = names(graph, "linear")
    assert (placed(graph, "up.weight"), placed(graph, "up.bias")) == ("S(0)", "S(0)")
    assert (strategy(graph, up), placed(graph, up)) == ("n", "S(2)")
    assert placed(graph, "gelu") == "S(2)"
    assert (placed(graph, "down.weight"), placed(graph, "down.bias")) == ("S(1)", "R")
    assert (strategy(graph, down), placed(graph, down)) == ("k", "P")
    # nothing else is decided: the norm and the residual stream stay open
    assert placed(graph, "layer_norm") == placed(graph, "norm.weight") == "?"


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["q.weight", "k.weight", "v.weight", "out.weight"])
def test_attention_follows_from_one_annotation(seed: str) -> None:
    text = "tp:S(1)" if seed == "out.weight" else "tp:S(0)"
    graph = propagated(small("attention"), "tp=2", {seed: text})
    (attention,) = names(graph, "scaled_dot_product_attention")
    assert placed(graph, attention) == "S(1)"
    assert [placed(graph, f"{n}.weight") for n in "qkv"] == ["S(0)"] * 3
    assert [placed(graph, f"{n}.bias") for n in "qkv"] == ["S(0)"] * 3
    assert (placed(graph, "out.weight"), placed(graph, "out.bias")) == ("S(1)", "R")
    assert [placed(graph, n) for n in names(graph, "linear")] == ["S(2)", "S(2)", "S(2)", "P"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [("qkv.weight", "S(0,3)"), ("out.weight", "S(1)")])
def test_fused_attention_follows_from_one_annotation(seed: tuple[str, str]) -> None:
    graph = propagated(small("fused"), "tp=2", {seed[0]: f"tp:{seed[1]}"})
    assert placed(graph, "qkv.weight") == placed(graph, "qkv.bias") == "S(0,3)"
    fused, out = names(graph, "linear")
    assert (strategy(graph, fused), placed(graph, fused)) == ("n/3", "S(2,3)")
    assert placed(graph, names(graph, "scaled_dot_product_attention")[0]) == "S(1)"
    assert placed(graph, "out.weight") == "S(1)"
    assert placed(graph, out) == "P"


@pytest.mark.slow
def test_heads_that_do_not_divide_stay_whole() -> None:
    """4 heads on 8 ranks: the weight is cut, the heads are not, and nothing is guessed."""
    graph = propagated(small("attention"), "tp=8", {"q.weight": "tp:S(0)"})
    (attention,) = names(graph, "scaled_dot_product_attention")
    assert strategy(graph, names(graph, "linear")[0]) == "n"
    assert strategy(graph, attention) is None
    assert placed(graph, "k.weight") == "?"


@pytest.mark.slow
def test_sequence_parallelism() -> None:
    """Korthikanti et al. 2022: norms and residuals cut along the sequence, between them tensors."""
    seeds = {
        "module:*.norm": "tp:S(1)",
        "attention.[qkv].weight": "tp:S(0)",
        "attention.out.weight": "tp:S(1)",
        "mlp.up.weight": "tp:S(0)",
        "mlp.down.weight": "tp:S(1)",
    }
    graph = propagated(small("layer"), "tp=2", seeds)
    assert [placed(graph, n) for n in names(graph, "layer_norm")] == ["S(1)"] * 2
    assert [placed(graph, n) for n in names(graph, "add")] == ["S(1)"] * 2  # P -> S: reduce-scatter
    assert [placed(graph, n) for n in names(graph, "linear")] == [*["S(2)"] * 3, "P", "S(2)", "P"]
    assert placed(graph, "x") == "S(1)"


def test_an_annotated_sum_is_resharded_after_the_op() -> None:
    graph = propagated(small("mlp"), "tp=2", {"up.weight": "tp:S(0)", "module:down": "tp:R"})
    down = names(graph, "linear")[1]
    assert (strategy(graph, down), placed(graph, down)) == ("k", "R")


@pytest.mark.slow
def test_gpt2() -> None:
    seeds = {
        "transformer.h.*.attn.c_attn.weight": "tp:S(1,3)",
        "transformer.h.*.mlp.c_fc.weight": "tp:S(1)",
        "input:input_ids": "dp:S(0)",
    }
    graph = propagated(prepared("gpt2"), "dp=2,tp=2", seeds)
    for layer in range(4):
        at = f"transformer.h.{layer}."
        assert placed(graph, f"{at}attn.c_attn.bias", 1) == "S(0,3)"
        assert placed(graph, f"{at}attn.c_proj.weight", 1) == "S(0)"
        assert placed(graph, f"{at}mlp.c_proj.weight", 1) == "S(0)"
        assert placed(graph, f"{at}mlp.c_proj.bias", 1) == "R"
    products = [placed(graph, n, 1) for n in names(graph, "addmm")]
    assert products == ["S(1,3)", "P", "S(1)", "P"] * 4
    heads = names(graph, "scaled_dot_product_attention")
    assert [(placed(graph, n, 0), placed(graph, n, 1)) for n in heads] == [("S(0)", "S(1)")] * 4


@pytest.mark.slow
def test_llama_with_grouped_queries() -> None:
    seeds = {
        "model.layers.*.self_attn.q_proj.weight": "tp:S(0)",
        "model.layers.*.mlp.gate_proj.weight": "tp:S(0)",
    }
    graph = propagated(prepared("llama"), "tp=2", seeds)
    for layer in range(4):
        at = f"model.layers.{layer}."
        for name in ("self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"):
            assert placed(graph, f"{at}{name}.weight") == "S(0)"
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            assert placed(graph, f"{at}{name}.weight") == "S(1)"
    wider = propagated(prepared("llama"), "tp=4", seeds)
    assert placed(wider, "model.layers.0.self_attn.q_proj.weight") == "S(0)"
    # 4 query heads on 4 ranks, but only 2 heads of keys and values
    assert placed(wider, "model.layers.0.self_attn.k_proj.weight") != "S(0)"


def data_seeds(name: str) -> dict[str, str]:
    """Every input cut along its batch dim."""
    inputs = captured(name).inputs
    return {f"input:{i.name}": f"dp:S({i.batch_dim})" for i in inputs if i.batch_dim is not None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "bert", "vit", "t5", "mixtral", "resnet50", "recommender", "unet"]
)
def test_data_parallelism_over_the_zoo(name: str) -> None:
    if not ZOO[name].available:
        pytest.skip("transformers is not installed")
    graph = propagated(prepared(name), "dp=2", data_seeds(name))
    (output,) = graph.graph.find_nodes(op="output")
    loss = output.args[0][0]
    assert placed(graph, loss.name) in ("P", "R")
    assert strategy(graph, loss.name)
    batched = _from_inputs(graph)
    whole = [
        n.name
        for n in batched
        if (held := sharding(n)) is not None and held.strategy[0] in (None, "")
    ]
    assert not whole, "what depends on the inputs is cut"
    for held in graph.graph.find_nodes(op="get_attr"):
        assert placed(graph, held.name) in ("R", "?")


def _from_inputs(graph: fx.GraphModule) -> list[fx.Node]:
    """Ops that depend on a user input; sizes are no data."""
    reached: dict[fx.Node, None] = {}
    for n in graph.graph.nodes:
        from_input = n.op == "placeholder" and sharding(n) is not None
        if from_input or any(a in reached for a in n.all_input_nodes):
            if from_input or sharding(n) is not None or is_item(n):
                reached[n] = None
    return [n for n in reached if n.op == "call_function"]


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_golden_texts(name: str) -> None:
    """After each pass; to renew: write the text that this test makes into the file."""
    seeds = {"mlp": {"up.weight": "tp:S(0)"}, "attention": {"q.weight": "tp:S(0)"}}[name]
    seeds = {**seeds, "input:x": "dp:S(0)"}
    texts = {
        "annotate": sharding_text(annotated(small(name), "dp=2,tp=2", seeds)),
        "propagate": sharding_text(propagated(small(name), "dp=2,tp=2", seeds)),
        "propagate{close=true}": sharding_text(
            propagated(small(name), "dp=2,tp=2", seeds, close=True)
        ),
    }
    text = "\n".join(f"# after {name}\n{text}" for name, text in texts.items())
    assert text == (GOLDEN / f"sharding_{name}.txt").read_text(encoding="utf-8")


def test_a_mesh_is_needed() -> None:
    with pytest.raises(FxpartError, match="no mesh") as caught:
        PassManager(all_passes()).run("propagate", small("mlp"))
    assert caught.value.code == "FXP109"


def test_origins_lead_back_to_the_annotation() -> None:
    graph = propagated(small("mlp"), "dp=2,tp=2", {"up.*": "tp:S(0)", "input:x": "dp:S(0)"})
    down = names(graph, "linear")[1]
    text = why(graph, down)
    assert "'up.*' through gelu" in text
    assert "'input:x' through add" in text
    assert f"by way of gelu, {names(graph, 'linear')[0]}, up_" in text
    assert "annotation 'up.*'" in why(graph, "up_weight")
    with pytest.raises(FxpartError):
        why(graph, "nobody")
    for held in shardings(graph).values():
        for axis in range(2):
            decided = held.strategy[axis] is not None and None not in (
                r[axis] for r in held.results
            )
            assert not decided or held.origins[axis]


def test_an_annotated_weight_counts_before_an_annotated_operand() -> None:
    seeds = {"up.weight": "tp:S(0)", "module:norm": "tp:S(2)"}
    graph = propagated(small("mlp"), "tp=2", seeds)
    assert strategy(graph, names(graph, "linear")[0]) == "n"
    assert placed(graph, "layer_norm") == "S(2)"


@pytest.mark.slow
def test_weights_on_the_axis_of_the_batch_are_stored_in_pieces() -> None:
    """ZeRO-3 as placements: the ops cut the batch, the weights are gathered."""
    graph = propagated(small("layer"), "dp=2", {"input:x": "dp:S(0)", "*.weight": "dp:S(0)"})
    for op in ("linear", "layer_norm", "add", "scaled_dot_product_attention"):
        assert [placed(graph, n) for n in names(graph, op)] == ["S(0)"] * len(names(graph, op))
    assert placed(graph, "mlp.up.weight") == "S(0)"
    assert placed(graph, "mlp.up.bias") == "R"


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "expected"), [("dp", "S(0)"), ("ep", "P")])
def test_experts_on_the_ranks_that_cut_the_batch_or_on_their_own(axis: str, expected: str) -> None:
    seeds = {"input:*": "dp:S(0)", "model.layers.*.mlp.experts.*": f"{axis}:S(0)"}
    mesh = "dp=2" if axis == "dp" else "ep=2"
    if axis == "ep":
        del seeds["input:*"]
    graph = propagated(prepared("mixtral"), mesh, seeds)
    experts = names(graph, "experts")
    assert experts
    assert [placed(graph, n) for n in experts] == [expected] * len(experts)


def test_data_axis_and_tensor_axis_in_one_dim() -> None:
    """Two axes cut the rows, the major one first; the result is a product of both."""
    seeds = {"input:x": "a:S(0),b:S(0)"}
    graph = propagated(small("mlp"), "a=2,b=2", seeds)
    up = names(graph, "linear")[0]
    assert (placed(graph, up, 0), placed(graph, up, 1)) == ("S(0)", "S(0)")
    assert (strategy(graph, up, 0), strategy(graph, up, 1)) == ("b1", "b1")
