"""Bytes that this process has allocated and not given back, to the byte."""

from __future__ import annotations

import ctypes


class _Info(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    )  # fmt: skip


_LIBRARY = ctypes.CDLL(None)
_LIBRARY.mallinfo2.restype = _Info


def live() -> int:
    """Bytes in use: of the heap, and of blocks that are mapped by themselves."""
    found = _LIBRARY.mallinfo2()
    return int(found.uordblks + found.hblkhd)
