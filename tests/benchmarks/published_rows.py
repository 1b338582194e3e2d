"""Rows of a file of published runs: what is checked before anything is predicted from them."""

from __future__ import annotations

from typing import Any

GROUPS = ("model", "layout", "precision", "measured")
# Numbers by group, "" for those of the row itself, with those that every row needs.
NUMBERS = {
    "": ("sequence", "global_batch", "microbatch", "microbatches", "gpus", "gpus_per_host"),
    "model": (
        "layers", "hidden", "heads", "kv_heads", "head_dim", "value_dim", "ffn", "vocab", "experts",
        "experts_active", "expert_ffn", "shared_experts", "shared_ffn", "dense_layers", "dense_ffn",
        "capacity", "windowed", "q_rank", "kv_rank", "params", "params_active",
    ),
    "layout": ("dp", "tp", "cp", "pp", "ep", "zero", "zero_group", "virtual"),
    "measured": (
        "step_seconds", "tokens_per_second_per_gpu", "samples_per_second", "peak_memory_bytes",
    ),
}  # fmt: skip
NEEDED = {"": ("sequence", "gpus"), "model": ("layers", "hidden")}
ABSENT = ("zero", "experts", "shared_experts", "shared_ffn", "dense_layers", "windowed", "q_rank",
          "kv_rank", "value_dim")  # fmt: skip
MOST = 1e18


def read_row(row: Any) -> dict[str, Any]:
    """Return a copy of a row with all groups; raise ValueError where a value has no meaning.

    The step time follows from printed tokens or samples per second where it is not printed itself.
    """
    if not isinstance(row, dict):
        raise ValueError("the row is no object")
    found = {**row}
    for name in GROUPS:
        group = row.get(name)
        if group is not None and not isinstance(group, dict):
            raise ValueError(f"{name} is no object")
        found[name] = {k: v for k, v in (group or {}).items() if v is not None}
    for name, keys in NUMBERS.items():
        for key in keys:
            _check(found if name == "" else found[name], name, key)
    for name, text in (("gpu", row.get("gpu")), ("precision", found["precision"].get("compute"))):
        if not isinstance(text, str) or not text:
            raise ValueError(f"the {name} is not printed")
    found["source"], found["id"] = str(row.get("source")), str(row.get("id"))
    _derive_seconds(found)
    return found


def _check(group: dict[str, Any], name: str, key: str) -> None:
    """Raise ValueError unless a value is absent or a number that is greater than 0."""
    value, text = group.get(key), f"{name}.{key}".lstrip(".")
    if value is None:
        if key in NEEDED.get(name, ()) and not _is_image(group, name):
            raise ValueError(f"{text} is not printed")
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MOST:
        raise ValueError(f"{text} is no number: {str(value)[:40]!r}")
    if not value and key not in ABSENT:
        raise ValueError(f"{text} is 0")


def _is_image(group: dict[str, Any], name: str) -> bool:
    """Return whether a row is one of a model without sequences, whose kind is what is missing."""
    kind = group.get("kind") if name == "model" else group.get("model", {}).get("kind")
    return kind not in (None, "gpt", "llama", "bert", "moe")


def _derive_seconds(row: dict[str, Any]) -> None:
    measured, batch = row["measured"], row.get("global_batch")
    if measured.get("step_seconds") or not batch:
        return
    tokens, samples = (measured.get(k) for k in ("tokens_per_second_per_gpu", "samples_per_second"))
    if tokens and row.get("sequence"):
        measured["step_seconds"] = batch * row["sequence"] / tokens / row["gpus"]
    elif samples:
        measured["step_seconds"] = batch / samples
