"""Stages of one host timed as they run: each microbatch through all of them, one after the other.

A stage that is trained by itself, again and again, finds its weights and code in caches that it
shares with nobody; so timed, the pieces of a model take some percent less than the whole. As ranks
of one host they share them: half a model beside the other half takes what half of the whole does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fxpart.costmodels.profile_store import TIMED
from fxpart.profiling.stage_run import StageRun, Values

_WARM = 1  # steps that are not counted
_MOST = 15  # steps that are, in a turn
LEAST_STEPS = 3  # in the first turn
LEAST = TIMED * (_WARM + LEAST_STEPS)  # microbatches that a stage runs at least


@dataclass(frozen=True)
class StageSamples:
    """Seconds of a stage, one entry a step: of a microbatch's forward (the mean of all), of the
    first microbatch's backward, of a later one's, of the update.

    A first microbatch's backward makes the gradients, a later one's adds to them.
    """

    forward: tuple[float, ...]
    first: tuple[float, ...]
    later: tuple[float, ...]
    optimizer: tuple[float, ...]


@dataclass
class _Step:
    """What one stage took in one step."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    update: float = 0.0


class Rotation:
    """Consecutive stages of a program on this device, that train together."""

    def __init__(self, runs: Sequence[StageRun], inputs: Sequence[Values]) -> None:
        """inputs: of each microbatch of a step, with what stages before these make of it."""
        self._runs, self._inputs = list(runs), inputs
        self._gradients: list[list[torch.Tensor] | None] = [None] * len(self._runs)

    def samples(self, seconds: float, least: int = LEAST_STEPS) -> list[StageSamples]:
        """By stage: steps until ``seconds`` are over, ``least`` at least."""
        end = time.perf_counter() + seconds
        kept: list[list[_Step]] = []
        for number in range(_WARM + _MOST):
            if number >= _WARM + least and time.perf_counter() > end:
                break
            kept.append(self.step())
        return [_samples(steps) for steps in zip(*kept[_WARM:], strict=True)]

    def step(self) -> list[_Step]:
        """The microbatches and the updates, from gradients of zero; what each stage took.

        After a single one it comes once more, so that there is one that adds to gradients.
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
            # The same in all steps; made when the first cell says of which shapes they are.
            gradients = self._gradients[place] or run.gradients(cells[-1])
            self._gradients[place] = gradients

            start = run.now()
            cell = cells.pop()
            if run.table.trains:
                run.backward(cell, gradients, 1 / len(self._inputs))
            del cell  # what it still holds is freed here
            found[place].backward.append(run.now() - start)


def _samples(steps: Sequence[_Step]) -> StageSamples:
    return StageSamples(
        tuple(sum(step.forward) / len(step.forward) for step in steps),
        tuple(step.backward[0] for step in steps),
        tuple(step.backward[-1] for step in steps),
        tuple(step.update for step in steps),
    )
