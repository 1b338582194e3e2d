"""What every public call of a trainer begins and ends with, whichever class defines it.

The modes of torch around it are checked (:mod:`fxpart.runtime.ambient`), and the other ranks can
see which call this one is in (:mod:`fxpart.runtime.watch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

from fxpart.errors import FxpartError
from fxpart.runtime.agreement import AgreedError
from fxpart.runtime.ambient import Ambient, Kind
from fxpart.runtime.watch.calls import calls

T = TypeVar("T")

ENTRY_POINTS = {
    "step": Kind.TRAIN,
    "feed": Kind.TRAIN,
    "backward": Kind.TRAIN,
    "fit": Kind.TRAIN,
    "update": Kind.UPDATE,
    "finish": Kind.UPDATE,
    "eval_step": Kind.EVALUATE,
    "evaluate": Kind.EVALUATE,
    "predict": Kind.EVALUATE,
    "gradients": Kind.STATE,
    "load_checkpoint": Kind.STATE,
    "load_optimizer_state_dict": Kind.STATE,
    "load_state_dict": Kind.STATE,
    "optimizer_state_dict": Kind.STATE,
    "report": Kind.STATE,
    "save_checkpoint": Kind.STATE,
    "save_pretrained": Kind.STATE,
    "settle": Kind.STATE,
    "state_dict": Kind.STATE,
}

# Every rank raises these, or the rank that is to blame is named already.
_SHARED = ("FXP501", "FXP503", "FXP504", "FXP514", "FXP515")


class EntryPoints:
    """A trainer, each of whose public calls checks its surroundings and announces itself."""

    ambient: Ambient

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap the entry points that the class defines or overrides."""
        super().__init_subclass__(**options)
        for name, kind in ENTRY_POINTS.items():
            if name in vars(cls):
                setattr(cls, name, entry_point(name, kind, vars(cls)[name]))

    def is_collective(self, name: str) -> bool:
        """Whether every rank has to make the call."""
        return True


def entry_point(name: str, kind: Kind, method: Callable[..., T]) -> Callable[..., T]:
    """The method of a trainer, with what it begins and ends with."""
    shown = f"trainer.{name}"

    @wraps(method)
    def call(self: EntryPoints, *args: Any, **kwargs: Any) -> T:
        announced = announced_call(shown) if self.is_collective(name) else nullcontext()
        with announced, self.ambient.enter(kind, shown) or nullcontext():
            return method(self, *args, **kwargs)

    return call


@contextmanager
def announced_call(name: str) -> Iterator[None]:
    """The other ranks can see that this one is in the call, and what it raises."""
    outermost = not calls.name
    if outermost:
        calls.begin(name)
    try:
        yield
    except BaseException as cause:
        if outermost and not is_shared(cause):
            calls.fail(cause)
        raise
    finally:
        if outermost:
            calls.end()


def is_shared(cause: BaseException) -> bool:
    """Whether the other ranks know of the exception without being told."""
    return isinstance(cause, AgreedError) or (
        isinstance(cause, FxpartError) and cause.code in _SHARED
    )
