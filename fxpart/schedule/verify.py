"""Verifier: every schedule must pass it before it is run.

It proves that every computation runs exactly once, after its dependencies, and in an order that
makes accumulated sums equal to single-process training. Every value that changes rank is sent and
received exactly once. With sends that block until they are received, all ranks terminate, and both
ends of every channel of transfers have the same order (:mod:`fxpart.schedule.channels`). No stage
exceeds its limit of microbatches in flight, and each computation names the weight version that it
reads.
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
    """Return all problems of a lowered schedule.

    edges: the stage graph. memory: per stage, the maximum of microbatches in flight; by default the
    bound of the builder of that name, if there is one. weights: a weight mode or its name. "flush"
    has no weight versions; in a mode without flushes every computation names the version that the
    order of actions implies. every: microbatches per update. If it is None, only properties
    independent of it are proved: that a backward names the version of its forward, if it reads
    that. tied: the gradients of tied parameters that stages send to each other. Raises FXP109 if
    memory does not have one entry per stage, and for an unknown mode.
    """
    wanted = tuple(edges)
    if memory is not None and len(memory) != schedule.stages:
        raise error(
            "FXP109",
            where="verify: memory",
            why=f"There are {len(memory)} limits for {schedule.stages} stages.",
            fix="Pass one number of microbatches for each stage.",
        )
    shape = find_shape_problems(schedule, wanted)
    if shape:  # the other checks are undefined for such a schedule
        return tuple(shape)
    dependence = Dependence.of(schedule, wanted)
    found = (
        *_find_incomplete(schedule, dependence),
        *_find_transfer_problems(schedule, dependence),
        *_find_order_problems(schedule, dependence),
        *_find_deadlocks(schedule),
        *_find_memory_problems(schedule, memory),
        *find_version_problems(schedule, weight_mode(weights), every),
    )
    # The order on channels is defined only where each transfer has its two ends.
    return found or tuple(find_channel_problems(schedule, dependence, tied=tied))


def find_incomplete(schedule: Schedule, edges: Iterable[StageEdge]) -> tuple[Problem, ...]:
    """Return missing and duplicate computations; works before and after lowering.

    Raises FXP901 for edges that are not a stage graph.
    :func:`fxpart.schedule.consistency.find_shape_problems` checks whether the numbers are
    consistent.
    """
    return tuple(_find_incomplete(schedule, Dependence.of(schedule, edges)))


def _format_numbers(numbers: Iterable[int]) -> str:
    shown = [str(n) for n in sorted(numbers)]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


def _find_incomplete(schedule: Schedule, dependence: Dependence) -> list[Problem]:
    """Check that each stage runs each microbatch once forward and once backward (B, or I and W)."""
    count = Counter(a.plain for actions in schedule.ranks for a in actions if a.kind.is_compute)
    found: list[Problem] = []
    if schedule.replicas:
        strange = sorted(str(a) for a in count if not schedule.runs(a.stage, a.microbatch))
        found += [
            make_unsafe_problem(text, "Another replica of the stage runs this microbatch.")
            for text in strange
        ]
    for stage in range(schedule.stages):
        own = schedule.list_microbatches(stage)
        split = {m for m in own if (stage, m) in dependence.split}
        whole = set(own) - split if schedule.trains else set()
        wanted = {
            ActionKind.F: set(own),
            ActionKind.B: whole,
            ActionKind.I: split,
            ActionKind.W: split,
        }
        for kind, microbatches in wanted.items():
            times = {m: count[Action(stage, kind, m)] for m in own}
            missing = [m for m, n in times.items() if n == 0 and m in microbatches]
            repeated = [m for m, n in times.items() if n > 1 and m in microbatches]
            unwanted = [m for m, n in times.items() if n > 0 and m not in microbatches]
            for what, which in (
                ("The computation is missing.", missing),
                ("The computation occurs more than once.", repeated),
                ("The computation should not occur.", unwanted),
            ):
                if which:
                    where = f"stage {stage}, {kind.value} of microbatch {_format_numbers(which)}"
                    found.append(make_unsafe_problem(where, what))
    return found


def _find_transfer_problems(schedule: Schedule, dependence: Dependence) -> list[Problem]:
    """Check that each value and gradient that changes rank is sent and received exactly once."""
    wanted: set[Action] = set()
    for stage in range(schedule.stages):
        for microbatch in schedule.list_microbatches(stage):
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
            found.append(
                make_unsafe_problem(str(action), "No edge of the stage graph needs this transfer.")
            )
        elif count[action] != 1:
            what = "is missing" if count[action] == 0 else f"occurs {count[action]} times"
            found.append(make_unsafe_problem(str(action), f"The transfer {what}."))
    return found


def _in_text_order(action: Action) -> tuple[int, str, int, int]:
    return (action.stage, action.kind.value, action.microbatch, action.peer or 0)


# The sums of a stage that accumulate in microbatch order: running statistics and weight gradients.
# The input half of a split backward computes some gradients (such as biases), the weight half the
# others.
_SUMS = {
    ActionKind.F: ("statistics",),
    ActionKind.B: ("early gradients", "late gradients"),
    ActionKind.I: ("early gradients",),
    ActionKind.W: ("late gradients",),
}


def _find_order_problems(schedule: Schedule, dependence: Dependence) -> list[Problem]:
    """Check that each action follows its dependencies on its rank, and microbatches are in order.

    The order makes a stage's sums over microbatches (gradients, running statistics) bitwise
    identical to those of one process that runs the microbatches in order.
    """
    found: list[Problem] = []
    for rank, actions in enumerate(schedule.ranks):
        done: set[Action] = set()
        latest: dict[tuple[int, str], int] = {}
        for position, action in enumerate(actions):
            for need in dependence.requires(action.plain):
                # A receive waits for a send on another rank, which _find_deadlocks checks.
                if schedule.stage_rank[need.stage] == rank and need not in done:
                    where, why = (
                        describe_position(rank, position, action),
                        f"{need} does not run before it.",
                    )
                    found.append(make_unsafe_problem(where, why, f"Move {need} before it."))
            done.add(action.plain)
            before = -1
            for made in _SUMS.get(action.kind, ()):
                key = (action.stage, made)
                before = max(before, latest.get(key, -1))
                latest[key] = max(action.microbatch, latest.get(key, -1))
            if action.microbatch < before:
                why = f"Microbatch {before} runs before it."
                found.append(make_unsafe_problem(describe_position(rank, position, action), why))
    return found


def _find_deadlocks(schedule: Schedule) -> list[Problem]:
    """Check that all ranks terminate if a send blocks until it is received."""
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
        why = f"The action waits for {get_transfer_partner(action)} on rank {other}, which {there}."
        found.append(
            make_unsafe_problem(where, why, "Lower the schedule again from its computations.")
        )
    return found


def _find_memory_problems(schedule: Schedule, memory: Sequence[int] | None) -> list[Problem]:
    """Check that no stage exceeds its limit of microbatches in flight."""
    if memory is None:
        memory = get_in_flight_limits(schedule)
        if memory is None:
            return []
    return [
        make_unsafe_problem(
            f"stage {stage}", f"There are {count} microbatches in flight; the limit is {limit}."
        )
        for stage, (count, limit) in enumerate(zip(count_in_flight(schedule), memory, strict=True))
        if count > limit
    ]
