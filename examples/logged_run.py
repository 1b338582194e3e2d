"""A run that tells: evaluation, a schedule of the learning rate, early stopping, and TensorBoard.

``python examples/logged_run.py runs/first`` trains three ranks in this process, ``torchrun
--nproc-per-node 3 examples/logged_run.py runs/first`` each in its own. ``tensorboard --logdir
runs`` shows what rank 0 wrote; ``runs/first/steps.jsonl`` holds the same numbers as lines of JSON,
which need no package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import fxpart
from fxpart.errors import FxpartError
from fxpart.runtime import (
    Callback,
    EarlyStopping,
    JsonLines,
    TensorBoardLogger,
    Trainer,
    no_decay,
)

MISSING = "TensorBoard is not installed (pip install tensorboard): steps.jsonl is written alone"


def callbacks(folder: Path, rank: int) -> list[Callback]:
    """The log in JSON, and TensorBoard's where it is installed."""
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    found: list[Callback] = [JsonLines(folder / "steps.jsonl")]
    try:
        found.append(TensorBoardLogger(folder))
    except FxpartError:
        if rank == 0:
            print(MISSING, file=sys.stderr)
    return found


def batches(count: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Points in the plane, and in which of four rings around the origin each lies."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        points = torch.rand(32, 2, generator=generator) * 2 - 1
        yield points, (points.norm(dim=1) * 4).long().clamp(max=3)


def accuracy(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The share of points whose ring is found."""
    return (outputs.argmax(1) == batch[1]).float().mean()


def trainer() -> Trainer:
    """An MLP on three stages; biases are not decayed."""
    torch.manual_seed(0)
    widths = [2, 64, 64, 64]
    hidden = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    program = fxpart.compile(
        nn.Sequential(*hidden, nn.Linear(64, 4)), "local:4",
        example_inputs=next(batches(1, 0)), loss=nn.functional.cross_entropy, microbatches=4,
        constraints={"stages": 3, "mesh": "none"},
    )  # fmt: skip
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    return program.trainer(optimizer, groups=no_decay(0.01), log_grad_norm=True)


def main(folder: str = "runs/first", steps: int = 120) -> dict[str, float]:
    """Train, and tell of it; the last evaluation."""
    made = trainer()
    fitted = made.fit(
        partial(batches, 40, 1),  # forty new objects to each epoch, the same points
        steps=steps,
        evaluate=partial(batches, 4, 2),
        every=20,
        metrics={"accuracy": accuracy},
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps),
        early_stopping=EarlyStopping("loss", patience=3),
        callbacks=callbacks(Path(folder), made.rank),
    )
    if made.rank == 0:
        found = ", ".join(f"{name} {value:.3f}" for name, value in fitted.values.items())
        print(f"{fitted.steps} steps ({fitted.why}): {found}")
    made.close()
    return dict(fitted.values)


if __name__ == "__main__":
    main(*sys.argv[1:2])
