"""Explanations why no plan fits a joint problem, and the smallest verified changes that help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxpart.errors import Problem
from fxpart.solver.infeasible import describe_blocks, too_little_memory, too_little_time
from fxpart.solver.joint.constraint_conflicts import RelaxableConstraints, with_unlimited_memory
from fxpart.solver.joint.constraints.parse import PlanConstraint
from fxpart.solver.joint.feasibility import find_feasible_joint_choice
from fxpart.solver.joint.memory_bounds import compute_min_state_bytes, list_min_unit_bytes
from fxpart.solver.joint.objective import JointScorer, degrees
from fxpart.solver.joint.problem import (
    JointChoice,
    JointProblem,
    count_microbatch_rows,
    count_option_devices,
)
from fxpart.solver.joint.remedies import extra_memory, remedies
from fxpart.solver.remedies import format_byte_count
from fxpart.solver.work import SolverTimeout, work_seconds


def explain_joint_infeasible(
    problem: JointProblem,
    *,
    wider: JointProblem | None = None,
    constraints: Sequence[PlanConstraint] = (),
    time_limit: float = 10.0,
) -> tuple[Problem, ...]:
    """Explain why no plan is possible, as problems to raise.

    wider: the same problem with more options. constraints: the constraints that made ``problem``
    out of ``wider``; conflicts are then described by them, otherwise by the problem's own limits.
    FXP202 if limits contradict each other regardless of memory, FXP201 if devices or rows are too
    few for any stage, FXP204 if memory is too small; each with changes for which a plan was
    verified to fit. FXP205 if a plan does exist, or ``time_limit`` (seconds) was too short.
    """
    deadline = work_seconds() + time_limit
    limits = RelaxableConstraints(problem, wider, constraints)
    try:
        if find_feasible_joint_choice(problem, deadline) is not None:
            return (too_little_time("A plan fits, but none was found within the time limit."),)
        if find_feasible_joint_choice(with_unlimited_memory(problem), deadline) is None:
            blamed = limits.conflict(deadline, with_unlimited_memory)
            if blamed:
                return (_contradiction(problem, limits, wider, blamed, deadline),)
            return (_nothing_runs(problem, limits, wider, deadline),)
    except SolverTimeout:
        return (too_little_time("The time limit was too short to decide whether a plan fits."),)
    lacking = extra_memory(problem, (work_seconds() + deadline) / 2)  # leave time for remedies
    if lacking is None:
        return (
            too_little_time(
                "The time limit was too short to determine how much memory is missing."
            ),
        )
    return (_too_little_memory(problem, limits, wider, lacking, deadline),)


def _contradiction(
    problem: JointProblem,
    limits: RelaxableConstraints,
    wider: JointProblem | None,
    blamed: Sequence[int],
    deadline: float,
) -> Problem:
    """Return the limits that leave no choice, regardless of memory."""
    names = [limits.texts[i] for i in blamed]
    fixes = list(remedies(problem, limits, wider, None, deadline))
    return Problem(
        "FXP202",
        where="; ".join(names),
        why=("This constraint leaves" if len(names) == 1 else "Together they leave")
        + f" no choice, regardless of memory: {', '.join(_facts(problem))}.",
        fix="; or ".join(fixes) or "Remove one of them; memory may be too small as well.",
    )


def _facts(problem: JointProblem) -> Iterator[str]:
    """Yield pieces, devices, and the minimum devices of a stage."""
    n = len(problem.blocks)
    pieces = n - len({b for b in problem.no_cut_after if b < n - 1})
    yield f"{n} blocks can be cut into at most {pieces} {'piece' if pieces == 1 else 'pieces'}"
    for p, pool in enumerate(problem.pools):
        taken = [count_option_devices(problem, o) for o in problem.options if o.pool == p]
        if taken:
            yield f"a stage needs {min(taken)} or more of {pool.devices} devices of {pool.name}"
    yield f"{problem.min_stages} to {problem.max_stages} stages"


def _nothing_runs(
    problem: JointProblem, limits: RelaxableConstraints, wider: JointProblem | None, deadline: float
) -> Problem:
    """Return the problem if no option has enough devices and rows, or too few options have."""
    rows = [
        o
        for o in problem.options
        if any(count_microbatch_rows(problem.batch, m, o.data) for m in problem.microbatches)
    ]
    why = ", ".join(_facts(problem))
    if not rows:
        counts = ", ".join(map(str, problem.microbatches))
        why = (
            f"a batch of {problem.batch} cannot be cut into {counts} microbatches for "
            f"{min(o.data for o in problem.options)} or more replicas"
        )
    return Problem(
        "FXP201",
        where=f"{len(problem.blocks)} blocks on "
        + " and ".join(f"{pool.devices} {pool.name}" for pool in problem.pools),
        why=why,
        fix="; or ".join(remedies(problem, limits, wider, None, deadline)),
    )


def _too_little_memory(
    problem: JointProblem,
    limits: RelaxableConstraints,
    wider: JointProblem | None,
    lacking: tuple[int, JointChoice],
    deadline: float,
) -> Problem:
    """Return the worst stage of the closest choice, unavoidable facts, and the verified fixes."""
    more, choice = lacking
    stages = [
        (stage.pieces[0][0], stage.pieces[-1][1], _shape(problem, stage.option), stage)
        for stage in JointScorer(problem).evaluate(choice).stages
    ]
    flight = f"{choice.microbatches} microbatches in flight, under {choice.schedule}"
    fixes = remedies(problem, limits, wider, more, deadline)
    return too_little_memory(problem.blocks, stages, flight, fixes, _certain(problem))


def _certain(problem: JointProblem) -> Iterator[str]:
    """Yield memory that no choice can avoid."""
    there = sum(pool.devices * pool.memory for pool in problem.pools)
    state = compute_min_state_bytes(problem)
    if state > there:
        yield (
            f"parameters, gradients and optimizer state need at least "
            f"{format_byte_count(state)} in total, but "
            f"{sum(pool.devices for pool in problem.pools)} devices have {format_byte_count(there)}"
        )
    for first, last, need, room in list_min_unit_bytes(problem):
        if need > room:
            yield (
                f"{describe_blocks(problem.blocks, first, last)} alone needs at least "
                f"{format_byte_count(need)}, "
                f"more than the {format_byte_count(room)} of any device for it"
            )
            return


def _shape(problem: JointProblem, option: int) -> str:
    """Return a description of an option: devices and pool, and values that are not defaults."""
    data, tensor, expert, zero, recompute, context, shards, offload = degrees(problem, option)
    one = problem.options[option]
    texts = [f"dp={data}", f"tp={tensor}", f"ep={expert}", f"zero={zero}"]
    shown = [w for w, v in zip(texts, (data - 1, tensor - 1, expert - 1, zero), strict=True) if v]
    if shards:
        shown.append(f"shard_degree={shards}")
    if context > 1:
        shown.append(f"cp={context}")
    if recompute != "none":
        shown.append(f"recompute={recompute}")
    if offload != "none":
        shown.append(f"offload={offload}")
    count = count_option_devices(problem, one)
    name = problem.pools[one.pool].name
    where = f"each of {count} {name}" if count > 1 else name
    return f"{where} ({', '.join(shown)})" if shown else where
