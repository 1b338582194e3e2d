"""Small models for random layouts: their batches, annotations for each kind of layout, and weights.

A batch has any number of rows. The weight of a batch is what its loss is a mean over: tokens with a
label, or rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from sharded_models import TENSOR
from torch import nn
from torch.nn import functional
from zoo_language import make_model
from zoo_small import Recommender
from zoo_vision import UNet

WORDS, WIDTH, IGNORED = 97, 32, -100
TOKENS = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {
    "hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, **TOKENS,
}  # fmt: skip
DEEPSEEK = {
    **LLAMA, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 8,
    "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
BERT = {
    "hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64, "vocab_size": WORDS,
}  # fmt: skip
VIT = {
    "hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8, "num_labels": 5,
}  # fmt: skip
T5 = {
    "vocab_size": WORDS, "d_model": WIDTH, "d_kv": 16, "d_ff": 64, "num_heads": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
# Sizes that two or four ranks do not divide, by the options of each configuration.
UNEVEN = {
    "hidden_size": 36, "n_embd": 36, "d_model": 36, "intermediate_size": 52, "d_ff": 50,
    "num_attention_heads": 3, "n_head": 3, "num_heads": 3, "num_key_value_heads": 3,
    "num_local_experts": 3, "n_routed_experts": 6, "n_group": 3, "moe_intermediate_size": 20,
}  # fmt: skip

Batch = Any
Texts = Callable[[int, int, torch.Generator], Batch]


@dataclass(frozen=True)
class LayoutModel:
    """A model of the campaign.

    make: returns the model for a number of layers, a rate of dropout, and whether its sizes are
    UNEVEN. batch: (rows, length,
    generator). weight: what the loss of a batch is a mean over. tensor: annotations of an axis tp.
    sequence: further ones that shard activations by tokens. experts: those that shard experts over
    an axis, with "AXIS" in its place. sparse: whether gradients of tables are sparse.
    """

    make: Callable[[int, float, bool], nn.Module]
    batch: Texts
    weight: Callable[[Batch], float]
    loss: Callable[..., torch.Tensor] | None = None
    tensor: dict[str, str] = field(default_factory=dict)
    sequence: dict[str, str] = field(default_factory=dict)
    experts: dict[str, str] = field(default_factory=dict)
    has_attention: bool = True
    drops: bool = True
    sparse: bool = False

    def build(
        self,
        layers: int,
        dropout: bool,
        dtype: torch.dtype,
        frozen: tuple[str, ...] = (),
        uneven: bool = False,
    ) -> nn.Module:
        """Return the model with its random weights. frozen: beginnings of parameters' names."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = self.make(layers, 0.1 if dropout else 0.0, uneven).to(dtype)
        if dtype == torch.float64 and self.experts:
            made.config._experts_implementation = "batched_mm"  # type: ignore[union-attr]
        for name, parameter in made.named_parameters():
            if name.startswith(frozen):
                parameter.requires_grad_(False)
        return made.train()


def _of(model: str, config: str, layers: str, options: dict[str, Any], *rates: str) -> Any:
    """Return the factory of a model of transformers. rates: the options that are dropout rates."""

    def make(count: int, rate: float, uneven: bool) -> nn.Module:
        given = {**options, **dict.fromkeys(rates, rate), layers: count}
        if uneven:
            given |= {key: size for key, size in UNEVEN.items() if key in given}
        return make_model(model, config, **given)

    return make


