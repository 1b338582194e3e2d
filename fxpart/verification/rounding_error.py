"""Measure how much rounding changes a single-process run.

If ranks share an op, or parallel branches read one value, sums are computed in another order, so
results differ in their last bits. The acceptable part of this difference is measured on a single
process in two ways; a difference passes if either covers it:

Perturbation: how much results change if each weight moves to a neighboring float. Some models
amplify the last bit, such as the gradient of a fused bias whose key part is zero except for
rounding, which AdamW scales to a full step, or batch statistics over few rows.

Double precision: the distance between float32 and float64 results. A sum of many terms that cancel
(the gradient of a bias over all rows) is wrong in more than its last bits, and differs in another
order even if perturbed weights do not show it. A distance above LIMIT does not count, because the
runs then diverged for other reasons and an error could hide there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpart.verification.float64 import Float64Mode, to_float64
from fxpart.verification.single_process import SingleProcessTrainer

RUNS = 2  # perturbed runs; the largest change counts
FACTOR = 4.0  # safety factor for another sample of the same rounding
LIMIT = 1e-4  # larger distances from double precision do not count

Convert = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class RoundingBounds:
    """Largest relative change over the steps by name, in the Euclidean norm, times FACTOR."""

    loss: float = 0.0
    gradient: dict[str, float] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)

    def covers(self, name: str, gradient: float, parameter: float, tolerance: float) -> bool:
        """Return whether both differences are within the tolerance or within these bounds."""
        return gradient <= max(tolerance, self.gradient.get(name, 0.0)) and parameter <= max(
            tolerance, self.state.get(name, 0.0)
        )


def measure_rounding(
    make: Callable[[Convert | None], SingleProcessTrainer],
    leaves: Callable[[], list[Any]],
    steps: int,
    relative: Callable[[torch.Tensor | None, torch.Tensor | None], float],
) -> Iterator[RoundingBounds]:
    """Compare a single process with perturbed runs, then with a double-precision run.

    make: returns a new process with converted state. leaves: the batch's tensors. relative: the
    measure of a difference. Yield the bounds known after each; the second run happens only on
    demand. The second is omitted if double precision is meaningless: a model with values below
    float32, one entirely in float64, or one that cannot run in it.
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
    """Extend the bounds by the differences between two runs, up to the limit."""

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
    """Run the process in double precision; return None if that is meaningless or impossible."""
    try:
        process = make(to_float64)
        if all(process.state[n].dtype == t.dtype for n, t in process.captured.state.items()):
            return None
        return _run(process, lambda: [to_float64(leaf) for leaf in leaves()], steps, Float64Mode)
    except Exception:  # custom ops may raise anything on other dtypes
        return None


def nudge(process: SingleProcessTrainer, seed: int) -> None:
    """Move each parameter element to a neighboring float, up or down at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in process.captured.parameters:
            tensor = process.state[name]
            ups = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor)
            tensor.copy_(torch.nextafter(tensor, tensor + (2 * ups - 1) * (1 + tensor.abs())))


@dataclass(frozen=True)
class SingleProcessRun:
    """A run. steps: loss and gradients of each step. state: the final state."""

    steps: list[tuple[torch.Tensor, dict[str, torch.Tensor]]]
    state: dict[str, torch.Tensor]


def _run(
    process: SingleProcessTrainer,
    leaves: Callable[[], list[Any]],
    steps: int,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> SingleProcessRun:
    """Train. within: context of forward and backward."""
    found = []
    for _ in range(steps):
        with within():
            loss = process.backward(leaves())
        found.append((loss, process.gradients()))
        process.update()
    return SingleProcessRun(found, process.state)
