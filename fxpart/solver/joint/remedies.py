"""Changes to an infeasible joint problem: each is verified by a solver before it is suggested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from fxpart.solver.joint.constraint_conflicts import RelaxableConstraints
from fxpart.solver.joint.feasibility import find_feasible_joint_choice
from fxpart.solver.joint.objective import JointEvaluation
from fxpart.solver.joint.problem import JointChoice, JointProblem, count_microbatch_rows
from fxpart.solver.joint.what_if import with_devices, with_microbatches
from fxpart.solver.remedies import (
    describe_memory,
    find_extra_memory,
    find_least_sufficient,
    list_changes,
)
from fxpart.solver.work import SolverTimeout

_TIMES = 64  # limit on devices, as a multiple of the available ones
_MODES = ("selective", "full")  # of recompute, the cheaper first


def remedies(
    problem: JointProblem,
    limits: RelaxableConstraints,
    wider: JointProblem | None,
    more: int | None,
    deadline: float,
) -> Iterator[str]:
    """Yield descriptions of changes that make the problem feasible, the cheapest first.

    limits: of the problem; wider: the same problem with more options; more: missing bytes on each
    device. Stops at the deadline.
    """

    def find(changed: JointProblem) -> JointEvaluation | None:
        return limits.find(deadline, (), lambda _: changed)

    try:
        yield from _given_up(limits, deadline)
        if wider is not None and not limits.constraints:
            yield from wider_options(problem, wider, deadline)
        smaller = more_microbatches(limits.base)
        yield from list_changes(limits.base, find, partial(more_devices, find), smaller)
    except SolverTimeout:
        pass
    if more is not None:
        yield describe_memory((pool.memory for pool in problem.pools), more)


def _given_up(limits: RelaxableConstraints, deadline: float) -> Iterator[str]:
    """Yield each limit that is sufficient to drop; if there is none, several that are."""
    blamed = limits.conflict(deadline)
    enough = [[i] for i in blamed if limits.fit(deadline, [i])]
    dropped = list[int]()
    while blamed and not enough:
        dropped.append(blamed[0])
        if limits.fit(deadline, dropped):
            enough = [dropped]
        else:
            blamed = limits.conflict(deadline, None, dropped)
    for several in enough:
        yield "without " + " and ".join(repr(limits.texts[i]) for i in sorted(several))


def wider_options(problem: JointProblem, wider: JointProblem, deadline: float) -> Iterator[str]:
    """Yield the smallest sufficient change: recompute, ZeRO, both, or other degrees."""
    modes = [o.recompute for o in problem.options]
    levels = [o.zero for o in problem.options]
    shapes = {(o.pool, problem.layouts[o.layout].tensor, o.data) for o in problem.options}

    def fit(recompute: str | None, zero: int | None, *, degrees: bool = False) -> bool:
        kept = tuple(
            o
            for o in wider.options
            if (o.recompute in modes or o.recompute == recompute)
            and (o.zero in levels or o.zero == zero)
            and (degrees or (o.pool, wider.layouts[o.layout].tensor, o.data) in shapes)
        )
        taken = msgspec.structs.replace(
            problem, options=kept, layouts=wider.layouts, works=wider.works
        )
        return find_feasible_joint_choice(taken, deadline) is not None

    mode = next((m for m in _MODES if m not in modes and fit(m, None)), None)
    level = next((z for z in (1, 2, 3) if z not in levels and fit(None, z)), None)
    if mode is not None:
        yield f"recompute={mode}"
    if level is not None:
        yield f"zero={level}"
    if mode is None and level is None:
        pairs = ((m, z) for m in _MODES for z in (1, 2, 3))
        pair = next(((m, z) for m, z in pairs if fit(m, z)), None)
        if pair is not None:
            yield f"recompute={pair[0]} with zero={pair[1]}"
        elif fit(None, None, degrees=True):
            yield "other tensor and data degrees"
        elif fit("full", 3, degrees=True):
            yield "other tensor and data degrees with recompute=full and zero=3"


def more_microbatches(problem: JointProblem) -> Iterator[tuple[str, JointProblem]]:
    """Yield the problem with more microbatches, twice as many each time, and their number."""
    top = max(problem.microbatches)
    doubled = [top << k for k in range(1, 40) if top << k < problem.batch]
    for counted in (*doubled, problem.batch):
        if counted > top:
            yield _microbatches(problem, counted), with_microbatches(problem, (counted,))


def more_devices(
    find: Callable[[JointProblem], JointEvaluation | None], problem: JointProblem
) -> Iterator[tuple[str, JointProblem]]:
    """Yield by pool the fewest additional devices with which a plan fits, and the problem then."""
    pools = problem.pools
    for p, pool in enumerate(pools):

        def grown(extra: int, p: int = p) -> JointProblem:
            counts = [x.devices + extra * (k == p) for k, x in enumerate(pools)]
            return with_devices(problem, counts)

        extra = find_least_sufficient(
            lambda extra, grown=grown: find(grown(extra)) is not None,  # type: ignore[misc]
            pool.devices * (_TIMES - 1),
        )
        if extra is not None:
            named = f" of {pool.name}" if len(pools) > 1 else ""
            yield f"{extra} more {'device' if extra == 1 else 'devices'}{named}", grown(extra)


def extra_memory(problem: JointProblem, deadline: float) -> tuple[int, JointChoice] | None:
    """Return the approximate minimum of missing bytes per device, and a choice that would fit.

    None if nothing fits regardless of memory, or if the deadline passes first.
    """
    return find_extra_memory(
        lambda more: find_feasible_joint_choice(with_more(problem, more), deadline),
        max(pool.memory for pool in problem.pools),
        2**50,
    )


def with_more(problem: JointProblem, more: int) -> JointProblem:
    """Return the problem with ``more`` bytes added to every device."""
    pools = tuple(msgspec.structs.replace(p, memory=p.memory + more) for p in problem.pools)
    return msgspec.structs.replace(problem, pools=pools)


def _microbatches(problem: JointProblem, counted: int) -> str:
    """Return the count, and whether its costs are interpolated."""
    priced = {w.rows for w in problem.works}
    rows = {
        count_microbatch_rows(problem.batch, counted, option.data) for option in problem.options
    }
    guess = "" if rows - {0} <= priced else " (estimated)"
    return f"{counted} microbatches{guess}"
