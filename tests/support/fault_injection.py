"""Faults of system calls that write below a folder, by a preloaded library (fault_injection.c).

A program calls :func:`preloaded` first; if that returns False, it starts itself again by
:func:`restart`. Then faults are switched on and off in the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

SOURCE = Path(__file__).with_suffix(".c")
ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EROFS", "EDQUOT")} | {
    "short write": 0
}


def build(folder: Path) -> Path | None:
    """Compile the library into a folder; None without a C compiler."""
    library = folder / "fault_injection.so"
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        str(library),
        str(SOURCE),
        "-ldl",
        "-lpthread",
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return library


def preloaded() -> bool:
    """Whether this process has the library."""
    return hasattr(ctypes.CDLL(None), "fault_arm")


def restart(library: Path) -> NoReturn:
    """Start this program again with the library."""
    os.environ["LD_PRELOAD"] = str(library)
    os.execv(sys.executable, [sys.executable, *sys.argv])


def arm(folder: Path, at: int, count: int, error: int) -> None:
    """Let calls fail below a folder: the ``at``-th from now on, and those that follow it."""
    ctypes.CDLL(None).fault_arm(os.fsencode(folder), ctypes.c_long(at), ctypes.c_long(count), error)


def disarm() -> int:
    """End the faults; return how many calls were made below the folder."""
    library = ctypes.CDLL(None)
    library.fault_disarm()
    library.fault_calls.restype = ctypes.c_long
    return int(library.fault_calls())
