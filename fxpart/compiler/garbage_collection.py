"""How often Python looks for garbage while a model is captured and planned."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 50_000  # objects made, less those freed; Python's own number is 700 or 2,000


@contextmanager
def reduce_garbage_collection() -> Iterator[None]:
    """Look for garbage less often than by default; it may decorate a function.

    Tracing makes millions of objects beside the half million of torch's modules, and looking
    through them again and again took a fifth of the time to compile a small model. As before
    afterwards; left alone where collection is off, or seldom already.
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
