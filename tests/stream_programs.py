"""What rank processes and tests run of streams: each returns plain data to compare."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from hand_stages import ADAMW, Hand, batch, language
from runtime_programs import Bits, bits

from fxpart.runtime import InProcess, Trainer, connect
from fxpart.runtime.stream import StreamTrainer
from fxpart.runtime.transport import Transport

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW, "nadam": partial(torch.optim.NAdam, lr=0.01)}


def make(
    hand: Hand, transport: Transport, optimizer: str = "sgd", **options: Any
) -> StreamTrainer | Trainer:
    """A trainer of this process's stages, stage i on rank i; without ``weights`` a plain one."""
    kind = StreamTrainer if "weights" in options else Trainer
    modules = {i: stage for i, stage in enumerate(hand.stages) if i in transport.local}
    ranks = range(len(hand.stages))
    given = {"microbatches": 2, "optimizer": OPTIMIZERS[optimizer], **options}
    return kind(hand.spec(), modules, ranks=ranks, transport=transport, **given)


def losses_of(trainer: StreamTrainer | Trainer, batches: list[Any]) -> list[bytes]:
    """Of all batches, in order."""
    found = [trainer.step(each) for each in batches]
    found += trainer.drain() if isinstance(trainer, StreamTrainer) else []
    return [loss.numpy().tobytes() for loss in found if loss is not None]


def train(
    cut: tuple[int, ...], steps: int, model: dict[str, Any], options: dict[str, Any], here: bool
) -> tuple[list[bytes], Bits]:
    """Train :func:`hand_stages.language`, on ranks or (``here``) in this process."""
    transport = InProcess(len(cut)) if here else connect(len(cut))
    trainer = make(language(cut, **model), transport, **options)
    losses = losses_of(trainer, [batch(seed=seed) for seed in range(steps)])
    state = bits(trainer.state_dict())
    return losses, state
