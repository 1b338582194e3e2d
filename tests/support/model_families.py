"""Small models of five architectures with any number of layers, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from zoo_entry import ids
from zoo_language import ROWS, make_model

WORDS, LENGTH, WIDTH = 97, 12, 32
TOKENS = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {
    "hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, **TOKENS,
}  # fmt: skip
T5 = {"d_model": WIDTH, "d_kv": 16, "d_ff": 64, "num_heads": 2, "decoder_start_token_id": 0}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
VIT = {
    "hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8, "num_labels": 5,
}  # fmt: skip
GPT2 = {"n_embd": WIDTH, "n_head": 2, "n_positions": 32, **TOKENS}


@dataclass(frozen=True)
class Family:
    """Models of one architecture and any number of layers."""

    model: str
    config: str
    layers: str
    options: dict[str, Any]
    batch: Callable[[], dict[str, torch.Tensor]]
    dtype: torch.dtype = torch.float32

    def build(self, layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        """Return a model with random weights, and its batch."""
        torch.manual_seed(0)
        made = make_model(self.model, self.config, **{self.layers: layers}, **self.options)
        return made.to(self.dtype), self.batch()


def text() -> dict[str, torch.Tensor]:
    tokens = ids(ROWS, LENGTH, WORDS)
    return {"input_ids": tokens, "labels": tokens.clone()}


def pairs() -> dict[str, torch.Tensor]:
    return {"input_ids": ids(ROWS, LENGTH, WORDS), "labels": ids(ROWS, 7, WORDS)}


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.randint(0, 5, (ROWS,))}


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", "num_hidden_layers", LLAMA, text),
    # Only bfloat16 has a grouped product on GPUs; other dtypes multiply expert by expert.
    "mixtral": Family(
        "MixtralForCausalLM", "MixtralConfig", "num_hidden_layers", {**LLAMA, **MIXTRAL}, text,
        torch.bfloat16,
    ),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", "n_layer", GPT2, text),
    "vit": Family("ViTForImageClassification", "ViTConfig", "num_hidden_layers", VIT, images),
    "t5": Family(
        "T5ForConditionalGeneration", "T5Config", "num_layers", {"vocab_size": WORDS, **T5}, pairs
    ),
}  # fmt: skip
