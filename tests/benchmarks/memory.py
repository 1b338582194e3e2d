"""Peak memory of ranks' processes, predicted and measured, over models and plans.

    python tests/benchmarks/memory.py

Six models, each planned for one rank and cut into two stages (ranks are processes of one thread
over gloo), take three steps. Before the trainer is made the process's resident set is its baseline,
which has what a rank does not need: the captured model itself. Measured is how far the peak lies
above that; predicted what the plan says of the rank's tensors. The peak of the whole process is
compared too, with the baseline that was measured. All of it once with glibc's malloc as it is,
which keeps freed tensors of less than 32 MiB in its heap, and once where it gives each back at
once (MALLOC_MMAP_THRESHOLD_). Prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import torch
from record import parser, write
from torch import nn
from torch.nn import functional as F

import fxpart
from fxpart.measuring.memory import baseline, warm
from fxpart.measuring.processes import together
from fxpart.runtime.footprint import Footprint

STEPS = 3
MIB = 2**20


class Blocks(nn.Module):
    """A pre-norm transformer encoder over tokens; the loss is next-token cross entropy."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(layers)
            )
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.blocks(self.embed(ids)))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())}


class Perceptron(nn.Module):
    """Wide layers on small rows: nearly all of its memory is weights and their state."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().mean()}


class Images(nn.Module):
    """A plain convolutional network with batch norm."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        sizes = [3, *([width] * layers)]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in pairwise(sizes)
            )
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.head(self.layers(x).mean((2, 3))).square().mean()}


class Sequences(nn.Module):
    """An LSTM over sequences."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.lstm(x)[0].square().mean()}


def _ids(rows: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, length))


# name: (model, batch, optimizer)
MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor, Any]]] = {
    "transformer": lambda: (Blocks(8000, 384, 6), _ids(8, 128, 8000), torch.optim.AdamW),
    "long": lambda: (Blocks(1000, 256, 4), _ids(4, 512, 1000), torch.optim.AdamW),
    "perceptron": lambda: (Perceptron(2048, 8), torch.randn(16, 2048), torch.optim.Adam),
    "momentum": lambda: (Perceptron(2560, 6), torch.randn(64, 2560), _momentum),
    "images": lambda: (Images(64, 8), torch.randn(8, 3, 64, 64), torch.optim.SGD),
    "sequences": lambda: (Sequences(512, 4), torch.randn(16, 64, 512), torch.optim.AdamW),
}


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def rank(mine: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """One rank's steps; predicted and measured bytes above its baseline."""
    torch.manual_seed(0)
    model, batch, optimizer = MODELS[payload["model"]]()
    program = fxpart.compile(
        model,
        f"local:{world}",
        example_inputs=(batch,),
        optimizer=optimizer,
        microbatches=payload["microbatches"],
        constraints={"dp": 1, "tp": 1, "stages": world},
    )
    entry = next(e for e in program.plan.prediction.ranks if mine in e.ranks)
    warm()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what planning has freed is no room for tensors
    footprint = Footprint()
    footprint.start()
    trainer = program.trainer(optimizer)
    for _ in range(STEPS):
        trainer.step((batch,))
    peaks = footprint.peaks()
    return {
        "baseline": peaks.baseline,
        "measured": peaks.peak - peaks.baseline,
        "predicted": entry.peak or entry.memory.total,
        "total": entry.memory.total,
        "parts": {
            name: getattr(entry.memory, name)
            for name in (
                "weights", "gradients", "optimizer", "activations", "buffers", "transfers"
            )
        },
    }  # fmt: skip


def main() -> None:
    """Measure all, print, and keep the figures."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--models", default=",".join(MODELS))
    options = options_parser.parse_args()
    rows = []
    names = options.models.split(",")
    for name, world, prompt in product(names, (1, 2), (False, True)):
        for variable in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
            os.environ.pop(variable, None)
            if prompt:
                os.environ[variable] = "65536"
        payload = {"model": name, "microbatches": 2 * world if name != "images" else 2}
        for mine, row in enumerate(together(world, "memory:rank", payload, 600.0)):
            error = row["predicted"] / row["measured"] - 1
            whole = (row["baseline"] + row["predicted"]) / (row["baseline"] + row["measured"])
            rows.append(
                {"model": name, "ranks": world, "rank": mine, "prompt": prompt, **row,
                 "error": error, "process_error": whole - 1}
            )  # fmt: skip
            print_row(rows[-1])
    figures = {
        "rows": rows,
        "bare_baseline": baseline(),
        **{
            name: summary([row for row in rows if row["prompt"] == prompt])
            for name, prompt in (("as_is", False), ("prompt", True))
        },
    }
    write("memory", figures, options)


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Errors over models and plans."""
    return {
        "median_error": statistics.median(abs(row["error"]) for row in rows),
        "worst_over": max(row["error"] for row in rows),
        "worst_under": min(row["error"] for row in rows),
        "worst_process_error": max((row["process_error"] for row in rows), key=abs),
    }


def print_row(row: dict[str, Any]) -> None:
    """One line for a person, on the way."""
    sys.stderr.write(
        f"{row['model']:12s} {row['ranks']} ranks, rank {row['rank']}"
        f"{', freed at once' if row['prompt'] else ''}: "
        f"predicted {row['predicted'] / MIB:7.1f} MiB (sum of parts {row['total'] / MIB:7.1f}), "
        f"measured {row['measured'] / MIB:7.1f}: {row['error']:+.1%}; "
        f"process {row['process_error']:+.1%}\n"
    )


if __name__ == "__main__":
    main()
