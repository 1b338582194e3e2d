"""Python's garbage-collection frequency during capture and planning."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 50_000  # allocations minus deallocations; Python's default is 700 or 2,000


@contextmanager
def reduce_garbage_collection() -> Iterator[None]:
    """Run garbage collection less often inside this context manager or decorated function.

    Tracing allocates millions of objects beside the half million of torch's modules; scanning them
    took a fifth of the compile time of a small model. The previous threshold is restored
    afterwards. Nothing changes if collection is off or already less frequent.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < EVERY:
        yield
        return
    gc.set_threshold(EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
