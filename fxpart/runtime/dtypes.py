"""Dtypes of a program, which names them as text, as dtypes of torch."""

from __future__ import annotations

from functools import cache

import torch

from fxpart.errors import error


@cache
def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name ("float32"); FXP303 where torch has none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise error("FXP303", where=f"dtype {name[:40]!r}", why="torch has no such dtype", fix="")
    return found
