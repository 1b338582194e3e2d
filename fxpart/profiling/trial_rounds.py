"""The closest plans trained in turns of a few steps, all of them held by ranks at the same time.

A machine changes its pace from one second to the next, a shared one by far more than good plans
differ. What two plans take within seconds of each other is hardly touched by it: rounds of steps
tell plans apart that runs one after the other do not. Each round's steps are compared with each
other alone, and the median round counts.
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

LEAST = 3  # rounds
_MOST = 9
_STEPS = 3  # that count, of each plan in each round
_WARM = 1  # before them: the other plans' steps have emptied the caches

Rounds = Sequence[Sequence[float]]


def run_trial_rounds(
    benches: Sequence[TrialProcesses],
    players: Sequence[tuple[Plan, GeneratedProgram]],
    *,
    most: int = _MOST,
    left: Callable[[], float] = lambda: float("inf"),
    optimizer: str = "",
) -> list[tuple[float, ...]]:
    """Of each round the seconds of a step of each plan: the median of its steps.

    benches: one for each plan, of at least its ranks. most: rounds, while seconds are left, but at
    least three. optimizer: by default the plans'. Raises what a rank raised, or FXP507.
    """
    for bench, (plan, parts) in zip(benches, players, strict=True):
        bench.hold(plan, parts, optimizer=optimizer)
    rounds: list[tuple[float, ...]] = []
    while len(rounds) < LEAST or (len(rounds) < most and left() > 0):
        order = list(enumerate(benches))
        found = {
            number: statistics.median(bench.go_on(_STEPS, warm=_WARM))
            for number, bench in order[:: -1 if len(rounds) % 2 else 1]
        }
        rounds.append(tuple(found[number] for number, _ in order))
    return rounds


def round_seconds(step: float) -> float:
    """About how long a round takes. step: seconds of one step of each plan, in all."""
    return (_STEPS + _WARM) * step


def normalize_rounds(rounds: Rounds) -> list[list[float]]:
    """By plan, over the rounds: what it took over the geometric mean of all plans' in the round."""
    means = [_mean(row) for row in rounds]
    return [
        [row[number] / mean for row, mean in zip(rounds, means, strict=True)]
        for number in range(len(rounds[0]))
    ]


def summarize_rounds(runs: Sequence[TrialRun], rounds: Rounds) -> list[TrialRun]:
    """The trial runs of plans that have played: how they compare is what the rounds say.

    Their level, the geometric mean of all, stays: other plans were run at that pace.
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
    """The geometric one."""
    return exp(statistics.fmean(map(log, values)))
