"""How far one process is from itself: what rounding makes of a run that has no fault.

Where ranks share an op, or branches that run side by side read one value, sums are made in another
order, so that results differ in their last bits. What of that is no fault of a partition is
measured on one process, in two ways; a difference passes where either covers it:

* nudged: how much it changes when each weight moves to a neighbouring float. Some models make much
  of the last bit: the gradient of a fused bias whose keys' part is zero but for rounding, which
  AdamW scales to a full step; batch statistics over few rows.
* in double precision: how far its float32 numbers are from its float64 numbers. A sum of many terms
  that cancel (the gradient of a bias, over all rows) is wrong in more than its last bits, and
  differently so in another order, which need not show when weights move. A distance above LIMIT
  does not count: then the two runs have parted for other reasons, and a fault could hide there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpart.verification.float64 import Float64Mode, to_float64
from fxpart.verification.single_process import SingleProcessTrainer

RUNS = 2  # nudged runs; the largest change of them counts
FACTOR = 4.0  # by which another sample of the same rounding may be larger
LIMIT = 1e-4  # a larger distance from double precision says nothing

Convert = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class RoundingBounds:
    """Per name the largest relative change over the steps, in the Euclidean norm, times FACTOR."""

    loss: float = 0.0
    gradient: dict[str, float] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)

    def covers(self, name: str, gradient: float, parameter: float, tolerance: float) -> bool:
        """Whether both differences are within the tolerance or within this."""
        return gradient <= max(tolerance, self.gradient.get(name, 0.0)) and parameter <= max(
            tolerance, self.state.get(name, 0.0)
        )


def measure_rounding(
    make: Callable[[Convert | None], SingleProcessTrainer],
    leaves: Callable[[], list[Any]],
    steps: int,
    relative: Callable[[torch.Tensor | None, torch.Tensor | None], float],
) -> Iterator[RoundingBounds]:
    """Train one process nudged, then in double precision, and compare with it as it is.

    make: a fresh process, its state converted. leaves: the batch's tensors. relative: the measure
    of a difference. Gives what is known after each; the second run is made only when asked for.
    Nothing more comes where double precision says nothing: a model with values of fewer bits than
    float32 or all of them in float64, or one that cannot run so.
    """
    found = RoundingBounds()
    plain = _run(make(None), leaves, steps)
    for seed in range(1, RUNS + 1):
        process = make(None)
        nudge(process, seed)
        _widen(found, plain, _run(process, leaves, steps), relative, float("inf"))
    yield found
    exact = _in_double(make, leaves, steps)
    if exact is not None:
        _widen(found, plain, exact, relative, LIMIT)
        yield found


def _widen(
    known: RoundingBounds,
    plain: SingleProcessRun,
    other: SingleProcessRun,
    relative: Callable[[torch.Tensor | None, torch.Tensor | None], float],
    limit: float,
) -> None:
    """Add what tells the other run from the plain one; not what is above limit."""

    def add(table: dict[str, float], changes: dict[str, float]) -> None:
        for name, change in changes.items():
            if change <= limit:
                table[name] = max(table.get(name, 0.0), FACTOR * change)

    gradients: dict[str, float] = {}
    losses = {"": 0.0}
    for (loss, mine), (loss2, theirs) in zip(plain.steps, other.steps, strict=True):
        losses[""] = max(losses[""], relative(loss2, loss))
        for name, gradient in mine.items():
            change = relative(theirs.get(name), gradient)
            gradients[name] = max(gradients.get(name, 0.0), change)
    largest = {"": known.loss}
    add(largest, losses)
    known.loss = largest[""]
    add(known.gradient, gradients)
    add(known.state, {n: relative(other.state[n], t) for n, t in plain.state.items()})


def _in_double(
    make: Callable[[Convert | None], SingleProcessTrainer],
    leaves: Callable[[], list[Any]],
    steps: int,
) -> SingleProcessRun | None:
    """The process in double precision, None where that says nothing or cannot be."""
    try:
        process = make(to_float64)
        if all(process.state[n].dtype == t.dtype for n, t in process.captured.state.items()):
            return None
        return _run(process, lambda: [to_float64(leaf) for leaf in leaves()], steps, Float64Mode)
    except Exception:  # ops of the user's may raise anything on dtypes they never saw
        return None


def nudge(process: SingleProcessTrainer, seed: int) -> None:
    """Move each element of each parameter to a neighbouring float, up or down at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in process.captured.parameters:
            tensor = process.state[name]
            ups = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor)
            tensor.copy_(torch.nextafter(tensor, tensor + (2 * ups - 1) * (1 + tensor.abs())))


@dataclass(frozen=True)
class SingleProcessRun:
    """A run. steps: loss and gradients of each. state: what it ended with."""

    steps: list[tuple[torch.Tensor, dict[str, torch.Tensor]]]
    state: dict[str, torch.Tensor]


def _run(
    process: SingleProcessTrainer,
    leaves: Callable[[], list[Any]],
    steps: int,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> SingleProcessRun:
    """Train. within: what forward and backward run in."""
    found = []
    for _ in range(steps):
        with within():
            loss = process.backward(leaves())
        found.append((loss, process.gradients()))
        process.update()
    return SingleProcessRun(found, process.state)
