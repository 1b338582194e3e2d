"""An action made ready to run, and what is done around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fxpart.errors import FxpartError, Problem
from fxpart.runtime.batch.symbolic_shapes import Sizes
from fxpart.runtime.executor.routes import Arrival
from fxpart.schedule.action import Action


@dataclass(frozen=True)
class StepInput:
    """One step's input, cut into microbatches.

    inputs: per microbatch the user's tensors by name. sizes: per microbatch the size of each
    symbol. weights: each microbatch's share of the batch. keys: what seeds its random ops.
    """

    inputs: Sequence[Mapping[str, torch.Tensor]]
    sizes: Sequence[Sizes]
    weights: Sequence[float]
    keys: Sequence[int]


@dataclass(frozen=True)
class StageFailure:
    """What went wrong in a stage, and where."""

    rank: int
    action: Action
    cause: Exception

    def problem(self, fix: str, of: str = "") -> Problem:
        """What every rank is told of it: FXP504, or what fxpart itself has found.

        fix: what to do about an exception of the user's. of: what the microbatch is one of.
        """
        where = (
            f"rank {self.rank}, stage {self.action.stage}, action {self.action}, "
            f"microbatch {self.action.microbatch}{of}"
        )
        if isinstance(self.cause, FxpartError):
            first = self.cause.problems[0]
            return Problem(first.code, f"{where}: {first.where}", first.why, first.fix)
        return Problem("FXP504", where, f"{type(self.cause).__name__}: {self.cause}", fix)


@dataclass(frozen=True, slots=True)
class Instruction:
    """An action made ready: what it awaits, what it does, what it does after a failure."""

    action: Action
    awaits: tuple[Arrival, ...]
    do: Callable[[], None]
    drain: Callable[[], None]


@dataclass(frozen=True)
class BackwardHooks:
    """What is done around a stage's backwards; each is called with the stage.

    last: the last action of a step that adds to its gradients begins. after: one is over. skip:
    the last one will not be done, after a failure.
    """

    last: Callable[[int], None]
    after: Callable[[int], None]
    skip: Callable[[int], None]


def add_backward_hooks(
    instruction: Instruction, around: BackwardHooks, *, ends: bool
) -> Instruction:
    """A backward and what is done around it; ends: it is the stage's last one of the step."""
    inner, empty, stage = instruction.do, instruction.drain, instruction.action.stage

    def do() -> None:
        if ends:
            around.last(stage)
        inner()
        around.after(stage)

    def drain() -> None:
        empty()
        if ends:
            around.skip(stage)

    return replace(instruction, do=do, drain=drain)
