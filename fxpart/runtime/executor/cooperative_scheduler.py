"""Several ranks or stages in one thread: each goes on until it has to wait for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")


def run_cooperatively(
    runs: Mapping[T, Iterator[None]],
    progress: Callable[[T], object],
    *,
    after: Callable[[T], object] = id,
) -> list[T]:
    """Step each in turn until all are through; those that were left when none could go on.

    progress: of each something that changes with whatever it does. after: called after each turn.
    """
    left, done = dict(runs), object()
    while left:
        waiting = list(left)
        before = [progress(each) for each in waiting]
        for each in waiting:
            if next(left[each], done) is done:
                del left[each]
            after(each)
        if len(left) == len(waiting) and before == [progress(each) for each in waiting]:
            return waiting
    return []
