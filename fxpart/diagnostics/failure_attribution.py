"""Attribution of a rank's failure: to itself, or to another rank that it names."""

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
    """Ranks that a failure is attributed to. gone: they have ended, or do not answer.

    Otherwise they were waited for, and may have waited for others themselves.
    """

    ranks: tuple[int, ...]
    gone: bool


def attribute_failure(failure: FailureRecord) -> FailureAttribution:
    """Attribute a failure by the text of its first problem that names a rank.

    A failure that names no other rank is the rank's own.
    """
    if failure.lost:
        return FailureAttribution(failure.lost, gone=True)
    for problem in failure.problems:
        found = _attribute_problem(problem)
        if found is not None:
            return found
    return FailureAttribution((failure.rank,), gone=False)


def _attribute_problem(problem: ProblemRecord) -> FailureAttribution | None:
    if problem.code in ("FXP514", "FXP515", "FXP516"):
        ranks = _ranks(problem.why)
        return FailureAttribution(ranks, gone=True) if ranks else None
    if problem.code == "FXP503" or (problem.code == "FXP504" and problem.why.startswith(_LOST)):
        closed = _ranks(problem.why) if problem.code == "FXP504" else ()
        waited = tuple(int(number) for number in _WAITED.findall(problem.where))
        return FailureAttribution(waited or closed, gone=False) if waited or closed else None
    if problem.code == "FXP504":  # a stage's own failure, reported on every rank
        ranks = _ranks(problem.where)
        return FailureAttribution(ranks[:1], gone=False) if ranks else None
    return None


def _ranks(text: str) -> tuple[int, ...]:
    """Return the first ranks that a text names."""
    found = _RANKS.search(text)
    return tuple(int(number) for number in found[1].split(", ")) if found else ()
