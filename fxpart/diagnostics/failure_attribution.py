"""Whom a rank's failure is about: itself, or another that it waited for or heard of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxpart.diagnostics.failure_record import FailureRecord, ProblemRecord

_RANKS = re.compile(r"\branks? (\d{1,9}(?:, \d{1,9})*)")
_WAITED = re.compile(r"\bwaiting for rank (\d{1,9})")
_LOST = "the connection to another rank was lost"


@dataclass(frozen=True)
class FailureAttribution:
    """ranks: that a failure is about. gone: they are known to have ended, or not to answer.

    Otherwise they were waited for, and may themselves have waited for others.
    """

    ranks: tuple[int, ...]
    gone: bool


def attribute_failure(failure: FailureRecord) -> FailureAttribution:
    """What a failure's own words say, the first problem that names a rank.

    A failure that names no other rank is the rank's own.
    """
    if failure.lost:
        return FailureAttribution(failure.lost, gone=True)
    for said in failure.problems:
        found = _of(said)
        if found is not None:
            return found
    return FailureAttribution((failure.rank,), gone=False)


def _of(said: ProblemRecord) -> FailureAttribution | None:
    if said.code in ("FXP514", "FXP515", "FXP516"):
        ranks = _ranks(said.why)
        return FailureAttribution(ranks, gone=True) if ranks else None
    if said.code == "FXP503" or (said.code == "FXP504" and said.why.startswith(_LOST)):
        closed = _ranks(said.why) if said.code == "FXP504" else ()
        waited = tuple(int(number) for number in _WAITED.findall(said.where))
        return FailureAttribution(waited or closed, gone=False) if waited or closed else None
    if said.code == "FXP504":  # a stage's own failure, of which every rank is told
        ranks = _ranks(said.where)
        return FailureAttribution(ranks[:1], gone=False) if ranks else None
    return None


def _ranks(text: str) -> tuple[int, ...]:
    """The first ranks that a text names."""
    found = _RANKS.search(text)
    return tuple(int(number) for number in found[1].split(", ")) if found else ()
