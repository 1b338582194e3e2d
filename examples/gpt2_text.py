"""A GPT-2 of ten million parameters learns the Python standard library's own source text.

Alone it trains in one process; under ``torchrun --nproc-per-node 4`` the same file trains on four.
Text is read as bytes from the running installation, so nothing is downloaded.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fxpart

BATCH, LENGTH = 8, 64


def model() -> GPT2LMHeadModel:
    """GPT-2 over bytes: 8 layers of width 320, random weights from a fixed seed."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=320, n_layer=8, n_head=5,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def text(limit: int = 4_000_000) -> torch.Tensor:
    """The first ``limit`` bytes of the standard library's modules, in alphabetical order."""
    data = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        data += path.read_bytes()
        if len(data) >= limit:
            break
    return torch.frombuffer(data[:limit], dtype=torch.uint8).long()


def batches(seed: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Endless batches of [BATCH, LENGTH] bytes; labels are the inputs (the model shifts them)."""
    source, generator = text(), torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(source) - LENGTH, (BATCH,), generator=generator)
        rows = torch.stack([source[s : s + LENGTH] for s in starts.tolist()])
        yield {"input_ids": rows, "labels": rows}


def workload() -> fxpart.Workload:
    """What ``fxpart plan``, ``verify`` and ``train`` are given: model, example and data."""
    return fxpart.Workload(model=model(), example=next(batches()), data=batches)


def main(steps: int = 40) -> None:
    """Plan for four ranks and train."""
    data = batches()
    program = fxpart.compile(model(), "local:4", example_kwargs=next(data))
    trainer = program.trainer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    for step in range(steps):
        loss = trainer.step(next(data))
        if trainer.rank == 0:
            print(f"step {step:2d}  loss {loss.item():.4f}", flush=True)
    trainer.close()


if __name__ == "__main__":
    main()
