"""Tasks without downloads: digits, click logs of a known model, source text, small images.

Fixed splits into training, validation and test, the same for every seed. A seed draws the initial
weights and the batches.
"""

from __future__ import annotations

import hashlib
import math
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from benchmarks.stalebench import models
from benchmarks.stalebench.models import Layer
from torch import Tensor
from torch.nn import functional

Data = tuple[Tensor, Tensor]
_SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Task:
    """Something to learn.

    layers: of the model. splits: inputs and targets by split. rows: of a batch. steps: updates of
    a run. rates: per optimizer the middle of the first three learning rates.
    chance: loss of a guess. data: description. score: "accuracy" or "AUC". length: of a window of
    a text.
    """

    name: str
    layers: Callable[[], list[Layer]]
    splits: Callable[[], Mapping[str, Data]]
    rows: int
    steps: int
    rates: Mapping[str, float]
    chance: float
    data: str
    score: str = "accuracy"
    length: int = 0

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of each run."""
        if self.score == "AUC":
            each = functional.binary_cross_entropy_with_logits(
                outputs[..., 0], targets, reduction="none"
            )
        else:
            flat = functional.cross_entropy(
                outputs.flatten(0, -2), targets.flatten(), reduction="none"
            )
            each = flat.view(targets.shape)
        return each.flatten(1).mean(1)

    def draw(self, seed: int) -> Callable[[], Data]:
        """Return a function that returns the next batch of a seed."""
        inputs, targets = self.splits()["train"]
        generator = torch.Generator().manual_seed(1000 + seed)
        order: list[Tensor] = []

        def batch() -> Data:
            if self.length:
                starts = torch.randint(
                    0, len(inputs) - self.length, (self.rows,), generator=generator
                )
                return windows(inputs, starts, self.length)
            if not order:  # A remainder waits for the next order.
                every = torch.randperm(len(inputs), generator=generator)
                order.extend(every[: len(every) // self.rows * self.rows].split(self.rows))
            pick = order.pop()
            return inputs[pick], targets[pick]

        return batch


def windows(of: Tensor, starts: Tensor, length: int) -> Data:
    """Return symbols from each start, and those that follow them."""
    taken = of[starts[:, None] + torch.arange(length + 1)].long()
    return taken[:, :-1], taken[:, 1:]


def areas(scores: Tensor, labels: Tensor) -> list[float]:
    """Return the area under the ROC curve of each run. labels: of all runs, 0 or 1."""
    found = []
    for each in scores:
        ranks = torch.empty(len(each), dtype=torch.float64)
        ranks[each.argsort()] = torch.arange(1.0, len(each) + 1, dtype=torch.float64)
        positive = labels > 0.5
        count = float(positive.sum())
        above = float(ranks[positive].sum()) - count * (count + 1) / 2
        found.append(above / (count * (len(each) - count)))
    return found


# -- digits ---------------------------------------------------------------------------------------


@cache
def digits() -> Mapping[str, Data]:
    """Return images (rows, 64) of mean 0 and deviation 1, and classes."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("the digits are scikit-learn's: pip install -e '.[bench]'")
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).flatten(1)
    images = (images - images.mean()) / images.std()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return split(images[order], torch.tensor(found.target)[order], (1200, 300, 297))


def split(inputs: Tensor, targets: Tensor, sizes: tuple[int, ...]) -> Mapping[str, Data]:
    """Return the splits of these sizes, one after another."""
    parts = zip(inputs.split(list(sizes)), targets.split(list(sizes)), strict=True)
    return dict(zip(_SPLITS, parts, strict=True))


# -- click logs -----------------------------------------------------------------------------------

FIELDS, IDS, CLICK_ROWS = 16, 200, 200_000


