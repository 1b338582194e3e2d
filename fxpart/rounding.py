"""How far one process is from itself: what the last bit of its weights changes in a run.

Where ranks share an op, or branches that run side by side read one value, sums are made in another
order, so that results differ in their last bits.
A model may make much of that: the gradient of a fused bias whose keys' part is zero but for
rounding, which AdamW scales to a full step; batch statistics over few rows. What one process itself
changes by when each weight moves to a neighbouring float is then no fault of a partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpart.reference import OneProcess

RUNS = 2  # nudged runs; the largest change of them counts
FACTOR = 4.0  # by which another sample of the same rounding may be larger


@dataclass
class Rounding:
    """Per name the largest relative change over the steps, in the Euclidean norm, times FACTOR."""

    loss: float = 0.0
    gradient: dict[str, float] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)

    def covers(self, name: str, gradient: float, parameter: float, tolerance: float) -> bool:
        """Whether both differences are within the tolerance or within this."""
        return gradient <= max(tolerance, self.gradient.get(name, 0.0)) and parameter <= max(
            tolerance, self.state.get(name, 0.0)
        )


def rounding(
    make: Callable[[], OneProcess],
    leaves: Callable[[], list[Any]],
    steps: int,
    relative: Callable[[torch.Tensor | None, torch.Tensor | None], float],
) -> Rounding:
    """Train one process as it is and nudged, and compare.

    make: a fresh process. leaves: the batch's tensors. relative: the measure of a difference.
    """
    found = Rounding()
    plain = _run(make(), leaves, steps)
    for seed in range(1, RUNS + 1):
        process = make()
        nudge(process, seed)
        other = _run(process, leaves, steps)
        for (loss, gradients), (loss2, gradients2) in zip(plain[0], other[0], strict=True):
            found.loss = max(found.loss, FACTOR * relative(loss2, loss))
            for name, gradient in gradients.items():
                change = FACTOR * relative(gradients2.get(name), gradient)
                found.gradient[name] = max(found.gradient.get(name, 0.0), change)
        for name, tensor in plain[1].items():
            change = FACTOR * relative(other[1][name], tensor)
            found.state[name] = max(found.state.get(name, 0.0), change)
    return found


def nudge(process: OneProcess, seed: int) -> None:
    """Move each element of each parameter to a neighbouring float, up or down at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in process.captured.parameters:
            tensor = process.state[name]
            ups = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor)
            tensor.copy_(torch.nextafter(tensor, tensor + (2 * ups - 1) * (1 + tensor.abs())))


Steps = list[tuple[torch.Tensor, dict[str, torch.Tensor]]]


def _run(
    process: OneProcess, leaves: Callable[[], Iterable[Any]], steps: int
) -> tuple[Steps, dict[str, torch.Tensor]]:
    """Loss and gradients of each step, and the state at the end."""
    found = []
    for _ in range(steps):
        loss = process.backward(list(leaves()))
        found.append((loss, process.gradients()))
        process.update()
    return found, process.state
