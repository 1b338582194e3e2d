"""Conversion of floats to the integers that ranks exchange."""

from __future__ import annotations

import struct


def float_to_bits(number: float) -> int:
    """Return the float64 as an integer, which is 0 only for 0.0."""
    found: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return found


def bits_to_float(bits: int) -> float:
    """Return the number that :func:`float_to_bits` converted."""
    found: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return found
