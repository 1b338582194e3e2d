"""What rank processes run for the runtime's tests: each returns plain data to compare."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from hand_stages import ADAMW, Hand, batch, language

from fxpart.runtime import Trainer, connect
from fxpart.runtime.transport import Transport

Bits = dict[str, bytes]


def bits(tensors: dict[str, torch.Tensor]) -> Bits:
    """Tensors as bytes, so that equality is equality of bits."""
    return {name: t.detach().contiguous().numpy().tobytes() for name, t in tensors.items()}


def make(hand: Hand, transport: Transport, **options: Any) -> Trainer:
    """A trainer of this process's stages, stage i on rank i."""
    given: dict[str, Any] = {"microbatches": 4, "optimizer": ADAMW, **options}
    modules = {i: stage for i, stage in enumerate(hand.stages) if i in transport.local}
    return Trainer(
        hand.spec(), modules, ranks=range(len(hand.stages)), transport=transport, **given
    )


def train(
    cut: tuple[int, ...],
    shapes: tuple[tuple[int, int], ...],
    options: dict[str, Any],
    model: dict[str, Any],
) -> tuple[list[bytes], Bits, bytes]:
    """Train :func:`hand_stages.language`; losses, final state, last norm. On ranks or in process."""
    trainer = make(language(cut, **model), connect(len(cut)), **options)
    losses = []
    for seed, (rows, length) in enumerate(shapes):
        losses.append(trainer.step(batch(rows, length, seed)).numpy().tobytes())
    norm = trainer.last_grad_norm
    state = bits(trainer.state_dict())
    return losses, state, b"" if norm is None else norm.numpy().tobytes()


def world() -> tuple[int, int]:
    """Rank and number of ranks."""
    return dist.get_rank(), dist.get_world_size()
