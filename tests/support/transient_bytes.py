"""The most bytes that a computation holds at a time, beyond what was there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from live_bytes import live

from fxpart.compat import TorchDispatchMode


class Peak(TorchDispatchMode):
    """Counts the process's bytes after each operation within; ``most`` is the largest increase."""

    def __init__(self) -> None:
        super().__init__()
        self.start = live()
        self.most = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.most = max(self.most, live() - self.start)
        return out
