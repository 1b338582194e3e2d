"""Stages compiled by torch.compile beside eager mode, on CPUs: medians of alternating steps.

    python tests/benchmarks/compiled_stages.py

Two stages of GPT-2 (with dropout) and Llama in one process of one thread, with AdamW. Both trainers
step in each round, so that a busy machine disturbs both alike. ``converting_a_script.md`` quotes
the speedups.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from model_families import FAMILIES, GPT2, LLAMA, Family
from record import parser as benchmark_parser  # First: it finds the tests' models.
from record import write
from zoo_entry import ids

import fxpart

LAYERS, WIDTH, LENGTH, ROWS, WORDS = 6, 256, 128, 8, 1000
SIZES = {
    "gpt2": {**GPT2, "n_embd": WIDTH, "n_head": 4, "n_positions": LENGTH, "vocab_size": WORDS},
    "llama": {
        **LLAMA, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_attention_heads": 4,
        "max_position_embeddings": LENGTH, "vocab_size": WORDS,
    },
}  # fmt: skip


def batch() -> dict[str, torch.Tensor]:
    """Return tokens, which are also the labels."""
    tokens = ids(ROWS, LENGTH, WORDS)
    return {"input_ids": tokens, "labels": tokens.clone()}


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return the medians of both modes, and how far the losses of the steps differ."""
    small = FAMILIES[name]
    family = Family(small.model, small.config, small.layers, SIZES[name], batch)
    model, given = family.build(LAYERS)
    program = fxpart.compile(
        model, "local:2", example_kwargs=given, constraints={"stages": 2}, microbatches=4,
        check="off",
    )  # fmt: skip
    trainers = {
        "eager": program.trainer("adamw"),
        "compiled": program.trainer("adamw", compile_stages=True),
    }
    seconds: dict[str, list[float]] = {mode: [] for mode in trainers}
    losses: dict[str, list[float]] = {mode: [] for mode in trainers}
    for turn in range(rounds + 2):
        for mode, trainer in trainers.items():
            start = time.perf_counter()
            losses[mode].append(float(trainer.step(given)))
            if turn > 1:
                seconds[mode].append(time.perf_counter() - start)
    found = trainers["compiled"].compiled
    for trainer in trainers.values():
        trainer.close()
    eager, compiled = (statistics.median(seconds[mode]) for mode in ("eager", "compiled"))
    pairs = zip(losses["eager"], losses["compiled"], strict=True)
    return {
        "eager_seconds": round(eager, 4),
        "compiled_seconds": round(compiled, 4),
        "speedup": round(eager / compiled, 2),
        "loss_difference": max(abs(a - b) / abs(a) for a, b in pairs),
        "graphs": found.graphs if found else 0,
        "breaks": dict(found.breaks) if found else {},
    }


def main() -> None:
    """Measure and write."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    write("compiled_stages", {name: measure(name, options.rounds) for name in SIZES}, options)


if __name__ == "__main__":
    main()
