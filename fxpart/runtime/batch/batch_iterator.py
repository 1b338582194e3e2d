"""The user's batches one by one: where they end, or fail on one rank, all ranks hear of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from fxpart.errors import FxpartError
from fxpart.runtime.transport.agreement import AllRanksError, agree, make_exception_problem
from fxpart.runtime.transport.interface import Transport

T = TypeVar("T")


def iterate_batches(transport: Transport, batches: Iterable[Any]) -> Iterator[Any]:
    """The batches; FXP501 on every rank where one has more of them, FXP507 where reading fails.

    What a rank has to say takes the place of the next batch, which the ranks compare anyway: it
    costs nothing, and none waits in vain.
    """
    source = call_user_function(transport, "the batches", lambda: iter(batches))
    while True:
        batch = call_user_function(transport, "the batches", lambda: next(source, _END))
        if batch is _END:
            agree(transport, "the batches", lambda: (True, "the data has ended"))
            return
        yield batch


def call_user_function(transport: Transport, what: str, do: Callable[[], T]) -> T:
    """The user's own function; if it raises, FXP507 on every rank, at what they compare next.

    do: may make calls of all ranks; what such a call raises is raised as it is.
    """
    try:
        return do()
    except AllRanksError:
        raise  # every rank has it
    except Exception as cause:
        if isinstance(cause, FxpartError) and cause.code in ("FXP503", "FXP504"):
            raise  # a connection is lost: there is nobody to tell
        raise announce_exception(transport, what, cause) from cause


def announce_exception(transport: Transport, what: str, cause: Exception) -> FxpartError:
    """Tells the other ranks, at what they compare next, that the user's own function has raised."""
    if isinstance(cause, FxpartError):
        own = cause
    else:
        own = FxpartError(make_exception_problem(transport.local[0], what, cause))

    def tell() -> tuple[bool, str]:
        raise own

    try:
        agree(transport, what, tell)
    except FxpartError as told:
        return told
    raise AssertionError("a problem was told")


_END = object()
