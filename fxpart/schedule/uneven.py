"""Cores that are not all used though as many ranks compute. Part of plans' and profiles' files."""

from __future__ import annotations

import msgspec


class Uneven(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two ranks share a core while another is idle, until the operating system looks.

    cores: how many ranks compute without sharing cores. seconds: how long it lasts where nothing
    else changes. fallen: the part of a core that is lost meanwhile where more ranks than cores
    computed just before; risen: the same where fewer did.
    """

    cores: int
    seconds: float
    fallen: float
    risen: float = 0.0

    def part(self, before: float, count: float) -> float:
        """What is lost after a change of how many compute; 0 where nothing is by it."""
        if not 2 <= count <= self.cores:
            return 0.0
        return self.fallen if before > self.cores else self.risen if before < count else 0.0

    def seen(self, count: float, part: float) -> float:
        """As many ranks as would be as slow if all cores were used: c n / (n - part)."""
        return self.cores * count / (count - part) if part else count
