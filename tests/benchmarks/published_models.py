"""Sizes and parameters of published models: as a row has them, else as the model's own files do.

A mixture of experts is a Llama whose MLPs are mixtures: `experts`, `experts_active`, `ffn` or
`expert_ffn` (width of an expert), `shared_experts`, `shared_ffn` (of all together), `dense_layers`
with an MLP of `dense_ffn`, `capacity` (of each expert over an even share; none where no token is
dropped), `windowed` (share of the layers whose attention reads a short window only). `q_rank` and
`kv_rank` are those of latent attention, `head_dim` of its queries, `value_dim` of its values.
"""

from __future__ import annotations

import re
from typing import Any

KINDS = ("gpt", "llama", "bert")
GATED = ("llama",)  # kinds of models whose MLP has three matrices
HEAD = 128  # elements of a head where neither heads nor their size are printed
ROPE = 64  # elements of a key of latent attention that no rank compresses (DeepSeek-V2, V3)
BERT = 30_522  # vocabulary of BERT, as all of its kind have it
VOCABULARIES = (32_000, 262_144)  # least and most where the vocabulary follows from parameters

# config.json of huggingface.co: openai/gpt-oss-120b and -20b, deepseek-ai/DeepSeek-V3 and -V2,
# moonshotai/Kimi-K2-Base, Qwen/Qwen3-235B-A22B and -30B-A3B, mistralai/Mixtral-8x7B-v0.1 and
# -8x22B-v0.1, databricks/dbrx-base, allenai/OLMoE-1B-7B-0924. Keys: letters and digits of names.
KNOWN: dict[str, dict[str, Any]] = {
    "gptoss120b": {"heads": 64, "kv_heads": 8, "head_dim": 64, "expert_ffn": 2880, "vocab": 201088,
                   "windowed": 0.5},
    "gptoss20b": {"heads": 64, "kv_heads": 8, "head_dim": 64, "expert_ffn": 2880, "vocab": 201088,
                  "windowed": 0.5},
    "deepseekv3": {"heads": 128, "head_dim": 192, "value_dim": 128, "q_rank": 1536, "kv_rank": 512,
                   "expert_ffn": 2048, "shared_experts": 1, "dense_layers": 3, "dense_ffn": 18432,
                   "vocab": 129280},
    "deepseekv2": {"heads": 128, "head_dim": 192, "value_dim": 128, "q_rank": 1536, "kv_rank": 512,
                   "expert_ffn": 1536, "shared_experts": 2, "dense_layers": 1, "dense_ffn": 12288,
                   "vocab": 102400},
    "kimik2": {"heads": 64, "head_dim": 192, "value_dim": 128, "q_rank": 1536, "kv_rank": 512,
               "expert_ffn": 2048, "shared_experts": 1, "dense_layers": 1, "dense_ffn": 18432,
               "vocab": 163840},
    "qwen3235b": {"heads": 64, "kv_heads": 4, "head_dim": 128, "expert_ffn": 1536, "vocab": 151936},
    "qwen330b": {"heads": 32, "kv_heads": 4, "head_dim": 128, "expert_ffn": 768, "vocab": 151936},
    "mixtral8x7b": {"heads": 32, "kv_heads": 8, "expert_ffn": 14336, "vocab": 32000},
    "mixtral8x22b": {"heads": 48, "kv_heads": 8, "expert_ffn": 16384, "vocab": 32000},
    "dbrx": {"heads": 48, "kv_heads": 8, "expert_ffn": 10752, "vocab": 100352},
    "olmoe": {"heads": 16, "kv_heads": 16, "expert_ffn": 1024, "vocab": 50304},
}  # fmt: skip


