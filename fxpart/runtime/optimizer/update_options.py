"""The options of parameter groups (learning rate, momentum, weight decay) per update.

In an asynchronous pipeline the update of a minibatch runs several calls after the minibatch was
submitted, and at a different time on each stage. Options that are set between two calls of ``step``
apply from the update of the next minibatch on, on every stage, as in plain PyTorch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from fxpart.errors import FxpartError, error
from fxpart.runtime.optimizer.facade import OptimizerFacade
from fxpart.runtime.weight_prediction.future_options import (
    FutureOptions,
    Options,
    convert_to_plain_value,
    has_argument_free_step,
    plain_options,
)

_NO_OPTIONS = ("params", "param_names")


class UpdateOptions:
    """Records the options of an optimizer's groups for each update, for the stages' optimizers.

    source: represents the stages' optimizers for the user and schedulers. scheduler: of ``source``,
    stepped once per submitted update; None if there is none or the user steps it. digest: of all
    changes so far, equal on ranks with the same changes.
    """

    def __init__(
        self,
        source: OptimizerFacade,
        make_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    ) -> None:
        """make_scheduler: creates one for ``source``. FXP115 if its step needs an argument."""
        self.source = source
        self.digest = 0
        self._seen = copy_options(source)
        self._changes: list[tuple[int, list[Options]]] = []  # (First update, changed options).
        self._first = 0  # Index of the first change; older ones are applied everywhere.
        self.scheduler: LRScheduler | None = None
        self._coming = FutureOptions(source, None)
        if make_scheduler is not None:
            self.use_scheduler(make_scheduler(source))
        self._submitted = -1  # The newest submitted update.

    def use_scheduler(self, scheduler: LRScheduler | None) -> None:
        """Step this scheduler of ``source`` from now on; FXP115 if its step needs an argument."""
        if scheduler is not None and not has_argument_free_step(scheduler):
            raise _needs_argument(scheduler)
        self.scheduler = scheduler
        self._coming = FutureOptions(self.source, scheduler)

    def submit(self, update: int, done: int) -> None:
        """Record that the minibatch of this update is submitted.

        done: updates that every stage of this process has made.
        """
        self.record(update)
        self._submitted = update
        if self.scheduler is not None:
            self.scheduler.step()
            self.record(update + 1)
        self._forget(done)

    def record(self, update: int) -> None:
        """Record changes since the last call, which apply from this update on."""
        now = self.source.param_groups
        if all(map(_same, now, self._seen)):
            return
        found = copy_options(self.source)
        changed = [
            {k: v for k, v in group.items() if k not in seen or not _equal(v, seen[k])}
            for group, seen in zip(found, self._seen, strict=True)
        ]
        text = repr(
            (
                update,
                [sorted((k, convert_to_plain_value(v)) for k, v in g.items()) for g in changed],
            )
        )
        self.digest = zlib.crc32(text.encode(), self.digest)
        self._seen = found
        self._changes.append((update, changed))

    def apply(self, optimizer: torch.optim.Optimizer, update: int, applied: int) -> int:
        """Set the optimizer's options for an update. applied: the last result, or 0."""
        while applied < self._first + len(self._changes):
            first, changed = self._changes[applied - self._first]
            if first > update:
                break
            set_options(optimizer.param_groups, changed)
            applied += 1
        return applied

    def coming(
        self, optimizer: torch.optim.Optimizer, update: int, count: int, applied: int
    ) -> list[list[Options]]:
        """Return the plain options of each group at ``count`` updates from ``update`` on.

        Options of submitted updates are known; later ones are read from a copy of the scheduler.
        """
        now, found = plain_options(optimizer), []
        place = applied - self._first
        for number in range(update, update + count):
            while place < len(self._changes) and self._changes[place][0] <= number:
                changed = self._changes[place][1]
                now = [
                    {**group, **{k: convert_to_plain_value(v) for k, v in options.items()}}
                    for group, options in zip(now, changed, strict=True)
                ]
                place += 1
            beyond = number - self._submitted
            if beyond > 1 and self.scheduler is not None:
                found.append(self._coming.groups(beyond)[-1])
            else:
                found.append(now)
        return found

    def reload(self, update: int) -> None:
        """Reset after options were loaded into the stages' optimizers. update: the next one."""
        self.source.reload()
        self._seen = copy_options(self.source)
        self._first += len(self._changes)
        self._changes.clear()
        self._submitted = update - 1
        self._coming.forget()

    @property
    def count(self) -> int:
        """Number of changes: the result of :meth:`apply` for an optimizer with all of them."""
        return self._first + len(self._changes)

    def _forget(self, done: int) -> None:
        """Discard changes that all stages have applied."""
        while self._changes and self._changes[0][0] < done:
            del self._changes[0]
            self._first += 1


class StageUpdateOptions(FutureOptions):
    """The options of one stage's optimizer: set for each update, known for future ones."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, options: UpdateOptions, update: Callable[[], int]
    ) -> None:
        """update: returns the number of the stage's next update."""
        super().__init__(optimizer, None)
        self._options = options
        self._update = update
        self._applied = options.count

    def apply(self) -> None:
        """Set the options for the stage's next update."""
        self._applied = self._options.apply(self.optimizer, self._update(), self._applied)

    def reload(self) -> None:
        """Reset after options were loaded into all stages' optimizers."""
        self._applied = self._options.count

    def groups(self, updates: int) -> list[list[Options]]:
        """Return the options as submitted, and then as the scheduler continues."""
        return self._options.coming(self.optimizer, self._update(), updates, self._applied)


def copy_options(optimizer: torch.optim.Optimizer) -> list[Options]:
    """Return the options of each group, with tensors copied."""
    return [
        {k: _copy(v) for k, v in group.items() if k not in _NO_OPTIONS}
        for group in optimizer.param_groups
    ]


def set_options(groups: Sequence[dict[str, Any]], options: Sequence[Options]) -> None:
    """Set options of groups, with tensors copied."""
    for group, new in zip(groups, options, strict=True):
        group.update({k: _copy(v) for k, v in new.items()})


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _same(group: Options, seen: Options) -> bool:
    return all(k in _NO_OPTIONS or (k in seen and _equal(v, seen[k])) for k, v in group.items())


def _equal(one: Any, other: Any) -> bool:
    if one is other and not isinstance(one, torch.Tensor):
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and torch.equal(one.detach(), other.detach())
        )
    return bool(one == other)


def _needs_argument(scheduler: LRScheduler) -> FxpartError:
    name = type(scheduler).__name__
    return error(
        "FXP115",
        where=f"scheduler {name}",
        why="its step needs an argument, but each update steps it without one",
        fix=f"create {name} with trainer.optimizer and step it in your own loop",
    )
