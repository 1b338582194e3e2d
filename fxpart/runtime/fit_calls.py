"""User code of a run, and updates whose losses are known some calls later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

from fxpart.errors import FxpartError
from fxpart.runtime.batch.batch_iterator import call_user_function, make_user_error
from fxpart.runtime.training_run.run_digests import CompletedUpdate
from fxpart.runtime.transport.agreement import AllRanksError

if TYPE_CHECKING:
    from fxpart.runtime.trainer import Trainer

T = TypeVar("T")
NONE = object()  # The result of user code that is not called any more.


@dataclass
class PendingUpdate:
    """An update of a run, until the losses of all its batches are known.

    lr: learning rate of each parameter group. weights: sum of the batches' weights. left: batches
    with unknown losses. total: sum of the known losses, by weight. busy: nanoseconds of computation
    by rank, of each batch. done: its description, once all its batches are submitted.
    """

    lr: tuple[float, ...]
    rows: int = 0
    weights: float = 0.0
    left: int = 0
    total: float = 0.0
    busy: list[tuple[int, ...]] = field(default_factory=list)
    done: CompletedUpdate | None = None


class UserCalls:
    """Calls user code; an exception on one rank is raised on every rank.

    While minibatches are in flight, an exception aborts the training some calls later. Until then
    this rank repeats its last batch, and calls no more user code.
    """

    def __init__(self, trainer: Trainer) -> None:
        """trainer: of the run."""
        self._trainer = trainer
        self._aborted = False

    def call(self, what: str, do: Callable[[], T]) -> T:
        """Return the result of user code, NONE once the training is being aborted."""
        if self._aborted and what != "the batches":
            return cast(T, NONE)
        if not self._trainer.in_flight:
            return call_user_function(self._trainer.transport, what, do)
        try:
            return do()
        except AllRanksError:
            raise
        except Exception as cause:
            if isinstance(cause, FxpartError) and cause.code in ("FXP503", "FXP504"):
                raise
            self._trainer.pipeline.abort(make_user_error(what, cause))
            self._aborted = True
            return cast(T, NONE)
