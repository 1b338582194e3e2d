"""Numbers as people read them."""

from __future__ import annotations

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNTS = ("", " k", " M", " G", " T")


def seconds(value: float) -> str:
    """``0.01234`` as "12.3 ms"; three digits, the largest unit that fits."""
    for size, unit in _TIMES:
        if value >= size:
            return f"{_three(value / size)} {unit}"
    return "0 s" if value == 0 else f"{value:.1e} s"


def size(value: int) -> str:
    """Format bytes as "1.5 GiB"."""
    return _scaled(value, 1024, _BYTES, " ")


def count(value: int) -> str:
    """Format a count as "124 M"."""
    return _scaled(value, 1000, _COUNTS, "")


def plural(number: int, noun: str) -> str:
    """ "1 stage", "2 stages", "3 microbatches"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}es" if noun.endswith("ch") else f"{number} {noun}s"


def percent(share: float) -> str:
    """Format a share as "12.3 %"; a nonzero share is never shown as zero."""
    if 0 < share < 0.0005:
        return "under 0.05 %"
    return f"{share * 100:.1f} %"


def _scaled(value: int, base: int, units: tuple[str, ...], gap: str) -> str:
    scaled = float(value)
    for unit in units:
        if abs(scaled) < base or unit == units[-1]:
            break
        scaled /= base
    number = str(value) if unit == units[0] else _three(scaled)
    return f"{number}{gap}{unit}"


def _three(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
