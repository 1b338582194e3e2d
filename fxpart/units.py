"""Numbers as people read them."""

from __future__ import annotations

import re
from decimal import Decimal

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNTS = ("", " k", " M", " G", " T")


_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_SECONDS = {"s": 0, "ms": -3, "us": -6, "µs": -6, "μs": -6, "ns": -9, "": 0}  # powers of ten
_NUMBER = re.compile(r"\s*([0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*(\S.*?)?\s*")
_SCALED = re.compile(r"([kKMGTP]i?)?(.*)")


def parse_size(text: str) -> float | None:
    """Return the bytes of "80GB", "80 GiB" or "80e9"; None where it is no size."""
    return _parse(text, {"B": 1.0, "": 1.0, "byte": 1.0, "bytes": 1.0})


def parse_bandwidth(text: str) -> float | None:
    """Return the bytes/s of "25 GB/s", "400Gbit/s" or "400 Gbps"; None where it is no rate."""
    bits = dict.fromkeys(("bit/s", "b/s", "bps", "bits/s"), 1 / 8)
    return _parse(text, {"B/s": 1.0, "Bps": 1.0, "": 1.0, **bits})


def parse_rate(text: str) -> float | None:
    """Return the FLOP/s of "312 TFLOPS" or "312 TFLOP/s"; None where it is no rate."""
    names = ("FLOPS", "FLOP/s", "FLOPs", "flops", "flop/s", "Flops", "Flop/s", "FLOPs/s", "")
    return _parse(text, dict.fromkeys(names, 1.0))


def parse_seconds(text: str) -> float | None:
    """Return the seconds of "5us", "1.2 ms" or "3e-6"; None where it is no duration."""
    found = _NUMBER.fullmatch(text)
    power = None if found is None else _SECONDS.get(found[2] or "")
    return None if found is None or power is None else float(Decimal(found[1]).scaleb(power))


def _parse(text: str, units: dict[str, float]) -> float | None:
    """Return the number times its prefix and unit; None where the unit is none of these."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    scaled = _SCALED.fullmatch(found[2] or "")
    assert scaled is not None, "it matches every text"
    prefix, unit = (scaled[1] or "").replace("k", "K"), scaled[2]
    factor = {**_PREFIXES, **_BINARY}.get(prefix)
    if factor is None or unit not in units or (prefix and not unit):
        return None
    return float(found[1]) * factor * units[unit]


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
