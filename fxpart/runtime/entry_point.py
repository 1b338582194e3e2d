"""The wrapper of all public calls of a trainer, whichever class defines them.

It checks torch's active modes (:mod:`fxpart.runtime.torch_modes`), and announces the current call
to the other ranks (:mod:`fxpart.runtime.heartbeat`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

from fxpart.errors import FxpartError, error
from fxpart.runtime.heartbeat.call_tracker import calls
from fxpart.runtime.torch_modes import TorchModes, TrainerCallKind
from fxpart.runtime.transport.agreement import AllRanksError

T = TypeVar("T")

ENTRY_POINTS = {
    "step": TrainerCallKind.TRAIN,
    "submit": TrainerCallKind.TRAIN,
    "backward": TrainerCallKind.TRAIN,
    "fit": TrainerCallKind.TRAIN,
    "update": TrainerCallKind.UPDATE,
    "finish": TrainerCallKind.UPDATE,
    "eval_step": TrainerCallKind.EVALUATE,
    "evaluate": TrainerCallKind.EVALUATE,
    "predict_with_loss": TrainerCallKind.EVALUATE,
    "predict": TrainerCallKind.EVALUATE,
    "generate": TrainerCallKind.EVALUATE,
    "activation_statistics": TrainerCallKind.EVALUATE,
    "ema_state_dict": TrainerCallKind.STATE,
    "gradients": TrainerCallKind.STATE,
    "load_checkpoint": TrainerCallKind.STATE,
    "load_optimizer_state_dict": TrainerCallKind.STATE,
    "load_state_dict": TrainerCallKind.STATE,
    "optimizer_state_dict": TrainerCallKind.STATE,
    "report": TrainerCallKind.STATE,
    "save_checkpoint": TrainerCallKind.STATE,
    "save_pretrained": TrainerCallKind.STATE,
    "settle": TrainerCallKind.STATE,
    "state_dict": TrainerCallKind.STATE,
}

# Every rank raises these, or they name the failed rank.
_SHARED = ("FXP501", "FXP503", "FXP504", "FXP514", "FXP515")


class EntryPoints:
    """A trainer whose public calls check torch's modes and announce themselves."""

    ambient: TorchModes
    closed = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap the entry points that the class defines or overrides."""
        super().__init_subclass__(**options)
        for name, kind in ENTRY_POINTS.items():
            if name in vars(cls):
                setattr(cls, name, wrap_entry_point(name, kind, vars(cls)[name]))

    def is_collective(self, name: str) -> bool:
        """Return whether every rank has to make the call."""
        return True


def wrap_entry_point(
    name: str, kind: TrainerCallKind, method: Callable[..., T]
) -> Callable[..., T]:
    """Return the method of a trainer with checks and announcement."""
    shown = f"trainer.{name}"

    @wraps(method)
    def call(self: EntryPoints, *args: Any, **kwargs: Any) -> T:
        if self.closed and kind is not TrainerCallKind.STATE:
            fix = "create another trainer of the program: program.trainer(...)"
            raise error("FXP109", where=shown, why="the trainer was closed", fix=fix)
        announced = announce_call(shown) if self.is_collective(name) else nullcontext()
        with announced, self.ambient.enter(kind, shown) or nullcontext():
            return method(self, *args, **kwargs)

    return call


@contextmanager
def announce_call(name: str) -> Iterator[None]:
    """Announce to the other ranks that this rank is in the call, and any exception."""
    outermost = not calls.name
    if outermost:
        calls.begin(name)
    try:
        yield
    except BaseException as cause:
        if outermost and not is_known_to_all_ranks(cause):
            calls.fail(cause)
        raise
    finally:
        if outermost:
            calls.end()


def is_known_to_all_ranks(cause: BaseException) -> bool:
    """Return whether the other ranks know of the exception without a message."""
    return isinstance(cause, AllRanksError) or (
        isinstance(cause, FxpartError) and cause.code in _SHARED
    )
