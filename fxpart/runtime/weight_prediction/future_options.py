"""Options of an optimizer's parameter groups at future updates, with any scheduler."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fxpart.compat import make_proxy_scheduler
from fxpart.errors import error

Options = dict[str, Any]  # of one parameter group, without parameters; numbers instead of tensors
_NO_OPTIONS = ("params", "param_names")


class FutureOptions:
    """Future options (lr, momentum, betas, ...) of the parameter groups.

    scheduler: stepped once after each update, or None if options are constant. A copy of it is
    stepped on a proxy of the optimizer, so neither changes. With a scheduler whose steps need
    unknown arguments (ReduceLROnPlateau), the options are treated as constant.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
        self.optimizer = optimizer
        self.scheduler = (
            scheduler if scheduler is not None and has_argument_free_step(scheduler) else None
        )
        self._key: object = None
        self._future: list[list[Options]] = []
        self._proxies: tuple[LRScheduler, torch.optim.Optimizer] | None = None

    def forget(self) -> None:
        """Invalidate the predicted options after an update."""
        self._key = None

    def groups(self, updates: int) -> list[list[Options]]:
        """Return the options of each group at the next ``updates`` updates."""
        now = plain_options(self.optimizer)
        if self.scheduler is None:
            return [now] * updates
        key = (now, getattr(self.scheduler, "last_epoch", None))
        if key != self._key:
            self._key, self._future, self._proxies = key, [now], None
        while len(self._future) < updates:
            self._future.append(self._step_proxy())
        return self._future[:updates]

    def _step_proxy(self) -> list[Options]:
        assert self.scheduler is not None
        if self._proxies is None:
            try:
                self._proxies = make_proxy_scheduler(self.scheduler)
            except Exception as cause:  # exceptions of user functions and attributes
                raise error(
                    "FXP109",
                    where=f"scheduler {type(self.scheduler).__name__}",
                    why=f"weight prediction needs a copy of it: {type(cause).__name__}: {cause}",
                    fix="use a scheduler that supports copy.deepcopy, or do not predict weights",
                ) from cause
        scheduler, optimizer = self._proxies
        scheduler.step()
        return plain_options(optimizer)


def plain_options(optimizer: torch.optim.Optimizer) -> list[Options]:
    """Return the options of each group, with one-element tensors as numbers."""
    return [
        {
            name: convert_to_plain_value(value)
            for name, value in group.items()
            if name not in _NO_OPTIONS
        }
        for group in optimizer.param_groups
    ]


def convert_to_plain_value(value: Any) -> Any:
    """Convert a one-element tensor to a number and others to lists, also in a tuple."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, tuple):
        return tuple(convert_to_plain_value(one) for one in value)
    return value


def has_argument_free_step(scheduler: LRScheduler) -> bool:
    """Return whether a scheduler's step needs no arguments."""
    needed = [
        p
        for p in inspect.signature(scheduler.step).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return not needed and not isinstance(scheduler, ReduceLROnPlateau)
