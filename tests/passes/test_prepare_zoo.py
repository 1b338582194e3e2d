"""PREPARE against the captured graph on the zoo: outputs, gradients, buffers, every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fxpart.passes import PREPARE, all_passes
from torch import fx
from zoo import ZOO
from zoo_graphs import captured, inputs, prepared

import fxpart
from fxpart.compiler import Level, PassManager
from fxpart.compiler.effects import argument, is_random, state_written
from fxpart.errors import FxpartError

NAMES = [n for n, entry in ZOO.items() if entry.available]


def run(module: fx.GraphModule, state: dict[str, torch.Tensor], given: list[Any]) -> list[Any]:
    """Outputs, gradients of all state by name, and buffers; the state is put back."""
    before = {name: t.detach().clone() for name, t in state.items()}
    results = fx.Interpreter(module, garbage_collect_values=False).run(*given)
    trained = [t for _, t in sorted(state.items()) if t.requires_grad]
    grads = torch.autograd.grad(results[0], trained, allow_unused=True)
    after = [t.detach().clone() for _, t in sorted(state.items())]
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(before[name])
    return [*(r.detach().clone() for r in results), *grads, *after]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_bit(name: str) -> None:
    whole = captured(name)
    # the captured graph with its random ops keyed and nothing else done to it
    reference = PassManager(all_passes(), verify=False).run("key_random", whole.graph)
    inner = [m for m in reference.modules() if isinstance(m, fx.GraphModule) and m is not reference]
    assert not any(is_random(n) for m in inner for n in m.graph.nodes), "compare regions elsewhere"
    graph = prepared(name)
    if any(_has_flag(node) for node in graph.graph.nodes):  # grouped gradients add in another order
        passes = PREPARE.replace("fold_attention_mask,", "")
        graph = PassManager(all_passes()).run(passes, whole.graph)
    given = [17, *inputs(name)]
    expected = run(reference, whole.state, given)
    found = run(graph, whole.state, given)
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        assert (a is None and b is None) or (torch.equal(a, b) and a.stride() == b.stride())


def _has_flag(node: fx.Node) -> bool:
    attention = "scaled_dot_product_attention" in str(node.target)
    return attention and bool(argument(node, "is_causal"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_attention_has_the_bits_of_the_module(name: str) -> None:
    """Only a traced module builds the mask and repeats the keys."""
    built = ZOO[name].build()
    program = fxpart.compile(
        built.model, "local:1", example_inputs=built.batch, microbatches=1,
        constraints={"stages": 1},
    )  # fmt: skip
    found = program.verify(steps=1)
    assert (found.eager_loss, found.eager_gradient) == (0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_captured_graph_is_left_alone(name: str) -> None:
    prepared(name)
    graph = captured(name).graph
    assert graph.meta["fxpart_level"] is Level.CAPTURED
    assert not any(n.name == "rng_key" for n in graph.graph.nodes)
    assert not any(k.startswith("fxpart_b") for k in graph.meta)


@pytest.mark.slow
def test_batch_statistics_are_the_only_writes_left() -> None:
    written = state_written(prepared("resnet50").graph)
    names = {name.rpartition(".")[2] for group in written.values() for name in group}
    assert names == {"running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.slow
def test_preparing_twice_gives_equal_graphs_and_prepared_graphs_are_refused() -> None:
    from fxpart.capture.fingerprint import fingerprint

    again = PassManager(all_passes()).run(PREPARE, captured("mlp").graph)
    assert fingerprint(again) == fingerprint(prepared("mlp"))
    with pytest.raises(FxpartError) as caught:
        PassManager(all_passes()).run(PREPARE, again)
    assert caught.value.code == "FXP109"