def complete_model(printed: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of a model of one of KINDS; raise ValueError where one is not known."""
    model = {key: value for key, value in printed.items() if value is not None}
    mixture = model.get("kind") == "moe" or int(model.get("experts") or 0) > 1
    if mixture:
        name = re.sub(r"[^a-z0-9]", "", str(model.get("name")).lower())
        fits = [key for key in KNOWN if key in name]
        model = KNOWN[max(fits, key=len)] | model if fits else model
        model |= {"kind": "llama" if model["kind"] == "moe" else model["kind"]}
    if model.get("kind") not in KINDS:
        raise ValueError(f"this benchmark composes no model of kind {model.get('kind')}")
    _require(model, "layers", "hidden")
    if mixture:
        _require(model, "experts", "experts_active")
        model = _mixture(model)
    elif not model.get("ffn"):
        raise ValueError("the width of the MLP is not printed")
    if not model.get("heads") and not model.get("head_dim"):
        raise ValueError("the heads are not printed")
    model.setdefault("heads", max(1, model["hidden"] // int(model.get("head_dim", HEAD))))
    model.setdefault("head_dim", max(1, model["hidden"] // model["heads"]))
    model.setdefault("kv_heads", model["heads"])
    if model["kind"] == "bert":
        model.setdefault("vocab", BERT)
    _vocabulary(model)
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab")
    _require(model, *(size for size in sizes if size in model))
    return model


def _require(model: dict[str, Any], *sizes: str) -> None:
    for size in sizes:
        value = model.get(size)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
            raise ValueError(f"the model's {size} is not printed as a number")
        model[size] = int(value)


def _mixture(model: dict[str, Any]) -> dict[str, Any]:
    """Return the model with the widths of its MLPs.

    The width of an expert follows from the parameters that a token does not use.
    """
    experts, active = model["experts"], min(model["experts_active"], model["experts"])
    matrices = 3 if model["kind"] in GATED else 2
    width = model.get("expert_ffn")
    if not width and model.get("params") and model.get("params_active") and active < experts:
        mixtures = model["layers"] - int(model.get("dense_layers") or 0)
        idle = mixtures * (experts - active) * matrices * model["hidden"]
        width = round((model["params"] - model["params_active"]) / idle / 64) * 64
    width = width or model.get("ffn")
    if not width or width < 1:
        raise ValueError("the width of the experts is not printed")
    shared = model.get("shared_ffn") or width * int(model.get("shared_experts") or 0)
    dense = model.get("dense_ffn") or model.get("ffn") or active * width
    found = {"expert_ffn": int(width), "shared_ffn": int(shared), "dense_ffn": int(dense)}
    if not model.get("heads") and not model.get("head_dim"):
        found["head_dim"] = HEAD
    return model | found | {"ffn": int(dense), "experts_active": active}


def _vocabulary(model: dict[str, Any]) -> None:
    """Complete the vocabulary from the parameters that the blocks do not have."""
    if model.get("vocab"):
        return
    total = model.get("params")
    if not total:
        raise ValueError("the vocabulary is not printed")
    blocks = model["layers"] * (dense_parameters(model) + expert_parameters(model))
    matrices = 2 if model["kind"] in GATED else 1
    least, most = VOCABULARIES
    model["vocab"] = int(min(most, max(least, (total - blocks) / matrices / model["hidden"])))


def share_of_mixtures(model: dict[str, Any]) -> float:
    """Return the share of the layers that have experts."""
    if not model.get("expert_ffn"):
        return 0.0
    return 1.0 - min(model["layers"], int(model.get("dense_layers") or 0)) / model["layers"]


def dense_parameters(model: dict[str, Any]) -> float:
    """Return the parameters of a block, the mean of all, without its experts."""
    hidden, heads, head = model["hidden"], model["heads"], model["head_dim"]
    value = model.get("value_dim") or head
    if model.get("kv_rank"):
        rank = model.get("q_rank") or 0
        queries = rank * (hidden + heads * head) if rank else hidden * heads * head
        keys = model["kv_rank"] * (hidden + heads * (head - ROPE + value)) + hidden * ROPE
        attention = queries + keys + hidden * heads * value
    else:
        attention = hidden * head * (2 * heads + 2 * model["kv_heads"])
    matrices, mixtures = 3 if model["kind"] in GATED else 2, share_of_mixtures(model)
    inner = (1 - mixtures) * model["ffn"] + mixtures * model.get("shared_ffn", 0)
    router = mixtures * hidden * model.get("experts", 0)
    return float(attention + matrices * hidden * inner + router + 4 * hidden)


def expert_parameters(model: dict[str, Any], active: bool = False) -> float:
    """Return the parameters of a block's experts, the mean of all; of those that a token uses."""
    mixtures = share_of_mixtures(model)
    if not mixtures:
        return 0.0
    number = model["experts_active"] if active else model["experts"]
    matrices = 3 if model["kind"] in GATED else 2
    return float(mixtures * number * matrices * model["hidden"] * model["expert_ffn"])
