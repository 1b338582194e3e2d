"""Meta and fake models: captured without allocating a weight."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from zoo import ZOO

from fxpart.capture import capture


def ops(captured: Any) -> list[str]:
    return [str(n.target) for n in captured.graph.graph.nodes if n.op == "call_function"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "unet", "side_mask"])
def test_a_meta_model_gives_the_graph_of_a_real_one(name: str) -> None:
    built = ZOO[name].build()
    real = capture(built.model, built.batch, loss=built.loss)
    with torch.device("meta"):
        meta_model = ZOO[name].make().model
    meta = capture(meta_model, built.batch, loss=built.loss)
    assert ops(meta) == ops(real)
    assert meta.symbols.keys() == real.symbols.keys()
    assert all(t.device.type == "meta" for n, t in meta.state.items() if n in meta.parameters)
    assert all(p.device.type == "meta" for p in meta_model.parameters())
    values = [n.meta["val"] for n in meta.graph.graph.nodes]
    assert {v.device.type for v in values if isinstance(v, torch.Tensor)} == {"cpu"}


def test_a_fake_model() -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        inputs = (torch.randn(6, 4),)
    captured = capture(model, inputs)
    assert captured.symbolic and captured.aliases == {"2.weight": "0.weight"}
    assert all(type(t) is nn.Parameter for t in captured.state.values())
    assert all(t.device.type == "meta" for t in captured.state.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-70b", "gpt3-175b"])
def test_the_large_ones_from_their_configurations(name: str) -> None:
    """Under 60 s of CPU time is asked for; here a fifth of the layers, and no weight allocated."""
    transformers = pytest.importorskip("transformers")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with torch.device("meta"):
        if name == "llama-70b":
            config = transformers.LlamaConfig(
                hidden_size=8192,
                intermediate_size=28672,
                num_hidden_layers=16,
                num_attention_heads=64,
                num_key_value_heads=8,
            )
            model = transformers.LlamaForCausalLM(config)
        else:
            config = transformers.GPT2Config(n_layer=19, n_embd=12288, n_head=96, n_positions=2048)
            model = transformers.GPT2LMHeadModel(config)
    ids = torch.zeros(2, 512, dtype=torch.int64)
    captured = capture(model, {"input_ids": ids, "labels": ids.clone()}, batch_size=64)
    seconds = time.process_time() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    assert captured.symbolic and captured.batch_size == 64
    assert sum(captured.state[n].numel() for n in captured.parameters) > 1e10
    assert seconds < 40 and grown < 1.0
