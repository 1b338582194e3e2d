"""Iterate over the user's batches; the end or a failure on one rank reaches all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from fxpart.diagnostics.exception_text import describe_exception
from fxpart.errors import FxpartError, error
from fxpart.runtime.transport.agreement import AllRanksError, agree, make_exception_problem
from fxpart.runtime.transport.interface import Transport

T = TypeVar("T")


def iterate_batches(transport: Transport, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches; FXP501 on every rank if one has more of them, FXP507 if reading fails.

    A rank reports the end or a failure in the agreement that the ranks make for the next batch
    anyway, so it costs nothing and no rank waits forever.
    """
    source = call_user_function(transport, "the batches", lambda: iter(batches))
    while True:
        batch = call_user_function(transport, "the batches", lambda: next(source, _END))
        if batch is _END:
            agree(transport, "the batches", lambda: (True, "the data has ended"))
            return
        yield batch


def call_user_function(transport: Transport, what: str, do: Callable[[], T]) -> T:
    """Call a user function; if it raises, raise FXP507 on every rank at the next agreement.

    do: may make collective calls; exceptions of those are raised unchanged.
    """
    try:
        return do()
    except AllRanksError:
        raise  # Every rank raises this exception already.
    except Exception as cause:
        if isinstance(cause, FxpartError) and cause.code in ("FXP503", "FXP504"):
            raise  # The connection is lost, so no rank can be reached.
        raise announce_exception(transport, what, cause) from cause


def announce_exception(transport: Transport, what: str, cause: Exception) -> FxpartError:
    """Report an exception of a user function to the other ranks at the next agreement."""
    if isinstance(cause, FxpartError):
        own = cause
    else:
        own = FxpartError(make_exception_problem(transport.local[0], what, cause))

    def report() -> tuple[bool, str]:
        raise own

    try:
        agree(transport, what, report)
    except FxpartError as reported:
        return reported
    raise AssertionError("the agreement raises the reported problem")


def make_user_error(what: str, cause: Exception) -> FxpartError:
    """Return the error that every rank raises for user code that failed on one of them."""
    if isinstance(cause, FxpartError):
        return cause
    fix = "fix the error there; every rank has stopped this run"
    return error("FXP507", where=what, why=describe_exception(cause), fix=fix)


_END = object()
