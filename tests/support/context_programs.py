"""A small Llama on sequences of 32,768 tokens, and the memory of its training on real processes."""

from __future__ import annotations

from pathlib import Path

import torch
from zoo_language import make_model

import fxpart
from fxpart import Cluster, Device, Link, Program
from fxpart.profiling.memory import allocations
from fxpart.training.trainer_factory import load_trainer

TOKENS, WORDS = 32768, 128


def batch() -> dict[str, torch.Tensor]:
    """One sequence, which is its own target."""
    ids = torch.randint(3, WORDS, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def cluster(count: int, memory: int) -> Cluster:
    """Equal devices of ``memory`` bytes."""
    devices = tuple(
        Device(
            name=f"d{i}", kind="cpu", model="made", host="h", memory=memory,
            flops={"float32": 1e10}, bandwidth=1e10,
        )
        for i in range(count)
    )  # fmt: skip
    link = Link(source="*", target="*", latency=1e-5, bandwidth=1e10)
    return Cluster(name="long", devices=devices, links=(link,))


def planned(count: int, memory: int, **constraints: int | str) -> Program:
    """The planner's own choice for four layers on so many devices."""
    torch.manual_seed(0)
    model = make_model(
        "LlamaForCausalLM", "LlamaConfig", vocab_size=WORDS, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=TOKENS,
    )  # fmt: skip
    return fxpart.compile(
        model, cluster(count, memory), example_inputs=batch(), optimizer="adamw", check="off",
        constraints=constraints,
    )  # fmt: skip


def train_measured(folder: str, weights: str) -> tuple[float, int]:
    """On every rank: one step; its loss, and the most bytes of tensors that it allocated."""
    trainer = load_trainer(Path(folder), torch.optim.AdamW, weights=weights, timeout=300.0)
    losses: list[float] = []

    def step() -> None:
        losses.append(float(trainer.step(batch())))

    peak = allocations(step).peak
    trainer.close()
    return losses[0], peak
