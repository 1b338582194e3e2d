"""A recommender on click logs: 26 sparse tables, a dense tower, and how well it ranks (AUC).

The model is a small DLRM (Naumov et al., 2019): an EmbeddingBag for each kind of id, a tower over
the numbers, products of all pairs of vectors, a tower over these. Only the rows that a batch names
get gradients. The click logs are written here, from a fixed seed and a rule that can be learnt:
whether somebody clicks depends on hidden tastes of ids, alone and in pairs.

``python examples/recommender.py`` runs two ranks in one process, the tables on the first;
``torchrun --nproc-per-node 2 examples/recommender.py`` each in its own. ``--weights spectrain``
trains the same as a stream that never drains.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fxpart

TABLES, NUMBERS, DIM = 26, 13, 16
SIZES = tuple(int(10 ** (1.5 + 2.5 * k / (TABLES - 1))) for k in range(TABLES))  # 31 to 10,000 ids
BATCH = 256
CLICK = np.dtype([("numbers", "f4", NUMBERS), ("ids", "i4", TABLES), ("click", "f4")])


class Recommender(nn.Module):
    """From numbers [rows, 13] and ids [rows, 26] to the logit of a click for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(size, DIM, mode="sum", sparse=True) for size in SIZES
        )
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.05)
        self.bottom = nn.Sequential(
            nn.Linear(NUMBERS, 64), nn.ReLU(), nn.Linear(64, DIM), nn.ReLU()
        )
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(
            nn.Linear(DIM + pairs, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )
        self.register_buffer("pairs", torch.triu_indices(TABLES + 1, TABLES + 1, 1))

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logits [rows]."""
        bags = [table(ids[:, k : k + 1]) for k, table in enumerate(self.tables)]
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *bags], dim=1)
        products = torch.bmm(vectors, vectors.mT)[:, self.pairs[0], self.pairs[1]]
        logits: torch.Tensor = self.top(torch.cat([dense, products], dim=1)).squeeze(1)
        return logits


class Auc:
    """The share of pairs of a click and no click that the logits put in the right order.

    Equal logits count half (the Mann-Whitney statistic). A metric of ``trainer.evaluate``.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self._scores: list[np.ndarray] = []
        self._clicks: list[np.ndarray] = []

    def update(self, logits: torch.Tensor, batch: Any) -> None:
        """Logits and clicks of one batch; the clicks are its last tensor."""
        self._scores.append(logits.detach().double().numpy())
        self._clicks.append(batch[-1].numpy() > 0)

    def compute(self) -> float:
        """Of all batches."""
        scores, clicks = np.concatenate(self._scores), np.concatenate(self._clicks)
        _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
        ranks = (np.cumsum(count) - (count - 1) / 2)[place]
        ones, zeros = int(clicks.sum()), int((~clicks).sum())
        return float((ranks[clicks].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def write_logs(path: Path, rows: int, seed: int = 0) -> Path:
    """A file of so many impressions (NumPy, no pickle). The rule is the same for every seed."""
    rule, draw = np.random.default_rng(7), np.random.default_rng(seed)
    tastes = [rule.normal(0, 0.45, size) for size in SIZES]
    partner = [rule.normal(0, 0.6, (size, 2)) for size in SIZES]
    slope = rule.normal(0, 0.3, NUMBERS)
    found = np.zeros(rows, CLICK)
    found["numbers"] = draw.normal(0, 1, (rows, NUMBERS))
    for k, size in enumerate(SIZES):  # a few ids are common, most are rare
        found["ids"][:, k] = np.minimum(size * draw.random(rows) ** 3, size - 1)
    logit = found["numbers"] @ slope - 0.8
    for k in range(TABLES):
        logit += 0.5 * tastes[k][found["ids"][:, k]]
    for k in range(0, TABLES - 1, 2):
        first, second = found["ids"][:, k], found["ids"][:, k + 1]
        logit += 0.5 * (partner[k][first] * partner[k + 1][second]).sum(1)
    found["click"] = draw.random(rows) < 1 / (1 + np.exp(-logit))
    np.save(path, found, allow_pickle=False)
    return path


def batches(path: Path, rows: int = BATCH) -> Iterator[tuple[torch.Tensor, ...]]:
    """Numbers, ids and clicks, in the order of the file."""
    log = np.load(path, mmap_mode="r", allow_pickle=False)
    for first in range(0, len(log) - rows + 1, rows):
        part = log[first : first + rows]
        ids = torch.from_numpy(part["ids"].astype(np.int64))
        numbers, clicks = (torch.from_numpy(part[k].copy()) for k in ("numbers", "click"))
        yield numbers, ids, clicks


def model() -> Recommender:
    """Random weights from a fixed seed."""
    torch.manual_seed(0)
    return Recommender()


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    """Takes sparse and dense gradients alike."""
    return torch.optim.Adagrad(parameters, lr=0.03)


def program(path: Path, weights: str = "") -> fxpart.Program:
    """Two ranks, planned from one batch; weights: of a stream that does not drain."""
    return fxpart.compile(
        model(),
        "local:2",
        example_inputs=next(batches(path)),
        loss=nn.functional.binary_cross_entropy_with_logits,
        optimizer=adagrad,
        microbatches=4,
        constraints={"mesh": "none", "stages": 2},
        **({"mode": "async", "weights": weights} if weights else {}),
    )


def main(rows: int = 64 * BATCH, weights: str = "") -> dict[str, float]:
    """Write logs, train over them once, and rank new ones; AUC before and after, rows a second."""
    with tempfile.TemporaryDirectory() as folder:
        train = write_logs(Path(folder) / "train.npy", rows)
        new = write_logs(Path(folder) / "new.npy", 16 * BATCH, seed=1)
        made = program(train, weights)
        trainer = made.trainer(adagrad)
        before = trainer.evaluate(batches(new), metrics={"auc": Auc()})
        began = time.perf_counter()
        trainer.fit(lambda: batches(train))
        seconds = time.perf_counter() - began
        after = trainer.evaluate(batches(new), metrics={"auc": Auc()})
        found = {
            "auc_before": before["auc"],
            "auc": after["auc"],
            "loss": after["loss"],
            "rows_a_second": rows / seconds,
        }
        if trainer.rank == 0:
            for stage in made.plan.stages:
                print(f"stage {stage.index} on ranks {stage.ranks}: {stage.label}")
            print(
                f"AUC {before['auc']:.4f} -> {after['auc']:.4f}, loss {after['loss']:.4f}, "
                f"{found['rows_a_second']:,.0f} rows a second",
                flush=True,
            )
        trainer.close()
    return found


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rows", type=int, default=64 * BATCH)
    options.add_argument("--weights", default="", help="of a stream, such as spectrain")
    given = options.parse_args()
    main(given.rows, given.weights)
