"""A prepared action, and the hooks around backwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from fxpart.diagnostics.exception_text import describe_exception
from fxpart.diagnostics.flight_recorder import Mark
from fxpart.errors import FxpartError, Problem
from fxpart.runtime.batch.symbolic_shapes import Sizes
from fxpart.schedule.action import Action


@dataclass(frozen=True)
class StepInput:
    """One step's input, split into microbatches.

    inputs: per microbatch the user's tensors by name. sizes: per microbatch the size of each
    symbol. weights: each microbatch's share of the batch. keys: per microbatch the seed of its
    random ops.
    """

    inputs: Sequence[Mapping[str, torch.Tensor]]
    sizes: Sequence[Sizes]
    weights: Sequence[float]
    keys: Sequence[int]


@dataclass(frozen=True)
class StageFailure:
    """An exception in a stage, and where it occurred."""

    rank: int
    action: Action
    cause: Exception

    def problem(self, fix: str, of: str = "") -> Problem:
        """Return the problem that every rank raises: FXP504, or that of an fxpart error.

        fix: for an exception of user code. of: suffix of the microbatch in the message.
        """
        where = (
            f"rank {self.rank}, stage {self.action.stage}, action {self.action}, "
            f"microbatch {self.action.microbatch}{of}"
        )
        if isinstance(self.cause, FxpartError):
            first = self.cause.problems[0]
            return Problem(first.code, f"{where}: {first.where}", first.why, first.fix)
        return Problem("FXP504", where, describe_exception(self.cause), fix)


class Inbox(Protocol):
    """The messages of one rank over one channel. source: the rank that sends them."""

    source: int

    def ready(self, index: int, /) -> bool:
        """Return whether the message can be taken without waiting."""


Arrival = tuple[Inbox, int, Any]  # The inbox, the place in it, and its content.


def do_nothing() -> None:
    """Do nothing: a transfer without tensors, or a backward without gradients."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """A prepared action.

    awaits: the messages that it waits for. do: its call. communicate: its call after a failure.
    mark: the event that is recorded before it.
    """

    action: Action
    awaits: Sequence[Arrival]
    do: Callable[[], None]
    communicate: Callable[[], None] = do_nothing
    mark: Mark | None = None


@dataclass(frozen=True)
class BackwardHooks:
    """Hooks around a stage's backwards; each is called with the stage.

    last: before the step's last action that adds to the gradients of the stage. after: after each
    backward. skip: the last action is skipped, after a failure.
    """

    last: Callable[[int], None]
    after: Callable[[int], None]
    skip: Callable[[int], None]


def add_backward_hooks(
    instruction: Instruction, hooks: BackwardHooks, *, ends: bool
) -> Instruction:
    """Return a backward with hooks; ends: it is the stage's last one of the step."""
    inner, inner_communicate, stage = (
        instruction.do,
        instruction.communicate,
        instruction.action.stage,
    )

    def do() -> None:
        if ends:
            hooks.last(stage)
        inner()
        hooks.after(stage)

    def communicate() -> None:
        inner_communicate()
        if ends:
            hooks.skip(stage)

    return replace(instruction, do=do, communicate=communicate)
