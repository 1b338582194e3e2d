"""One generation of a run whose number of ranks changes: what the ranks of the pool call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxpart.checkpoint.reader import Checkpoint
from fxpart.checkpoint.regions import make_full_region
from fxpart.training.trainer_factory import load_trainer

ROWS, WIDTH, KINDS = 24, 16, 8
EPOCH = 64  # batches of the runs that have epochs


class Net(nn.Module):
    """Eight layers and tied embeddings: something to cut, and something that is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(KINDS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, KINDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def model() -> Net:
    """The same weights each time."""
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step, counted from 0."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, KINDS, (ROWS,), generator=draw)
    # What cannot be learned keeps the loss away from 0, near which any rounding is large.
    noise = torch.randint(0, 3, (ROWS,), generator=draw)
    return ids, (ids * 3 + noise) % KINDS


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer, with two slots for each parameter."""
    return torch.optim.AdamW(parameters, lr=3e-3)


def one_process(steps: int, epoch: int = 1 << 60) -> list[float]:
    """The losses of plain torch, and nothing else. epoch: batches, after which they come again."""
    net, losses = model(), []
    optimizer = adamw(net.parameters())
    for step in range(steps):
        ids, targets = batch(step % epoch)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(ids), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def generation(
    program: str, weights: str, root: str, proof: str, first: int, stop: int
) -> list[float]:
    """Go on from the newest checkpoint in ``root``, save what was loaded, train, and save."""
    trainer: Any = load_trainer(program, adamw, weights=weights)
    if first:
        trainer.load_checkpoint(root)
        trainer.save_checkpoint(proof)
    assert trainer.updates == first
    losses = [float(trainer.step(batch(step))) for step in range(first, stop)]
    trainer.save_checkpoint(root)
    return losses


def differences(one: Path, other: Path) -> list[str]:
    """Keys of model and optimizer that two checkpoints do not have alike, to the bit."""
    first, second = Checkpoint.open(one), Checkpoint.open(other)
    left, right = first.manifest, second.manifest
    found = [k for k in left.values if k[:6] != "random" and left.values[k] != right.values.get(k)]
    for key in sorted({*left.tensors, *right.tensors}):
        if key.startswith("random/"):
            continue
        a, b = left.tensors.get(key), right.tensors.get(key)
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            found.append(key)
        elif (
            first.read(key, make_full_region(a.shape)).tobytes()
            != second.read(key, make_full_region(b.shape)).tobytes()
        ):
            found.append(key)
    assert not left.step or any(key.startswith("optimizer/") for key in left.tensors)
    return found


def planned_by_rank_0(refused: bool) -> list[Any]:
    """The plan's stages and who was there, or the codes of what rank 0 raised."""
    from dataclasses import replace

    import sample_plans

    from fxpart.elastic.plan_broadcast import broadcast_plan
    from fxpart.environment import read_launch
    from fxpart.errors import FxpartError, error

    found = read_launch()
    assert found is not None
    hosts: list[str] = []

    def make(names: Any) -> Any:
        assert found.rank == 0, "nobody else plans"
        hosts.extend(names)
        if refused:
            raise error("FXP204", where="rank 1", why="too large", fix="")
        return sample_plans.plan(found.world)

    try:
        # The pool keeps its store itself, as torchrun's agent does.
        plan = broadcast_plan(replace(found, keeps_store=True), make, timeout=30)
    except FxpartError as fault:
        return [fault.code, fault.problems[0].why]
    return [len(plan.stages), plan.dumps() == sample_plans.plan(found.world).dumps(), len(hosts)]
