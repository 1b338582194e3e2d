"""Small text files of others."""

from __future__ import annotations

import os
from pathlib import Path

from fxpart.checkpoint import files
from fxpart.checkpoint.exchange.source import make_foreign_file_error

_LARGEST = 100_000_000  # bytes


def read_text(path: Path) -> str:
    """A file's text; FXP110 where it is none, or far too long."""
    try:
        with files.open_for_reading(Path(os.path.realpath(path))) as (file, size):
            if size > _LARGEST:
                raise ValueError(f"it has {size} bytes")
            return files.read(file, size).decode("utf-8")
    except (OSError, ValueError) as cause:
        raise make_foreign_file_error(str(path), f"it cannot be read: {cause}") from cause
