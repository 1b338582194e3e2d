"""A rank for the tests of starting: ``python -m launched KIND FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from fxpart.environment import read_launch, take_launcher_pid
from fxpart.launch import die_with_parent


def main(kind: str, folder: Path) -> int:
    """Say who this is, do what the kind says; the exit status."""
    parent = take_launcher_pid()
    if parent is not None:
        die_with_parent(parent)
    found = read_launch()
    assert found is not None
    if kind == "asked":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if kind == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    mine = folder / f"rank-{found.rank}-{found.restarts}"
    beside = folder / f"new-{found.rank}"
    beside.write_text(f"{os.getpid()} {found.address} {found.port} {found.keeps_store}")
    beside.rename(mine)
    if kind == "well":
        return 0
    if kind == "second" and found.rank == 1:
        return 3
    if kind == "recovers" and found.restarts:
        return 0
    time.sleep(60)
    return 9


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
