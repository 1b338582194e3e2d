"""Programs whose copies take microbatches from queues, and the same training in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from queued_batches import ROWS, adagrad, batch
from torch import nn

import fxpart
from fxpart.plan.model import Plan
from fxpart.planner.prediction.stage_replicas import StageReplicas, plan_replicas


class Clicks(nn.Module):
    """Two tables with sparse gradients, and layers that see their bags and the first's again."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, 6, mode="sum", sparse=True) for n in (11, 7))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        bags = [table(ids[:, 2 * k : 2 * k + 2]) for k, table in enumerate(self.tables)]
        first = x = torch.tanh(x + bags[0] * bags[1])
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        return self.head(x + first)


def model() -> Clicks:
    torch.manual_seed(0)
    return Clicks()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@cache
def plan(counts: tuple[int, ...] = (2, 1), microbatches: int = 4) -> Plan:
    """So many copies of each stage."""
    ranks = sum(counts)
    chain = fxpart.compile(
        model(), f"local:{ranks}", example_inputs=batch(), loss=nn.functional.cross_entropy,
        microbatches=microbatches, optimizer=adagrad,
        constraints={
            "mesh": "none", "stages": len(counts), "granularity": "op", "schedule": "1f1b",
        },
    ).plan  # fmt: skip
    rows = {row.stage: row for row in chain.prediction.ranks}
    groups, first = [], 0
    for stage, count in enumerate(counts):
        devices = tuple(range(first, first + count))
        groups.append(StageReplicas(devices, tuple(range(count)), (rows[stage],) * count))
        first += count
    return plan_replicas(chain, groups, 0.0)


def program(given: Plan) -> fxpart.Program:
    return fxpart.compile(
        model(), given.cluster, plan=given, example_inputs=batch(),
        loss=nn.functional.cross_entropy, optimizer=adagrad,
    )  # fmt: skip


def trainer(given: Plan, optimizer: Any = adagrad, **options: Any) -> Any:
    """From queues."""
    return program(given).trainer(optimizer, routing="queue", **options)


@cache
def alone(clip: float | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same steps without fxpart."""
    net = model()
    optimizer = adagrad(net.parameters())
    losses = []
    for step, rows in enumerate(ROWS):
        x, ids, y = batch(rows, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x, ids), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.layers.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: t.detach().clone() for name, t in net.state_dict().items()}


def touched(state: dict[str, torch.Tensor]) -> dict[str, list[bool]]:
    """Which rows of each table were ever updated."""
    before = model().state_dict()
    return {
        name: (state[name] != before[name]).any(1).tolist()
        for name in before
        if name.startswith("tables")
    }
