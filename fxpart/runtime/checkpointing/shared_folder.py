"""Wait until this process sees what rank 0 has written into a folder that ranks share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from fxpart.errors import error

_PATIENCE = 10.0  # seconds until a shared file system shows a file on other hosts
_POLL_SECONDS = 0.05


def wait_until_shared(is_seen: Callable[[], bool], rank: int, folder: Path, why: str) -> None:
    """Raise FXP501 with this reason if rank 0 writes into another folder than this process."""
    limit = time.monotonic() + _PATIENCE
    while not is_seen():
        if time.monotonic() > limit:
            fix = "use a folder that all ranks share"
            raise error("FXP501", where=f"rank {rank}, {folder}", why=why, fix=fix)
        time.sleep(_POLL_SECONDS)
