"""How many ranks a run may have: PaddlePaddle's ``np`` syntax, "4" or "2:4"."""

from __future__ import annotations

from dataclasses import dataclass

from fxpart.cluster.validation import MAX_DEVICES
from fxpart.errors import error


@dataclass(frozen=True)
class RankBounds:
    """The least and the most ranks of a run; both are at least 1, and the least is first."""

    least: int
    most: int

    @staticmethod
    def parse(text: str, option: str = "--nproc") -> RankBounds:
        """ "4" as exactly four, "2:4" as two to four; FXP109 naming ``option`` for anything else.

        The syntax is that of PaddlePaddle's ``--np`` and of torchrun's ``--nnodes``. Where those
        take a least number above the most for the most, and 0 for 1, this is refused.
        """
        parts = text.strip().split(":")
        if len(parts) > 2:
            raise _wrong(option, text, f"it has {len(parts)} numbers")
        numbers = [_number(part, option, text) for part in parts]
        least, most = numbers[0], numbers[-1]
        if least > most:
            raise _wrong(option, text, f"the least, {least}, is above the most, {most}")
        return RankBounds(least, most)

    @property
    def elastic(self) -> bool:
        """Whether the number may change."""
        return self.least < self.most

    def __contains__(self, ranks: int) -> bool:
        """Whether a run may have so many ranks."""
        return self.least <= ranks <= self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)


def _number(part: str, option: str, text: str) -> int:
    digits = part.strip()
    if not digits:
        raise _wrong(option, text, "a number is missing")
    if not (digits.isascii() and digits.isdigit()):
        raise _wrong(option, text, f"{part[:20]!r} is not a number")
    value = int(digits) if len(digits) < 9 else MAX_DEVICES + 1
    if not 1 <= value <= MAX_DEVICES:
        raise _wrong(option, text, f"{digits[:20]} ranks is not between 1 and {MAX_DEVICES}")
    return value


def _wrong(option: str, text: str, why: str) -> Exception:
    return error(
        "FXP109",
        where=f"{option} {text[:40]}",
        why=why,
        fix="write N, or MIN:MAX for a run that may go on with fewer or more, such as 2:4",
    )
