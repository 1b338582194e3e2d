"""Points in this process at which it kills itself, if a file of the run's folder names the point.

The file has a point and a rank, such as "append-half 0"; it is removed just before the end.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxpart.checkpoint import files
from fxpart.runtime.training_run import json_lines
from fxpart.runtime.transport.control_channel import ControlChannel

NAME = "kill-point"


def install(folder: Path, rank: int) -> None:
    """Watch checkpoints' renames, the ledger's appends and the exchanges of a rank's process."""
    path = folder / NAME

    def is_due(point: str) -> bool:
        try:
            return path.read_text() == f"{point} {rank}"
        except FileNotFoundError:
            return False

    def reach(point: str) -> None:
        if is_due(point):
            path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    rename, begin, end = Path.rename, ControlChannel.begin, ControlChannel.end

    def renamed(self: Path, target: Any) -> Path:
        partial = self.name.startswith(".partial-")
        if partial:
            reach("rename-before")
        found = rename(self, target)
        if partial:
            reach("rename-after")
        return found

    def written(file: Any, data: bytes) -> None:
        reach("append-before")
        if is_due("append-half"):
            files.write(file, data[: len(data) // 2])
            reach("append-half")
        files.write(file, data)
        reach("append-after")

    def begun(self: ControlChannel, row: Sequence[int]) -> bytes:
        reach("agree-before")
        if is_due("agree-half"):  # one rank has heard of it, the others have not
            self._peers = dict(list(self._peers.items())[:1])
            begin(self, row)
            reach("agree-half")
        return begin(self, row)

    def ended(self: ControlChannel, mine: bytes) -> list[list[int]]:
        reach("agree-after")
        return end(self, mine)

    changed: Any = (
        (Path, "rename", renamed),
        (json_lines, "write", written),
        (ControlChannel, "begin", begun),
        (ControlChannel, "end", ended),
    )
    for owner, name, function in changed:
        setattr(owner, name, function)
