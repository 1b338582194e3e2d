"""Small text files of other tools."""

from __future__ import annotations

import os
from pathlib import Path

from fxpart.checkpoint import files
from fxpart.checkpoint.exchange.source import make_foreign_file_error

_LARGEST = 100_000_000  # bytes


def read_text(path: Path) -> str:
    """Return a file's text; FXP110 if it is not UTF-8 or too long."""
    try:
        with files.open_for_reading(Path(os.path.realpath(path))) as (file, size):
            if size > _LARGEST:
                raise ValueError(f"its size is {size} bytes")
            return files.read(file, size).decode("utf-8")
    except (OSError, ValueError) as cause:
        raise make_foreign_file_error(str(path), f"it cannot be read: {cause}") from cause
