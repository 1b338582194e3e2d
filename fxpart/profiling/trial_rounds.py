"""Compare the fastest plans in rounds of a few steps, with all plans loaded at the same time.

The speed of a machine varies within seconds, on a shared machine by more than good plans differ.
Times of plans within a few seconds of each other are comparable, however. Therefore plans are
compared within each round of steps, and the median over rounds is used.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from math import exp, log

import msgspec

from fxpart.codegen.generated_program import GeneratedProgram
from fxpart.costmodels.profile_store import TimeQuartiles, TrialRun
from fxpart.plan.model import Plan
from fxpart.profiling.trial_processes import TrialProcesses

LEAST = 3  # Minimum of rounds.
_MOST = 9
_STEPS = 3  # Measured steps of each plan per round.
_WARM = 1  # Warm-up steps, as other plans have evicted the caches.

Rounds = Sequence[Sequence[float]]


def run_trial_rounds(
    benches: Sequence[TrialProcesses],
    plans: Sequence[tuple[Plan, GeneratedProgram]],
    *,
    most: int = _MOST,
    left: Callable[[], float] = lambda: float("inf"),
    optimizer: str = "",
) -> list[tuple[float, ...]]:
    """Return the median seconds of a step of each plan, by round.

    benches: one for each plan, with at least its ranks. most: maximum of rounds while ``left()`` is
    positive, at least three. optimizer: by default the plans'. Raises the error of a rank, or
    FXP507.
    """
    for bench, (plan, parts) in zip(benches, plans, strict=True):
        bench.load(plan, parts, optimizer=optimizer)
    rounds: list[tuple[float, ...]] = []
    while len(rounds) < LEAST or (len(rounds) < most and left() > 0):
        order = list(enumerate(benches))
        found = {
            number: statistics.median(bench.train_further(_STEPS, warm=_WARM))
            for number, bench in order[:: -1 if len(rounds) % 2 else 1]
        }
        rounds.append(tuple(found[number] for number, _ in order))
    return rounds


def round_seconds(step: float) -> float:
    """Return the approximate seconds of a round. step: total seconds of one step of each plan."""
    return (_STEPS + _WARM) * step


def normalize_rounds(rounds: Rounds) -> list[list[float]]:
    """Return times relative to the geometric mean of the round, by plan and round."""
    means = [_mean(row) for row in rounds]
    return [
        [row[number] / mean for row, mean in zip(rounds, means, strict=True)]
        for number in range(len(rounds[0]))
    ]


def summarize_rounds(runs: Sequence[TrialRun], rounds: Rounds) -> list[TrialRun]:
    """Update trial runs of plans by the rounds in which they were compared.

    Their geometric mean is preserved, for comparison with trial runs of other plans.
    """
    level = _mean([run.seconds.seconds for run in runs])
    shares = normalize_rounds(rounds)
    middles = [statistics.median(each) for each in shares]
    level /= _mean(middles)
    found = []
    for run, middle, each in zip(runs, middles, shares, strict=True):
        count = run.seconds.runs + _STEPS * len(rounds)
        seconds = TimeQuartiles(level * middle, level * min(each), level * max(each), count)
        turns = run.turns + len(rounds)
        found.append(msgspec.structs.replace(run, seconds=seconds, turns=turns))
    return found


def _mean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return exp(statistics.fmean(map(log, values)))
