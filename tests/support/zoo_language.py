"""transformers models of the zoo, from tiny configurations with random weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from zoo_entry import Built, Entry, ids

ROWS = 4


def make_model(name: str, config: str, **options: Any) -> torch.nn.Module:
    """A transformers model in training mode, built without its advice on token ids and losses."""
    import transformers

    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        model: torch.nn.Module = getattr(transformers, name)(
            getattr(transformers, config)(**options)
        )
    finally:
        logger.setLevel(level)
    return model.train()


def _causal(name: str, config: str, length: int = 12, **options: Any) -> Callable[[], Built]:
    def make() -> Built:
        tokens = ids(ROWS, length, 97)
        model = make_model(
            name, config, vocab_size=97, bos_token_id=1, eos_token_id=2, pad_token_id=0, **options
        )
        return Built(model, {"input_ids": tokens, "labels": tokens.clone()}, None, ROWS)

    return make


_GPT2 = _causal("GPT2LMHeadModel", "GPT2Config", n_layer=4, n_embd=32, n_head=2, n_positions=32)
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _bert() -> Built:
    model = make_model(
        "BertForMaskedLM",
        "BertConfig",
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    tokens = ids(ROWS, 12, 97)
    mask = torch.ones_like(tokens)
    mask[1, 9:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}
    return Built(model, batch, None, ROWS)


def _t5() -> Built:
    model = make_model(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=97,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return Built(model, {"input_ids": ids(ROWS, 12, 97), "labels": ids(ROWS, 7, 97)}, None, ROWS)


def _bart() -> Built:
    model = make_model(
        "BartForConditionalGeneration",
        "BartConfig",
        vocab_size=97,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    return Built(model, {"input_ids": ids(ROWS, 12, 97), "labels": ids(ROWS, 7, 97)}, None, ROWS)


def _vit() -> Built:
    model = make_model(
        "ViTForImageClassification",
        "ViTConfig",
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=5,
    )
    batch = {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.randint(0, 5, (ROWS,))}
    return Built(model, batch, None, ROWS)


def _whisper() -> Built:
    model = make_model(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        vocab_size=97,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    batch = {"input_features": torch.randn(ROWS, 8, 32), "labels": ids(ROWS, 7, 97)}
    return Built(model, batch, None, ROWS)


def _distilbert() -> Built:
    model = make_model(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        vocab_size=97,
        dim=32,
        n_layers=3,
        n_heads=2,
        hidden_dim=64,
        max_position_embeddings=32,
        num_labels=3,
    )
    tokens = ids(ROWS, 12, 97)
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.randint(0, 3, (ROWS,)),
    }
    return Built(model, batch, None, ROWS)


def _clip() -> Built:
    text = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
    }
    model = make_model(
        "CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=16
    )
    tokens = ids(ROWS, 8, 97)
    batch = {
        "input_ids": tokens,
        "pixel_values": torch.randn(ROWS, 3, 32, 32),
        "attention_mask": torch.ones_like(tokens),
        "return_loss": True,
    }
    return Built(model, batch, None, ROWS)


LANGUAGE: dict[str, Entry] = {
    "gpt2": Entry(_GPT2, "transformers", note="tied embeddings"),
    "llama": Entry(
        _causal("LlamaForCausalLM", "LlamaConfig", **_LLAMA),
        "transformers",
        tolerance=1e-5,
        note="grouped-query attention",
    ),
    "mixtral": Entry(
        _causal(
            "MixtralForCausalLM",
            "MixtralConfig",
            num_local_experts=4,
            num_experts_per_tok=2,
            **_LLAMA,
        ),
        "transformers",
        tolerance=1e-5,
        cuttable=False,
        note="mixture of experts",
    ),
    "mamba": Entry(
        _causal(
            "MambaForCausalLM",
            "MambaConfig",
            hidden_size=16,
            state_size=4,
            num_hidden_layers=2,
            use_mambapy=False,
        ),
        "transformers",
        note="state space, tied embeddings",
    ),
    "bert": Entry(_bert, "transformers", note="attention mask, tied embeddings"),
    "distilbert": Entry(_distilbert, "transformers", note="sequence classification"),
    "t5": Entry(_t5, "transformers", note="encoder-decoder, shared relative positions"),
    "bart": Entry(_bart, "transformers", note="encoder-decoder, shared embedding, layerdrop off"),
    "vit": Entry(_vit, "transformers", note="image classification"),
    "whisper": Entry(_whisper, "transformers", note="speech to text"),
    "clip": Entry(
        _clip, "transformers", symbolic=False, cuttable=False, note="two towers, contrastive loss"
    ),
}
