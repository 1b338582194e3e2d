"""Training with hybrid sharding and in one process: two accumulated batches per update, clipped."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

import fxpart
from fxpart import Program

RATE, NORM, UPDATES = 1e-2, 0.3, 3
OPTIMIZER = partial(torch.optim.AdamW, lr=RATE, eps=1e-3)
HYBRID = {"mesh": "dp=4", "stages": 1, "shard_degree": 2}


class Net(nn.Module):
    """Products whose sizes do not divide by two, a norm, and a number without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 7)
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.down(torch.relu(self.norm(self.up(x)))) * self.scale, y)


def make_net() -> Net:
    """The model with its first weights."""
    torch.manual_seed(0)
    return Net()


def batch(seed: int) -> dict[str, torch.Tensor]:
    """16 rows."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(16, 6, generator=generator),
        "y": torch.randn(16, 7, generator=generator),
    }


def compiled(plan: str = "", cluster: str = "local:4", **constraints: Any) -> Program:
    """The model planned for four ranks and two microbatches; plan: text of a plan to apply."""
    options: dict[str, Any] = {"plan": fxpart.Plan.loads(plan)} if plan else {
        "cluster": cluster, "microbatches": 2, "constraints": constraints,
    }  # fmt: skip
    return fxpart.compile(make_net(), example_kwargs=batch(0), check="off", **options)


def train(program: Program, updates: int = UPDATES) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of all batches, and the parameters after the updates."""
    trainer = program.trainer(OPTIMIZER, clip_norm=NORM)
    losses = []
    for update in range(updates):
        for half in (0, 1):
            losses.append(float(trainer.backward(batch(2 * update + half)).detach()))
        trainer.update()
    state = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    trainer.close()
    return losses, state


def train_on_rank(plan: str, weights: dict[str, list[Any]]) -> tuple[list[float], float]:
    """On each rank of a pool: losses, and the largest difference of the state from ``weights``."""
    torch.set_num_threads(1)
    losses, state = train(compiled(plan))
    return losses, max(
        float((state[name] - torch.tensor(value)).abs().max()) for name, value in weights.items()
    )


def train_plainly() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same in one process with PyTorch alone."""
    model = make_net()
    optimizer = OPTIMIZER(model.parameters())
    losses = []
    for update in range(UPDATES):
        optimizer.zero_grad()
        for half in (0, 1):
            loss = model(**batch(2 * update + half))
            (loss / 2).backward()
            losses.append(float(loss.detach()))
        norm = nn.utils.clip_grad_norm_(model.parameters(), NORM)
        assert norm > NORM, "clipping has an effect"
        optimizer.step()
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}
