"""Calls of torch.autograd.Function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def intercept_functions(handle: Callable[[type, tuple[Any, ...]], Any]) -> Iterator[None]:
    """Call ``handle(class, args)`` for each call of Function.apply; NotImplemented: run it.

    Also for bound methods that were stored before. Replaces ``apply`` of
    ``torch.autograd.function._SingleLevelFunction``, to which every call leads; does nothing in a
    torch without that class.
    """
    base = getattr(torch.autograd.function, "_SingleLevelFunction", None)
    if base is None:
        yield
        return

    def apply(kind: type, *args: Any, **kwargs: Any) -> Any:
        found = NotImplemented if kwargs else handle(kind, args)
        return original(kind, *args, **kwargs) if found is NotImplemented else found

    before = vars(base).get("apply")
    if before is None:

        def original(kind: type, *args: Any, **kwargs: Any) -> Any:
            return super(base, kind).apply(*args, **kwargs)
    else:  # a nested use of this function
        original = before.__func__
    base.apply = classmethod(apply)
    try:
        yield
    finally:
        if before is None:
            del base.apply
        else:
            base.apply = before
