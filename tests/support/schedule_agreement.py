"""A drawn schedule, whole and damaged: verifier, simulator and machine of brute force agree."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from schedule_draws import BREAKS, Drawn, broken, drawn
from schedule_oracle import Verdict, judge, reached, size, times

from fxpart.schedule.action import Action, ActionKind, Schedule
from fxpart.schedule.event_graph import Sends
from fxpart.schedule.in_flight import activation_peak, count_in_flight
from fxpart.schedule.lower import lower
from fxpart.schedule.rendezvous import execute
from fxpart.schedule.simulate import simulate
from fxpart.schedule.text import from_text, to_text
from fxpart.schedule.verify import Weights, check

MODES: tuple[Sends, ...] = ("overlapped", "buffered", "rendezvous")


def seen(source: Random, tally: Counter[str], most: int = 60) -> None:
    """Draw one, hold it against the oracle, then break it in one or two ways."""
    case = drawn(source, most)
    # Transfers at random moments, or where fxpart puts them, which knows no versions.
    lowered = case.lowered
    if not case.stash and source.random() < 0.5:
        lowered = lower(case.bare, case.edges)
    agreed(lowered, case, tally)
    timed(source, lowered, case)
    for how in source.sample(BREAKS, 2):
        damaged = broken(source, lowered, how)
        if damaged is not None:
            verdict = judged(damaged, case)
            tally[f"{how}: {'right' if verdict.right else 'wrong'}"] += 1
            tally["deadlock"] += verdict.why == "deadlock"
            if how != "rank":  # there two ranks may both have an end of one transfer
                done = execute(damaged.ranks, damaged.stage_rank).done
                assert done == reached(damaged), to_text(damaged)


def weights(case: Drawn) -> Weights:
    return "stash" if case.stash else "flush"


def judged(schedule: Schedule, case: Drawn) -> Verdict:
    """Whether it is right, in the oracle's view and in the verifier's, which agree."""
    verdict = judge(schedule, case.edges, stash=case.stash)
    memory = [4 * schedule.microbatches] * schedule.stages
    problems = check(schedule, case.edges, memory=memory, weights=weights(case))
    assert verdict.right == (not problems), (verdict.why, problems, case.edges, to_text(schedule))
    return verdict


def agreed(schedule: Schedule, case: Drawn, tally: Counter[str]) -> None:
    """A right schedule: accepted, with exactly the memory that it needs, and it reads back."""
    verdict = judge(schedule, case.edges, stash=case.stash)
    assert verdict.right, (verdict.why, case.edges, to_text(schedule))
    assert count_in_flight(schedule) == verdict.peaks
    assert activation_peak(schedule, [size(k) for k in range(schedule.stages)]) == verdict.held
    peaks = list(verdict.peaks)
    assert not check(schedule, case.edges, memory=peaks, weights=weights(case)), to_text(schedule)
    busiest = max(range(schedule.stages), key=peaks.__getitem__)
    if peaks[busiest]:
        peaks[busiest] -= 1
        (problem,) = check(schedule, case.edges, memory=peaks, weights=weights(case))
        assert problem.where == f"stage {busiest}"
    assert from_text(to_text(schedule)) == schedule
    tally["right"] += 1
    tally["copies"] += bool(schedule.replicas)
    tally["virtual"] += len(schedule.ranks) < schedule.stages
    tally["split"] += any(a.kind is ActionKind.I for actions in schedule.ranks for a in actions)


def timed(source: Random, schedule: Schedule, case: Drawn) -> None:
    """Every start and end, with whole seconds, so that equal means equal."""
    stages, how = range(schedule.stages), source.choice(MODES)
    costs = {kind: [source.randint(0, 9) for _ in stages] for kind in ActionKind}
    pairs = {(a, b): source.randint(0, 6) for a in stages for b in stages}

    def cost(action: Action) -> int:
        return (
            costs[action.kind][action.stage]
            if action.peer is None
            else pairs[action.stage, action.peer]
        )

    split = [
        (float(i), float(w)) for i, w in zip(costs[ActionKind.I], costs[ActionKind.W], strict=True)
    ]
    found = simulate(
        schedule, case.edges, costs[ActionKind.F], costs[ActionKind.B], lambda a, b, _: pairs[a, b],
        split=split, sends=how,
    )  # fmt: skip
    wanted = times(plain(schedule), case.edges, cost, how)
    spans = {s.action: (s.start, s.end) for s in found.spans if s.track != "receive"}
    assert spans == wanted, (how, costs, pairs, to_text(schedule))
    step = max(end for _, end in wanted.values())
    busy = sum(end - start for a, (start, end) in wanted.items() if a.kind.is_compute)
    assert found.step_seconds == step
    assert sum(found.busy) == busy
    assert found.bubble == pytest.approx(1 - busy / (len(schedule.ranks) * step) if step else 0.0)


def plain(schedule: Schedule) -> Schedule:
    """Without weight versions, which take no time."""
    ranks = tuple(tuple(a.plain for a in actions) for actions in schedule.ranks)
    return Schedule(
        schedule.name, schedule.stages, schedule.microbatches, ranks, schedule.stage_rank,
        schedule.replicas,
    )  # fmt: skip


def many(count: int, seed: int) -> Counter[str]:
    """So many draws; one in a hundred is large."""
    source, tally = Random(seed), Counter[str]()
    for number in range(count):
        seen(source, tally, most=1000 if number % 100 == 99 else 60)
    return tally
