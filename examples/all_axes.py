"""Data, tensor, sequence and pipeline parallelism in one plan, from a handful of annotations.

A small Llama: each stage is a mesh of 2 x 2 ranks. The axis ``dp`` cuts the batch. The axis ``tp``
cuts attention by heads and the MLP by its inner width, as Megatron-LM does, the embedding and the
head by the vocabulary, and between these the sequence: what each half of a layer returns lies in
parts of the sequence, so that an all-reduce becomes a reduce-scatter and an all-gather. All else
follows. ``python examples/all_axes.py`` runs the eight ranks in one process, ``torchrun
--nproc-per-node 8`` (or 4: one stage) each in its own.
"""

from __future__ import annotations

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fxpart

BATCH, LENGTH = 8, 32
MESH = "dp=2,tp=2"
ANNOTATIONS = {
    "model.embed_tokens.weight": "tp:S(0)",
    "model.layers.*.self_attn.[qkv]_proj.weight": "tp:S(0)",
    "model.layers.*.self_attn.o_proj.weight": "tp:S(1)",
    "model.layers.*.mlp.gate_proj.weight": "tp:S(0)",
    "model.layers.*.mlp.up_proj.weight": "tp:S(0)",
    "model.layers.*.mlp.down_proj.weight": "tp:S(1)",
    "lm_head.weight": "tp:S(0)",
    # Sequence parallelism: these results lie in parts of the sequence.
    "module:model.embed_tokens": "tp:S(1)",
    "module:model.layers.*.self_attn": "tp:S(1)",
    "module:model.layers.*.mlp": "tp:S(1)",
}


def model() -> LlamaForCausalLM:
    """A Llama of four layers with grouped-query attention, random weights from a fixed seed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batches(steps: int) -> list[dict[str, torch.Tensor]]:
    """Random tokens, the same for every run."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(256, (steps, BATCH, LENGTH), generator=generator)
    return [{"input_ids": tokens, "labels": tokens} for tokens in drawn]


def program(ranks: int = 8) -> fxpart.Program:
    """The model annotated and compiled for so many ranks, four to a stage."""
    annotated = fxpart.annotate(model(), ANNOTATIONS)
    return fxpart.compile(
        annotated,
        f"local:{ranks}",
        example_kwargs=batches(1)[0],
        microbatches=2,
        constraints={"mesh": MESH, "stages": ranks // 4, "zero": 1},
    )


def main(steps: int = 10) -> list[float]:
    """Train and print the loss of each step; the losses."""
    compiled = program(int(os.environ.get("WORLD_SIZE", "8")))
    trainer = compiled.trainer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    losses = []
    for step, batch in enumerate(batches(steps)):
        losses.append(trainer.step(batch).item())
        if trainer.rank == 0:
            print(f"step {step:2d}  loss {losses[-1]:.4f}", flush=True)
    trainer.close()
    return losses


if __name__ == "__main__":
    main()
