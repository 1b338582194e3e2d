"""The options of parameter groups (rates, momentum, decay) by update, recorded on submission.

In an asynchronous pipeline the update of a minibatch runs calls after the minibatch was submitted,
and on each stage at another time. Options that are set between two calls of ``step`` count from the
update of the next minibatch on, on every stage: as in plain PyTorch.
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
    """Records the options of an optimizer's groups for each update, for optimizers of stages.

    source: shows the stages' optimizers to the user and schedulers. scheduler: of ``source``,
    stepped once for each update that is submitted; None where the user steps one, or none is
    wanted. digest: of all changes so far, equal on ranks that made the same.
    """

    def __init__(
        self,
        source: OptimizerFacade,
        make_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    ) -> None:
        """make_scheduler: makes one of ``source``. FXP115 for one whose step needs an argument."""
        self.source = source
        self.digest = 0
        self._seen = copy_options(source)
        self._changes: list[tuple[int, list[Options]]] = []  # (first update, what is set)
        self._first = 0  # number of the first of these; older ones are applied everywhere
        self.scheduler = None if make_scheduler is None else make_scheduler(source)
        if self.scheduler is not None and not has_argument_free_step(self.scheduler):
            raise _needs_argument(self.scheduler)
        self._coming = FutureOptions(source, self.scheduler)
        self._submitted = -1  # the newest update that was submitted

    def submit(self, update: int, done: int) -> None:
        """A minibatch is submitted, of which this is the update.

        done: updates that every stage of this process has made.
        """
        self.record(update)
        self._submitted = update
        if self.scheduler is not None:
            self.scheduler.step()
            self.record(update + 1)
        self._forget(done)

    def record(self, update: int) -> None:
        """What was changed since the last call counts from this update on."""
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
        """Set the optimizer's options for an update. applied: what the last call returned, or 0."""
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
        """The plain options of each group at so many updates, of which ``update`` is the first.

        Those that are submitted are known; further ones are read from a copy of the scheduler.
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
        """Options were loaded into the stages' optimizers; ``update`` is the next one."""
        self.source.reload()
        self._seen = copy_options(self.source)
        self._first += len(self._changes)
        self._changes.clear()
        self._submitted = update - 1
        self._coming.forget()

    @property
    def count(self) -> int:
        """Changes so far: what :meth:`apply` returns for an optimizer that has all of them."""
        return self._first + len(self._changes)

    def _forget(self, done: int) -> None:
        """Drop changes that all stages have applied."""
        while self._changes and self._changes[0][0] < done:
            del self._changes[0]
            self._first += 1


class StageUpdateOptions(FutureOptions):
    """The options of one stage's optimizer: set for each update, known for those to come."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, options: UpdateOptions, update: Callable[[], int]
    ) -> None:
        """update: the number of the stage's next update."""
        super().__init__(optimizer, None)
        self._options = options
        self._update = update
        self._applied = options.count

    def apply(self) -> None:
        """Set the options for the stage's next update."""
        self._applied = self._options.apply(self.optimizer, self._update(), self._applied)

    def reload(self) -> None:
        """The optimizer's options were loaded, and are those of all stages."""
        self._applied = self._options.count

    def groups(self, updates: int) -> list[list[Options]]:
        """As they were submitted, and as a scheduler goes on."""
        return self._options.coming(self.optimizer, self._update(), updates, self._applied)


def copy_options(optimizer: torch.optim.Optimizer) -> list[Options]:
    """The options of each group; tensors copied."""
    return [
        {k: _copy(v) for k, v in group.items() if k not in _NO_OPTIONS}
        for group in optimizer.param_groups
    ]


def set_options(groups: Sequence[dict[str, Any]], options: Sequence[Options]) -> None:
    """Set options of groups; tensors are copied."""
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
        why="its step needs an argument, and each update steps it without one",
        fix=f"make {name} of trainer.optimizer and step it in your own loop",
    )
