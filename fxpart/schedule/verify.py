"""The verifier: a schedule is run by nobody before it has passed here.

What is proved: every computation happens exactly once, after all that it needs, and in the order
that makes sums equal those of one process; every value that changes rank is sent and received
exactly once; with sends that block until they are received, all ranks reach their end, and both
ends of every channel of transfers have the same order (:mod:`fxpart.schedule.channels`); no stage
holds more microbatches than it may; and each computation names the weights that it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from fxpart.errors import FxpartError, Problem, error
from fxpart.schedule.action import Action, ActionKind, Schedule, StageEdge
from fxpart.schedule.channels import TiedTransfer, find_channel_problems
from fxpart.schedule.consistency import (
    describe_position,
    find_shape_problems,
    make_unsafe_problem,
)
from fxpart.schedule.dependence import Dependence, get_transfer_partner
from fxpart.schedule.in_flight import count_in_flight
from fxpart.schedule.rendezvous import execute
from fxpart.schedule.spec import get_in_flight_limits
from fxpart.schedule.version_check import find_version_problems
from fxpart.schedule.weight_modes import FLUSH, WeightMode, weight_mode

Weights: TypeAlias = str | WeightMode


def verify(
    schedule: Schedule,
    edges: Iterable[StageEdge],
    *,
    memory: Sequence[int] | None = None,
    weights: Weights = FLUSH,
    every: int | None = None,
    tied: Iterable[TiedTransfer] = (),
) -> None:
    """Raise FXP901 with every problem that :func:`check` finds; return if there is none."""
    problems = check(schedule, edges, memory=memory, weights=weights, every=every, tied=tied)
    if problems:
        raise FxpartError(problems)


def check(
    schedule: Schedule,
    edges: Iterable[StageEdge],
    *,
    memory: Sequence[int] | None = None,
    weights: Weights = FLUSH,
    every: int | None = None,
    tied: Iterable[TiedTransfer] = (),
) -> tuple[Problem, ...]:
    """All that is wrong with a lowered schedule, or an empty tuple.

    edges: the stage graph. memory: per stage, the most microbatches that may be in flight; without
    it the bound of the builder by that name holds, if there is one. weights: a weight mode or its
    name; "flush" knows no weight versions, in a mode that does not flush every computation names
    the one that the order of actions implies. every: microbatches to an update; where it is not
    given only what any number implies is proved: that a backward names its forward's version, if it
    reads that. tied: the gradients of tied parameters that stages send to each other. Raises FXP109
    if memory has not one entry per stage, and for an unknown mode.
    """
    wanted = tuple(edges)
    if memory is not None and len(memory) != schedule.stages:
        raise error(
            "FXP109",
            where="verify: memory",
            why=f"{len(memory)} limits for {schedule.stages} stages",
            fix="give one number of microbatches for each stage",
        )
    shape = find_shape_problems(schedule, wanted)
    if shape:  # nothing below is defined for such a schedule
        return tuple(shape)
    dependence = Dependence.of(schedule, wanted)
    found = (
        *_complete(schedule, dependence),
        *_transfers(schedule, dependence),
        *_ordered(schedule, dependence),
        *_deadlock(schedule),
        *_bounded(schedule, memory),
        *find_version_problems(schedule, weight_mode(weights), every),
    )
    # The order on channels is defined only where each transfer has its two ends.
    return found or tuple(find_channel_problems(schedule, dependence, tied=tied))


def incomplete(schedule: Schedule, edges: Iterable[StageEdge]) -> tuple[Problem, ...]:
    """The computations that are missing, or there too often; also before there are transfers.

    Raises FXP901 on edges that are no stage graph; numbers that do not fit together are
    :func:`fxpart.schedule.consistency.find_shape_problems`' question.
    """
    return tuple(_complete(schedule, Dependence.of(schedule, edges)))


def _listed(numbers: Iterable[int]) -> str:
    shown = [str(n) for n in sorted(numbers)]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


def _complete(schedule: Schedule, dependence: Dependence) -> list[Problem]:
    """Each stage takes each microbatch forward once, and backward once (whole or split)."""
    count = Counter(a.plain for actions in schedule.ranks for a in actions if a.kind.is_compute)
    found: list[Problem] = []
    if schedule.replicas:
        strange = sorted(str(a) for a in count if not schedule.takes(a.stage, a.microbatch))
        found += [
            make_unsafe_problem(text, "another copy of the stage does it") for text in strange
        ]
    for stage in range(schedule.stages):
        everything = schedule.taken(stage)
        split = {m for m in everything if (stage, m) in dependence.split}
        whole = set(everything) - split if schedule.trains else set()
        wanted = {
            ActionKind.F: set(everything),
            ActionKind.B: whole,
            ActionKind.I: split,
            ActionKind.W: split,
        }
        for kind, microbatches in wanted.items():
            times = {m: count[Action(stage, kind, m)] for m in everything}
            missing = [m for m, n in times.items() if n == 0 and m in microbatches]
            repeated = [m for m, n in times.items() if n > 1 and m in microbatches]
            unwanted = [m for m, n in times.items() if n > 0 and m not in microbatches]
            for what, which in (
                ("is missing", missing),
                ("is there more than once", repeated),
                ("should not be there", unwanted),
            ):
                if which:
                    where = f"stage {stage}, {kind.value} of microbatch {_listed(which)}"
                    found.append(make_unsafe_problem(where, what))
    return found


def _transfers(schedule: Schedule, dependence: Dependence) -> list[Problem]:
    """Each value and gradient that changes rank is sent once and received once, and no other."""
    wanted: set[Action] = set()
    for stage in range(schedule.stages):
        for microbatch in schedule.taken(stage):
            causes = [
                Action(stage, ActionKind.F, microbatch),
                dependence.backward(stage, microbatch),
            ]
            for pair in (pair for cause in causes for pair in dependence.transfers(cause)):
                wanted |= set(pair)
    count = Counter(a.plain for actions in schedule.ranks for a in actions if not a.kind.is_compute)
    found: list[Problem] = []
    for action in sorted(wanted | set(count), key=_in_text_order):
        if action not in wanted:
            found.append(make_unsafe_problem(str(action), "no edge of the stage graph asks for it"))
        elif count[action] != 1:
            what = "is missing" if count[action] == 0 else f"is there {count[action]} times"
            found.append(make_unsafe_problem(str(action), what))
    return found


def _in_text_order(action: Action) -> tuple[int, str, int, int]:
    return (action.stage, action.kind.value, action.microbatch, action.peer or 0)


# What of a stage is summed in the order of microbatches: running statistics, and gradients of
# weights. Of a split backward the first half makes some of them (biases, say), the second the rest.
_SUMS = {
    ActionKind.F: ("statistics",),
    ActionKind.B: ("early gradients", "late gradients"),
    ActionKind.I: ("early gradients",),
    ActionKind.W: ("late gradients",),
}


def _ordered(schedule: Schedule, dependence: Dependence) -> list[Problem]:
    """On its rank each action follows what it needs, and microbatches follow each other.

    The second makes a stage's sums over microbatches (gradients, running statistics) the same, bit
    for bit, as those of one process that takes the microbatches in order.
    """
    found: list[Problem] = []
    for rank, actions in enumerate(schedule.ranks):
        done: set[Action] = set()
        latest: dict[tuple[int, str], int] = {}
        for position, action in enumerate(actions):
            for need in dependence.requires(action.plain):
                # A receive waits for a send on another rank: executed in _deadlock.
                if schedule.stage_rank[need.stage] == rank and need not in done:
                    where, why = (
                        describe_position(rank, position, action),
                        f"{need} has not been done before",
                    )
                    found.append(make_unsafe_problem(where, why, f"put {need} before it"))
            done.add(action.plain)
            before = -1
            for made in _SUMS.get(action.kind, ()):
                key = (action.stage, made)
                before = max(before, latest.get(key, -1))
                latest[key] = max(action.microbatch, latest.get(key, -1))
            if action.microbatch < before:
                why = f"microbatch {before} came before it"
                found.append(make_unsafe_problem(describe_position(rank, position, action), why))
    return found


def _deadlock(schedule: Schedule) -> list[Problem]:
    """All ranks end when a send blocks until it is received."""
    run = execute(schedule.ranks, schedule.stage_rank)
    stuck = {
        rank: actions[run.done[rank]].plain
        for rank, actions in enumerate(schedule.ranks)
        if run.done[rank] < len(actions)
    }
    found: list[Problem] = []
    for rank, action in stuck.items():
        assert action.peer is not None, "a computation never blocks"
        other = schedule.stage_rank[action.peer]
        where = describe_position(rank, run.done[rank], action)
        there = f"is at {stuck[other]}" if other in stuck else "has ended"
        why = f"it waits for {get_transfer_partner(action)} on rank {other}, which {there}"
        found.append(
            make_unsafe_problem(where, why, "lower the schedule again from its computations")
        )
    return found


def _bounded(schedule: Schedule, memory: Sequence[int] | None) -> list[Problem]:
    """No stage holds more microbatches than it may."""
    if memory is None:
        memory = get_in_flight_limits(schedule)
        if memory is None:
            return []
    return [
        make_unsafe_problem(f"stage {stage}", f"{held} microbatches in flight, {limit} allowed")
        for stage, (held, limit) in enumerate(zip(count_in_flight(schedule), memory, strict=True))
        if held > limit
    ]