@cache
def click_model() -> tuple[Tensor, Tensor, Tensor]:
    """Return ids (rows, fields), true probabilities and labels.

    ids are drawn with p ~ rank^-1.1; the true logit is -1.5 + sum_f w_f[x_f] + 2 sum_(i<8)
    u_i[x_i] . u_(i+5)[x_(i+5)], with w and u in R^4 of deviation .35.
    """
    model, drawn = np.random.default_rng(0), np.random.default_rng(1)
    w = model.normal(0, 0.35, (FIELDS, IDS))
    u = model.normal(0, 0.35, (FIELDS, IDS, 4))
    share = np.arange(1, IDS + 1) ** -1.1
    x = drawn.choice(IDS, size=(CLICK_ROWS, FIELDS), p=share / share.sum())
    logit = -1.5 + sum(w[f, x[:, f]] for f in range(FIELDS))
    for i in range(8):
        logit = logit + 2 * (u[i, x[:, i]] * u[i + 5, x[:, i + 5]]).sum(1)
    true = 1 / (1 + np.exp(-logit))
    labels = drawn.random(CLICK_ROWS) < true
    return torch.tensor(x), torch.tensor(true), torch.tensor(labels)


@cache
def click_splits() -> Mapping[str, Data]:
    """Return ids, numbered through all fields, and labels."""
    x, _, labels = click_model()
    places = x + torch.arange(FIELDS) * IDS
    return split(places, labels.float(), (160_000, 20_000, 20_000))


@cache
def click_bound() -> tuple[float, float]:
    """Return log loss and AUC of the true probabilities on the test split."""
    _, true, labels = click_model()
    p, y = true[-20_000:], labels[-20_000:].double()
    loss = functional.binary_cross_entropy(p, y)
    return float(loss), areas(p[None], y)[0]


# -- source text ----------------------------------------------------------------------------------


@cache
def sources() -> Mapping[str, Data]:
    """Return the bytes of the standard library's modules, without tests, by a hash of the path."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: dict[str, bytearray] = {name: bytearray() for name in _SPLITS}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if {"test", "tests", "idlelib", "site-packages", "dist-packages"} & set(name.split("/")):
            continue
        bucket = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10
        parts[_SPLITS[max(0, bucket - 7)]] += path.read_bytes()
    found = {}
    for name, text in parts.items():
        every = torch.frombuffer(text, dtype=torch.uint8)
        starts = torch.linspace(0, len(every) - 66, 64).long()
        found[name] = (every, every) if name == "train" else windows(every, starts, 64)
    return found


def digest(of: Task) -> str:
    """Return the first digits of SHA-256 over the task's data."""
    made = hashlib.sha256()
    for inputs, targets in of.splits().values():
        made.update(inputs.numpy().tobytes())
        made.update(targets.numpy().tobytes())
    return made.hexdigest()[:16]


TASKS: Mapping[str, Task] = {
    each.name: each
    for each in (
        Task(
            "digits", models.mlp, digits, rows=32, steps=240, chance=math.log(10),
            rates={"sgd": 0.02, "adamw": 0.002, "muon": 0.01, "adagrad": 0.02},
            data="scikit-learn's digits (1,200 / 300 / 297), 16 residual blocks of width 32",
        ),
        Task(
            "clicks", lambda: models.clicks(FIELDS, IDS), click_splits, rows=128, steps=600,
            rates={"sgd": 0.05, "adamw": 0.002, "adagrad": 0.02},
            chance=0.5416, score="AUC",
            data="200,000 clicks on 16 fields of 200 ids from a known model"
            " (160,000 / 20,000 / 20,000), 8 residual blocks of width 32",
        ),
        Task(
            "images", models.cnn, digits, rows=32, steps=160, chance=math.log(10),
            rates={"sgd": 0.02, "adamw": 0.004, "muon": 0.01},
            data="the same digits, 16 residual convolutions of 16 channels",
        ),
        Task(
            "source", models.gpt, sources, rows=8, steps=240, chance=math.log(256), length=64,
            rates={"sgd": 0.1, "adamw": 0.002, "muon": 0.01},
            data="bytes of the standard library's modules by a hash of the path (80 / 10 / 10 %),"
            " windows of 64 bytes, 8 transformer blocks of width 160",
        ),
    )
}  # fmt: skip
