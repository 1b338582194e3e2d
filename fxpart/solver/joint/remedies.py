"""Changes to an infeasible joint problem: each is verified by a solver before it is suggested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from fxpart.schedule.spec import DEFAULT_SCHEDULE
from fxpart.solver.joint.constraint_conflicts import Change, RelaxableConstraints
from fxpart.solver.joint.feasibility import find_feasible_joint_choice
from fxpart.solver.joint.problem import JointChoice, JointProblem, count_microbatch_rows
from fxpart.solver.joint.what_if import with_devices, with_microbatches
from fxpart.solver.offload import with_offload
from fxpart.solver.remedies import format_byte_count
from fxpart.solver.suffix_dp import SolverTimeout

# extra memory is found up to this fraction of the largest device's memory; at least 1 exactly
_FINE = 1000
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
    try:
        yield from _given_up(limits, deadline)
        if wider is not None and not limits.constraints:
            yield from wider_options(problem, wider, deadline)
        if DEFAULT_SCHEDULE not in problem.schedules and limits.fit(
            deadline, (), _with_default_schedule
        ):
            yield f"the schedule {DEFAULT_SCHEDULE}"
        for offload in limits.base.offloads:
            if limits.fit(deadline, (), partial(with_offload, offload=offload)):
                yield f"offload={offload}"
                break
        alone = False
        if (counted := more_microbatches(limits, deadline)) is not None:
            alone = True
            yield _microbatches(limits.base, counted)
        for text, _ in more_devices(limits, deadline, lambda p: p):
            alone = True
            yield text
        if not alone:  # neither helps alone: the most microbatches together with devices
            counted = problem.batch
            both = more_devices(limits, deadline, lambda p: with_microbatches(p, (counted,)))
            for text, _ in both:
                yield f"{text} with {_microbatches(limits.base, counted)}"
    except SolverTimeout:
        pass
    if more is not None:
        yield _memory(problem, more)


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


def more_microbatches(limits: RelaxableConstraints, deadline: float) -> int | None:
    """Return first larger microbatch count, doubled each time, that makes the problem feasible."""
    base = limits.base
    top = max(base.microbatches)
    doubled = [top << k for k in range(1, 40) if top << k < base.batch]
    for counted in (*doubled, base.batch):
        if counted > top and limits.fit(deadline, (), _counted(counted)):
            return counted
    return None


def _counted(microbatches: int) -> Change:
    return lambda problem: with_microbatches(problem, (microbatches,))


def more_devices(
    limits: RelaxableConstraints, deadline: float, change: Change
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield by pool the fewest additional devices: description, and devices of each pool then."""
    pools = limits.base.pools
    for p, pool in enumerate(pools):

        def counts(extra: int, p: int = p) -> tuple[int, ...]:
            return tuple(x.devices + extra * (k == p) for k, x in enumerate(pools))

        def fit(extra: int, counts: Callable[[int], tuple[int, ...]] = counts) -> bool:
            return limits.fit(deadline, (), lambda q: change(with_devices(q, counts(extra))))

        extra = find_least_sufficient(fit, pool.devices * (_TIMES - 1))
        if extra is not None:
            named = f" of {pool.name}" if len(pools) > 1 else ""
            yield f"{extra} more {'device' if extra == 1 else 'devices'}{named}", counts(extra)


def find_least_sufficient(enough: Callable[[int], bool], most: int, start: int = 1) -> int | None:
    """Return the smallest sufficient number from 1 to ``most`` of a monotone test, or None.

    start: the first guess. Insufficient numbers take longest to test, so ``most`` is not tested
    first.
    """
    if not enough(most):
        return None
    low, high = 0, most
    size = min(start, most)
    while size < most:
        if enough(size):
            high = size
            break
        low, size = size, 2 * size
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high


def extra_memory(problem: JointProblem, deadline: float) -> tuple[int, JointChoice] | None:
    """Return the approximate minimum of missing bytes per device, and a choice that would fit.

    None if nothing fits regardless of memory, or if the deadline passes first.
    """
    step = max(max(pool.memory for pool in problem.pools) // _FINE, 1)
    found: dict[int, JointChoice] = {}

    def enough(steps: int) -> bool:
        choice = find_feasible_joint_choice(with_more(problem, steps * step), deadline)
        if choice is not None:
            found[steps] = choice
        return choice is not None

    try:
        find_least_sufficient(enough, 2**50 // step, _FINE)
    except SolverTimeout:
        pass
    if not found:
        return None
    return min(found) * step, found[min(found)]


def with_more(problem: JointProblem, more: int) -> JointProblem:
    """Return the problem with ``more`` bytes added to every device."""
    pools = tuple(msgspec.structs.replace(p, memory=p.memory + more) for p in problem.pools)
    return msgspec.structs.replace(problem, pools=pools)


def _memory(problem: JointProblem, more: int) -> str:
    sizes: Sequence[int] = sorted({pool.memory for pool in problem.pools})
    if len(sizes) == 1:
        return f"{format_byte_count(sizes[0] + more, up=True)} of memory on each device"
    return f"{format_byte_count(more, up=True)} more memory on each device"


def _with_default_schedule(problem: JointProblem) -> JointProblem:
    return msgspec.structs.replace(problem, schedules=(DEFAULT_SCHEDULE,))


def _microbatches(problem: JointProblem, counted: int) -> str:
    """Return the count, and whether its costs are interpolated."""
    priced = {w.rows for w in problem.works}
    rows = {
        count_microbatch_rows(problem.batch, counted, option.data) for option in problem.options
    }
    guess = "" if rows - {0} <= priced else " (estimated)"
    return f"{counted} microbatches{guess}"