def _labels(ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Labels of which each row ignores another number, now and then all."""
    labels = ids.clone()
    for row in labels:
        cut = int(torch.randint(0, len(row), (), generator=generator))
        row[:cut] = IGNORED
    if len(labels) > 2 and int(torch.randint(0, 4, (), generator=generator)) == 0:
        labels[1] = IGNORED
    labels[0] = ids[0]
    return labels


def _text(rows: int, length: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(3, WORDS, (rows, length), generator=generator)
    return {"input_ids": ids, "labels": _labels(ids, generator)}


def _masked(rows: int, length: int, generator: torch.Generator) -> Batch:
    batch = _text(rows, length, generator)
    mask = torch.ones_like(batch["input_ids"])
    for row in mask:
        row[length - int(torch.randint(0, 4, (), generator=generator)) :] = 0
    mask[:, :2] = 1
    return {"input_ids": batch["input_ids"], "attention_mask": mask, "labels": batch["labels"]}


def _pairs(rows: int, length: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(3, WORDS, (rows, length), generator=generator)
    target = torch.randint(3, WORDS, (rows, 8), generator=generator)
    return {"input_ids": ids, "labels": _labels(target, generator)}


def _images(rows: int, length: int, generator: torch.Generator) -> Batch:
    pixels = torch.randn(rows, 3, 32, 32, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (rows,), generator=generator)}


def _segments(rows: int, length: int, generator: torch.Generator) -> Batch:
    pixels = torch.randn(rows, 3, 32, 32, generator=generator, dtype=torch.float64)
    return (pixels, torch.randint(0, 2, (rows, 32, 32), generator=generator))


def _clicks(rows: int, length: int, generator: torch.Generator) -> Batch:
    def numbers(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=generator)

    return {
        "user": numbers(50, rows), "history": numbers(70, rows, 5), "item": numbers(70, rows),
        "tags": numbers(20, rows, 3), "target": numbers(2, rows).double(),
    }  # fmt: skip


def _next_tokens(batch: Batch) -> float:
    return float((batch["labels"][:, 1:] != IGNORED).sum())


def _all_tokens(batch: Batch) -> float:
    return float((batch["labels"] != IGNORED).sum())


def _rows(batch: Batch) -> float:
    return float(len(batch[0] if isinstance(batch, tuple) else next(iter(batch.values()))))


def _unet(layers: int, rate: float, uneven: bool) -> nn.Module:
    return UNet(width=6 if uneven else 4, depth=2 + (layers > 2))


def _recommender(sparse: bool) -> Callable[[int, float, bool], nn.Module]:
    def make(layers: int, rate: float, uneven: bool) -> nn.Module:
        made = Recommender(*((51, 71, 18) if uneven else ()))
        for module in made.modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                module.sparse = sparse
        return made

    return make


_BETWEEN = {
    "module:model.embed_tokens": "tp:S(1)",
    "module:model.layers.*.self_attn": "tp:S(1)",
    "module:model.layers.*.mlp": "tp:S(1)",
}
_EXPERTS = {
    "*.experts.gate_up_proj": "AXIS:S(0)",
    "*.experts.down_proj": "AXIS:S(0)",
}

MODELS: dict[str, LayoutModel] = {
    "gpt2": LayoutModel(
        _of(
            "GPT2LMHeadModel", "GPT2Config", "n_layer",
            {"n_embd": WIDTH, "n_head": 4, "n_positions": 64, **TOKENS},
            "resid_pdrop", "embd_pdrop", "attn_pdrop",
        ),
        _masked, _next_tokens, tensor=TENSOR["gpt2"],
        sequence={
            "module:transformer.h.*.attn.c_proj": "tp:S(1)",
            "module:transformer.h.*.mlp": "tp:S(1)",
        },
    ),
    "llama": LayoutModel(
        _of("LlamaForCausalLM", "LlamaConfig", "num_hidden_layers", LLAMA, "attention_dropout"),
        _text, _next_tokens, tensor=TENSOR["llama"], sequence=_BETWEEN,
    ),
    "mixtral": LayoutModel(
        _of(
            "MixtralForCausalLM", "MixtralConfig", "num_hidden_layers",
            {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}, "attention_dropout",
        ),
        _text, _next_tokens, tensor=TENSOR["mixtral"], experts=_EXPERTS,
    ),
    "deepseek": LayoutModel(
        _of(
            "DeepseekV3ForCausalLM", "DeepseekV3Config", "num_hidden_layers", DEEPSEEK,
            "attention_dropout",
        ),
        _text, _next_tokens, experts=_EXPERTS,
        tensor={
            "model.embed_tokens.weight": "tp:S(0)",
            "model.layers.*.self_attn.q_b_proj.weight": "tp:S(0)",
            "model.layers.*.self_attn.kv_b_proj.weight": "tp:S(0)",
            "model.layers.*.self_attn.o_proj.weight": "tp:S(1)",
            "*.experts.gate_up_proj": "tp:S(0)",
            "*.experts.down_proj": "tp:S(0)",
            "*.shared_experts.gate_proj.weight": "tp:S(0)",
            "*.shared_experts.up_proj.weight": "tp:S(0)",
            "*.shared_experts.down_proj.weight": "tp:S(1)",
            "lm_head.weight": "tp:S(0)",
        },
    ),
    "bert": LayoutModel(
        _of(
            "BertForMaskedLM", "BertConfig", "num_hidden_layers", BERT,
            "hidden_dropout_prob", "attention_probs_dropout_prob",
        ),
        _masked, _all_tokens, tensor=TENSOR["bert"],
    ),
    "vit": LayoutModel(
        _of(
            "ViTForImageClassification", "ViTConfig", "num_hidden_layers", VIT,
            "hidden_dropout_prob", "attention_probs_dropout_prob",
        ),
        _images, _rows, tensor=TENSOR["vit"],
    ),
    "t5": LayoutModel(
        _of("T5ForConditionalGeneration", "T5Config", "num_layers", T5, "dropout_rate"),
        _pairs, _all_tokens, tensor=TENSOR["t5"],
    ),
    "unet": LayoutModel(
        _unet, _segments, _rows, functional.cross_entropy, has_attention=False, drops=False
    ),
    "recommender": LayoutModel(
        _recommender(False), _clicks, _rows, functional.binary_cross_entropy_with_logits,
        tensor=TENSOR["recommender"], has_attention=False, drops=False,
    ),
    "sparse": LayoutModel(
        _recommender(True), _clicks, _rows, functional.binary_cross_entropy_with_logits,
        tensor=TENSOR["recommender"], has_attention=False, drops=False, sparse=True,
    ),
}  # fmt: skip
