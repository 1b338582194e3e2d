"""Run several ranks or stages in one thread, each until it has to wait for another."""

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
    """Advance all iterators in round-robin order; return those left when none makes progress.

    progress: returns a value that changes with any activity of the given run. after: called after
    each turn.
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
