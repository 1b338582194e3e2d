"""The only place that reads environment variables: torchrun's own."""

from __future__ import annotations

import os


def world_size() -> int | None:
    """How many ranks torchrun started in all (WORLD_SIZE); None where it did not start us."""
    return _number("WORLD_SIZE")


def local_world_size() -> int | None:
    """How many ranks torchrun started on this host (LOCAL_WORLD_SIZE); None where it did not."""
    return _number("LOCAL_WORLD_SIZE")


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None
