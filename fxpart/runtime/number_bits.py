"""Numbers as the integers that ranks exchange."""

from __future__ import annotations

import struct


def bits_of(number: float) -> int:
    """Return the float64 as an integer, which is 0 for 0.0 only."""
    found: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return found


def number_of(bits: int) -> float:
    """Return the number that :func:`bits_of` gave the integer of."""
    found: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return found
