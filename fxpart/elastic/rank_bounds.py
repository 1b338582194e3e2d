"""Bounds of a run's number of ranks in PaddlePaddle's ``np`` syntax, "4" or "2:4"."""

from __future__ import annotations

from dataclasses import dataclass

from fxpart.cluster.validation import MAX_DEVICES
from fxpart.errors import error


@dataclass(frozen=True)
class RankBounds:
    """Least and largest number of ranks of a run, at least 1."""

    least: int
    most: int

    @staticmethod
    def parse(text: str, option: str = "--nproc") -> RankBounds:
        """Parse "4" as exactly four, "2:4" as two to four; FXP109 naming ``option`` otherwise.

        The syntax is that of PaddlePaddle's ``--np`` and torchrun's ``--nnodes``. Unlike these, a
        minimum above the maximum and 0 are errors.
        """
        parts = text.strip().split(":")
        if len(parts) > 2:
            raise _make_error(option, text, f"it has {len(parts)} numbers")
        numbers = [_parse_number(part, option, text) for part in parts]
        least, most = numbers[0], numbers[-1]
        if least > most:
            raise _make_error(option, text, f"the minimum, {least}, is above the maximum, {most}")
        return RankBounds(least, most)

    @property
    def elastic(self) -> bool:
        """Whether the number may change."""
        return self.least < self.most

    def __contains__(self, ranks: int) -> bool:
        """Return whether a run may have this number of ranks."""
        return self.least <= ranks <= self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)


def _parse_number(part: str, option: str, text: str) -> int:
    digits = part.strip()
    if not digits:
        raise _make_error(option, text, "a number is missing")
    if not (digits.isascii() and digits.isdigit()):
        raise _make_error(option, text, f"{part[:20]!r} is not a number")
    value = int(digits) if len(digits) < 9 else MAX_DEVICES + 1
    if not 1 <= value <= MAX_DEVICES:
        raise _make_error(option, text, f"{digits[:20]} ranks are not between 1 and {MAX_DEVICES}")
    return value


def _make_error(option: str, text: str, why: str) -> Exception:
    return error(
        "FXP109",
        where=f"{option} {text[:40]}",
        why=why,
        fix="write N, or MIN:MAX for a run with a changing number of ranks, such as 2:4",
    )
