"""Time all stages of a host together: each microbatch passes through all stages.

A stage that is trained alone has its weights and code in caches, so the times of stages add up to
some percent less than that of the whole model. Ranks of one host share caches, which is reproduced
by running all stages in rotation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fxpart.costmodels.profile_store import TIMED
from fxpart.profiling.stage_run import StageRun, Values

_WARM = 1  # Warm-up steps.
_MOST = 15  # Measured steps per turn.
LEAST_STEPS = 3  # In the first turn.
LEAST = TIMED * (_WARM + LEAST_STEPS)  # Minimum of microbatches that a stage runs.


@dataclass(frozen=True)
class StageSamples:
    """Seconds of a stage, with one entry per step.

    forward: mean over microbatches. first, later: backward of the first microbatch, which creates
    gradients, and of a later one, which adds to them. optimizer: update.
    """

    forward: tuple[float, ...]
    first: tuple[float, ...]
    later: tuple[float, ...]
    optimizer: tuple[float, ...]


@dataclass
class _Step:
    """Seconds of one stage in one step."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    update: float = 0.0


class Rotation:
    """Consecutive stages of a program that are trained together on this device."""

    def __init__(self, runs: Sequence[StageRun], inputs: Sequence[Values]) -> None:
        """inputs: values of each microbatch of a step, including outputs of earlier stages."""
        self._runs, self._inputs = list(runs), inputs
        self._gradients: list[list[torch.Tensor] | None] = [None] * len(self._runs)

    def samples(self, seconds: float, least: int = LEAST_STEPS) -> list[StageSamples]:
        """Run steps for ``seconds``, but at least ``least``; return the samples by stage."""
        end = time.perf_counter() + seconds
        kept: list[list[_Step]] = []
        for number in range(_WARM + _MOST):
            if number >= _WARM + least and time.perf_counter() > end:
                break
            kept.append(self.step())
        return [_samples(steps) for steps in zip(*kept[_WARM:], strict=True)]

    def step(self) -> list[_Step]:
        """Run all microbatches and updates with new gradients; return the seconds by stage.

        A single microbatch is repeated after the update, to time a backward that adds to
        gradients.
        """
        found = [_Step() for _ in self._runs]
        for run in self._runs:
            run.forget()
        for inputs in self._inputs:
            self._microbatch(inputs, found)
        for run, mine in zip(self._runs, found, strict=True):
            start = run.now()
            run.update()
            mine.update = run.now() - start
        if len(self._inputs) == 1:
            self._microbatch(self._inputs[0], found)
        return found

    def _microbatch(self, inputs: Values, found: Sequence[_Step]) -> None:
        values, cells = dict(inputs), []
        for run, mine in zip(self._runs, found, strict=True):
            start = run.now()
            cells.append(run.forward(values, train=True))
            mine.forward.append(run.now() - start)
            run.pass_on(cells[-1], values)
        for place in reversed(range(len(self._runs))):
            run = self._runs[place]
            # Equal in all steps; created when their shapes are known.
            gradients = self._gradients[place] or run.gradients(cells[-1])
            self._gradients[place] = gradients

            start = run.now()
            cell = cells.pop()
            if run.table.trains:
                run.backward(cell, gradients, 1 / len(self._inputs))
            del cell  # Free its tensors within the timed region.
            found[place].backward.append(run.now() - start)


def _samples(steps: Sequence[_Step]) -> StageSamples:
    return StageSamples(
        tuple(sum(step.forward) / len(step.forward) for step in steps),
        tuple(step.backward[0] for step in steps),
        tuple(step.backward[-1] for step in steps),
        tuple(step.update for step in steps),
    )
