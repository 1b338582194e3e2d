"""A recommender's first layers, whose rows have the same bits however a batch is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn

import fxpart
from fxpart.api import Program
from fxpart.optim import RowWiseAdagrad

ROWS = {"bags.weight": 22, "ids.weight": 16}
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "adagrad": partial(torch.optim.Adagrad, lr=0.3),
    "sparseadam": partial(torch.optim.SparseAdam, lr=0.1),
    "rowwise": partial(RowWiseAdagrad, lr=0.3),
}
# It changes other rows than those that a batch reads.
MOMENTUM = {"momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9)}

DATA = (("input:*", "dp:S(0)"),)
ROWS_OF = {axis: tuple((name, f"{axis}:S(0)") for name in ROWS) for axis in ("dp", "tp")}
SENT = DATA + ROWS_OF["dp"]
# name -> ranks, annotations, constraints
WAYS: dict[str, tuple[int, tuple[Any, ...], tuple[Any, ...]]] = {
    "stages": (2, (), (("stages", 2),)),
    "data": (2, (), (("mesh", "dp=2"), ("stages", 1))),
    "data, zero 1": (2, (), (("mesh", "dp=2"), ("stages", 1), ("zero", 1))),
    "data, zero 2": (2, (), (("mesh", "dp=2"), ("stages", 1), ("zero", 2))),
    "data and stages": (4, (), (("mesh", "dp=2"), ("stages", 2))),
    "rows": (2, ROWS_OF["tp"], (("mesh", "tp=2"), ("stages", 1))),
    "data and rows": (4, DATA + ROWS_OF["tp"], (("mesh", "dp=2,tp=2"), ("stages", 1))),
    "rows sent": (2, SENT, (("mesh", "dp=2"), ("stages", 1))),
    "rows sent, stages": (4, SENT, (("mesh", "dp=2"), ("stages", 2))),
}


class Clicks(nn.Module):
    """Two tables; all else works row by row. Its weights are frozen where ``trained`` is False.

    again: the second table is read once more, behind everything else.
    """

    def __init__(
        self, *, trained: bool = False, again: bool = False, mode: str = "sum",
        weighted: bool = False, padding: int | None = 3,
    ) -> None:  # fmt: skip
        super().__init__()
        self.bags = nn.EmbeddingBag(22, 4, mode=mode, sparse=True, padding_idx=padding)
        self.ids = nn.Embedding(16, 4, sparse=True, padding_idx=padding)
        self.first = nn.Parameter(torch.rand(4) + 0.5, requires_grad=trained)
        self.second = nn.Parameter(torch.rand(4) + 0.5, requires_grad=trained)
        self.again, self.weighted = again, weighted

    def forward(
        self, bags: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, clicks: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """bags [n, 2] and their shares, ids [n, 2], clicks [n]; the loss."""
        found = self.bags(bags, per_sample_weights=shares if self.weighted else None)
        found = found * self.first
        x = self.ids(ids)
        found = (found + x[:, 0] + x[:, 1]) * self.second
        if self.again:
            found = found * self.ids(ids[:, 0])
        # sums and functions of vectors may be rounded otherwise where there are fewer rows
        score = found[:, 0] + found[:, 1] + found[:, 2] + found[:, 3]
        return {"loss": ((score - clicks) * (score - clicks)).mean()}


def batch(seed: int, rows: int = 16, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Ids come again and again, within microbatches and over them."""
    g = torch.Generator().manual_seed(seed)
    return {
        "bags": torch.randint(0, 22, (rows, 2), generator=g),
        "ids": torch.randint(0, 16, (rows, 2), generator=g) % 9,
        "shares": torch.rand(rows, 2, generator=g).to(dtype),
        "clicks": torch.rand(rows, generator=g).to(dtype),
    }


def model(dtype: torch.dtype = torch.float32, **options: Any) -> Clicks:
    """Seeded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Clicks(**options).to(dtype)


@cache
def program(
    optimizer: str, ranks: int, cuts: tuple[tuple[str, str], ...], constraints: tuple[Any, ...],
    **options: Any,
) -> Program:  # fmt: skip
    """Compiled for a mesh. cuts: annotations. constraints: pairs."""
    made = model(**options)
    given = dict(constraints) | ({"placements": "annotated"} if cuts else {})
    return fxpart.compile(
        fxpart.annotate(made, dict(cuts)) if cuts else made, f"local:{ranks}",
        example_inputs=batch(0, dtype=made.first.dtype), microbatches=4,
        optimizer=(OPTIMIZERS | MOMENTUM).get(optimizer, optimizer), constraints=given,
    )  # fmt: skip


def alone(
    made: Clicks,
    make: Callable[[Any], torch.optim.Optimizer],
    seeds: Sequence[int],
    change: Callable[[Clicks], object] = lambda made: None,
) -> dict[str, torch.Tensor]:
    """Plain torch: microbatches one by one, their gradients added up. change: before each step."""
    optimizer = make([p for p in made.parameters() if p.requires_grad])
    for seed in seeds:
        step_alone(made, optimizer, seed, change)
    return {name: p.detach() for name, p in made.named_parameters()}


def step_alone(
    made: Clicks,
    optimizer: torch.optim.Optimizer,
    seed: int,
    change: Callable[[Clicks], object] = lambda made: None,
) -> None:
    """One step of it."""
    whole = batch(seed, dtype=made.first.dtype)
    for part in zip(*(t.chunk(4) for t in whole.values()), strict=True):
        loss = made(**dict(zip(whole, part, strict=True)))["loss"]
        loss.backward(torch.full_like(loss, 0.25))
    change(made)
    optimizer.step()
    optimizer.zero_grad()


def trained(made: Program, seeds: Sequence[int], **how: Any) -> dict[str, torch.Tensor]:
    """The same through a trainer."""
    trainer = made.trainer(**how)
    try:
        for seed in seeds:
            trainer.step(batch(seed))
        found: dict[str, torch.Tensor] = trainer.state_dict()
        return found
    finally:
        trainer.close()


def made(way: str, optimizer: str, **options: Any) -> Program:
    """The program of one of the plans of WAYS."""
    ranks, cuts, constraints = WAYS[way]
    return program(optimizer, ranks, cuts, constraints, **options)
