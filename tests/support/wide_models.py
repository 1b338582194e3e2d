"""Models of a size at which sharing a block pays, on the meta device, captured and prepared."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from stage_runs import prepared
from torch import fx

from fxpart.capture import CapturedModel, capture

LENGTH = 512


def _language(name: str, layers: int) -> torch.nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    width = {"hidden_size": 4096, "num_hidden_layers": layers, "num_attention_heads": 32}
    made: torch.nn.Module
    if name == "gpt2":
        made = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=layers, n_embd=4096, n_head=32, attn_pdrop=0.0)
        )
    elif name == "llama":
        made = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**width, intermediate_size=11008, num_key_value_heads=8)
        )
    elif name == "bert":
        made = transformers.BertForMaskedLM(
            transformers.BertConfig(**width, intermediate_size=16384)
        )
    else:
        made = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                **width, intermediate_size=11008, num_key_value_heads=8, num_local_experts=8
            )
        )
    return made


@cache
def large(name: str, layers: int = 2, rows: int = 8) -> tuple[fx.GraphModule, CapturedModel]:
    """ "gpt2", "llama", "bert", or "mixtral" in bfloat16, trained on ``rows`` rows."""
    with torch.device("meta"):
        model = _language(name, layers).bfloat16().train()
        ids = torch.zeros(rows, LENGTH, dtype=torch.int64)
    captured = capture(model, {"input_ids": ids, "labels": ids}, batch_size=rows)
    return prepared(captured), captured
