"""The largest stable step on a one-dimensional quadratic whose gradients come late.

    python tests/support/delayed_quadratic.py

writes the table into fxpart/docs/asynchronous_training.md.

Real predictors on real optimizers: every element of one vector is a quadratic of its own, all
operations being element-wise, so that one run tries a whole grid of steps.
"""

from __future__ import annotations

import math
import re
from collections import deque
from functools import cache
from pathlib import Path

import torch
from torch import nn

from fxpart.runtime.weight_prediction import make_predictor

PAGE = Path(__file__).parents[2] / "fxpart" / "docs" / "asynchronous_training.md"
DELAYS = (0, 1, 2, 3, 4, 7)
UPDATES, WINDOW = 1600, 160
# From grid point to grid point 0.4 % more: limits are found to that.
GRID = torch.logspace(math.log10(0.012), math.log10(4.5), 1480, dtype=torch.float64)


@cache
def largest_stable(rule: str, momentum: float, delay: int) -> float:
    """The largest lr * curvature below which nothing grows; rule "" for no prediction.

    The gradient of update u is that of what was predicted ``delay`` updates before it, as far
    ahead. Something grows where it is larger in the last updates than half as late.
    """
    weight = nn.Parameter(torch.ones_like(GRID))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
    look = make_predictor(rule or "linear", optimizer)
    waiting: deque[torch.Tensor] = deque()
    half, last = torch.zeros_like(GRID), torch.zeros_like(GRID)
    for update in range(UPDATES):
        waiting.append(look.predict(delay if rule else 0)[0].clone())
        read = waiting.popleft() if len(waiting) > delay else waiting[0]
        weight.grad = GRID * read
        if rule:
            look.before_update()
        optimizer.step()
        if rule:
            look.after_update()
        now = weight.detach().abs()
        if UPDATES // 2 - WINDOW <= update < UPDATES // 2:
            half = torch.maximum(half, now)
        elif update >= UPDATES - WINDOW:
            last = torch.maximum(last, now)
    stable = (last <= half) & last.isfinite()
    first = int((~stable).nonzero()[0])
    assert first > 0, "the grid begins above the limit"
    return float((GRID[first - 1] * GRID[first]).sqrt())


ROWS = (
    ("SGD, no momentum, no prediction", "", 0.0, 0),
    ("SGD, no momentum, linear", "linear", 0.0, 1),
    ("SGD, momentum 0.9, no prediction", "", 0.9, 0),
    ("SGD, momentum 0.9, linear", "linear", 0.9, 1),
    ("SGD, momentum 0.9, decaying", "decaying", 0.9, 1),
)


def table() -> str:
    """The limits as a table of Markdown, good to half a per cent."""
    lines = [
        "| staleness | " + " | ".join(map(str, DELAYS)) + " |",
        "|---" * (len(DELAYS) + 1) + "|",
    ]
    for name, rule, momentum, first in ROWS:
        cells = [f"{largest_stable(rule, momentum, d):.3g}" if d >= first else "" for d in DELAYS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """The page with its table of limits."""
    found, count = re.subn(r"\| staleness \|.*?\n(?=\n)", lambda _: table(), text, flags=re.DOTALL)
    assert count == 1
    return found


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
