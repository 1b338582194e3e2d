"""How far a solver is, told to whoever waits for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """The best step time found and the proven bound so far, both in seconds.

    incumbent: infinite while nothing feasible is known. seconds_left: until the time limit.
    phase: what is being done, in a few words.
    """

    incumbent: float
    bound: float
    seconds_left: float
    phase: str
