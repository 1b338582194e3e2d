"""The options of an optimizer's parameter groups at its coming updates, through any scheduler."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fxpart.compat import make_proxy_scheduler
from fxpart.errors import error

Options = dict[str, Any]  # of one parameter group, without its parameters; numbers, no tensors
_NO_OPTIONS = ("params", "param_names")


class FutureOptions:
    """What the parameter groups' options (lr, momentum, betas, ...) will be.

    scheduler: stepped once after each update of the optimizer; None where the options stay. A copy
    of it is stepped on a stand-in for the optimizer, so that neither changes. One whose steps need
    to be told something that nobody knows yet (ReduceLROnPlateau) leaves the options as they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
        self.optimizer = optimizer
        self.scheduler = (
            scheduler if scheduler is not None and has_argument_free_step(scheduler) else None
        )
        self._key: object = None
        self._ahead: list[list[Options]] = []
        self._copy: tuple[LRScheduler, torch.optim.Optimizer] | None = None

    def forget(self) -> None:
        """Read the scheduler again at the next question: an update was made."""
        self._key = None

    def groups(self, updates: int) -> list[list[Options]]:
        """The options of each group at the next update, the one after it, ...: so many of them."""
        now = plain_options(self.optimizer)
        if self.scheduler is None:
            return [now] * updates
        key = (now, getattr(self.scheduler, "last_epoch", None))
        if key != self._key:
            self._key, self._ahead, self._copy = key, [now], None
        while len(self._ahead) < updates:
            self._ahead.append(self._next())
        return self._ahead[:updates]

    def _next(self) -> list[Options]:
        assert self.scheduler is not None
        if self._copy is None:
            try:
                self._copy = make_proxy_scheduler(self.scheduler)
            except Exception as cause:  # what the user's functions and attributes raise
                raise error(
                    "FXP109",
                    where=f"scheduler {type(self.scheduler).__name__}",
                    why=f"looking ahead needs a copy of it: {type(cause).__name__}: {cause}",
                    fix="a scheduler that copy.deepcopy can copy, or weights without prediction",
                ) from cause
        scheduler, optimizer = self._copy
        scheduler.step()
        return plain_options(optimizer)


def plain_options(optimizer: torch.optim.Optimizer) -> list[Options]:
    """The options of each group, one-element tensors as numbers."""
    return [
        {
            name: convert_to_plain_value(value)
            for name, value in group.items()
            if name not in _NO_OPTIONS
        }
        for group in optimizer.param_groups
    ]


def convert_to_plain_value(value: Any) -> Any:
    """A one-element tensor as a number, others as lists, also in a tuple."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, tuple):
        return tuple(convert_to_plain_value(one) for one in value)
    return value


def has_argument_free_step(scheduler: LRScheduler) -> bool:
    """Whether a scheduler's step needs no arguments."""
    needed = [
        p
        for p in inspect.signature(scheduler.step).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return not needed and not isinstance(scheduler, ReduceLROnPlateau)
