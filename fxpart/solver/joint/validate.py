"""Validation of joint problems: reports every error, not just the first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fxpart.schedule.spec import INTERLEAVED, list_closed_forms
from fxpart.solver.joint.problem import JointProblem, LinearCost, ParameterFootprint
from fxpart.solver.schedule_costs import has_pieces, is_stream, keeps_all
from fxpart.solver.validate import (
    LARGEST,
    MOST,
    Fault,
    check_block_count,
    check_flow,
    check_row,
    is_ascending,
    is_exact,
    raise_faults,
)


def check_joint_problem(problem: JointProblem) -> None:
    """Raise FXP206 with every error in ``problem``."""
    checks = [_shape, _check_constraints, _pools, _options]
    if not any(True for _ in _shape(problem)):
        checks += [_layouts, _works, _values, _sizes]
    raise_faults(problem, checks)


def _shape(problem: JointProblem) -> Iterator[Fault]:
    for name in ("blocks", "pools", "layouts", "options", "microbatches", "schedules"):
        if not getattr(problem, name):
            yield name, "The list is empty."
    yield from check_block_count(len(problem.blocks))
    if len(problem.kinds) != len(problem.blocks):
        yield "kinds", f"There are {len(problem.kinds)} entries for {len(problem.blocks)} blocks."
    elif any(not 0 <= k < len(problem.blocks) for k in problem.kinds):
        yield "kinds", f"A kind is not one of 0 to {len(problem.blocks) - 1}."
    if not 1 <= problem.batch <= MOST:
        yield "batch", f"{problem.batch} rows are not within 1 and 2**31."
    if any(not 1 <= m <= MOST for m in problem.microbatches):
        yield "microbatches", "A count is not within 1 and 2**31."
    if problem.min_stages < 1 or problem.max_stages < 1:
        # min_stages > max_stages is an unsatisfiable request, not an invalid problem
        yield "min_stages, max_stages", "A pipeline has at least one stage."
    if any(v < 2 for v in problem.virtual):
        yield "virtual", f"{INTERLEAVED} pipelines have at least 2 pieces per stage."
    known = list_closed_forms()
    if wrong := [name for name in problem.schedules if name not in known]:
        names = ", ".join(known)
        yield "schedules", f"{wrong[0]!r} has no closed form. Schedules with one: {names}."
    elif any(map(has_pieces, problem.schedules)) and not problem.virtual:
        yield "virtual", f"The schedule {INTERLEAVED} needs a number of pieces per stage."


def _check_constraints(problem: JointProblem) -> Iterator[Fault]:
    n = len(problem.blocks)
    for name in ("no_cut_after", "cut_after"):
        if any(not 0 <= b < n for b in getattr(problem, name)):
            yield name, f"A block is not one of 0 to {n - 1}."
    if given := len(problem.stage_tensor):
        if not given == problem.min_stages == problem.max_stages:
            yield "stage_tensor", f"It has the degrees of {given} stages, others are allowed."
        if len({option.data for option in problem.options}) > 1:
            yield "stage_tensor", "The options have several data degrees."
    for index, pin in enumerate(problem.pins):
        if not 0 <= pin.first <= pin.last < n:
            yield f"pins[{index}]", f"Blocks {pin.first} to {pin.last} are not among {n}."


def _pools(problem: JointProblem) -> Iterator[Fault]:
    for index, pool in enumerate(problem.pools):
        where = f"pools[{index}] ({pool.name})"
        if not 1 <= pool.devices <= MOST or pool.host < 1:
            yield where, "Devices and devices per host must be at least 1 (devices at most 2**31)."
        if not is_exact(pool.memory):
            yield where, "The memory is not from 0 to 2**60 bytes."
        yield from _line(f"{where}.transfer", pool.transfer)


def _options(problem: JointProblem) -> Iterator[Fault]:
    for index, one in enumerate(problem.options):
        where = f"options[{index}]"
        if not 0 <= one.pool < len(problem.pools):
            yield f"{where}.pool", f"{one.pool} is not one of {len(problem.pools)} pools."
        for name in ("reduce", "gather", "reduce_experts", "gather_experts"):
            yield from _line(f"{where}.{name}", getattr(one, name))
        if not 0 <= one.layout < len(problem.layouts):
            yield f"{where}.layout", f"{one.layout} is not one of {len(problem.layouts)} layouts."
        elif not 1 <= one.data <= MOST:
            yield f"{where}.data", f"{one.data} replicas are not within 1 and 2**31."
        elif (
            problem.layouts[one.layout].expert < 1 or one.data % problem.layouts[one.layout].expert
        ):
            yield f"{where}.data", "The layout's expert degree does not divide it."
        elif one.shard_degree and (
            not 1 < one.shard_degree < one.data
            or one.data % one.shard_degree
            or problem.layouts[one.layout].expert > 1
            or not one.zero
        ):
            why = "It is no divisor of the replicas above 1, or there is no ZeRO or are experts."
            yield f"{where}.shard_degree", why


def _layouts(problem: JointProblem) -> Iterator[Fault]:
    kinds = max(problem.kinds) + 1
    for index, layout in enumerate(problem.layouts):
        where = f"layouts[{index}]"
        if layout.tensor < 1 or layout.expert < 1:
            yield where, "A degree is less than 1."
        if layout.context not in (1, layout.tensor):
            yield where, "The context degree is neither 1 nor the tensor degree."
        yield from check_row(f"{where}.buffer", layout.buffer, kinds)
        for name in ("tie_weight", "tie_gradient", "tie_optimizer"):
            yield from check_row(f"{where}.{name}", getattr(layout, name), len(problem.ties))
        for name, state in (("dense", layout.dense), ("experts", layout.experts)):
            if state is not None:
                yield from _state(f"{where}.{name}", state, kinds, len(problem.pools))


def _state(where: str, state: ParameterFootprint, kinds: int, pools: int) -> Iterator[Fault]:
    for name in ("weight", "gradient", "optimizer"):
        yield from check_row(f"{where}.{name}", getattr(state, name), kinds)
    if state.unsent:
        yield from check_row(f"{where}.unsent", state.unsent, kinds)
        if any(a > b for a, b in zip(state.unsent, state.gradient, strict=False)):
            yield f"{where}.unsent", "There are more unsent bytes than gradient bytes."
    if len(state.step) != pools:
        yield f"{where}.step", f"There are {len(state.step)} rows for {pools} pools."
    for pool, row in enumerate(state.step):
        yield from check_row(f"{where}.step[{pool}]", row, kinds)


def _works(problem: JointProblem) -> Iterator[Fault]:
    kinds = max(problem.kinds) + 1
    for index, work in enumerate(problem.works):
        where = f"works[{index}]"
        if not 0 <= work.pool < len(problem.pools):
            yield f"{where}.pool", f"{work.pool} is not one of {len(problem.pools)} pools."
        if not 0 <= work.layout < len(problem.layouts):
            yield f"{where}.layout", f"{work.layout} is not one of {len(problem.layouts)} layouts."
        if work.rows < 1:
            yield f"{where}.rows", "A microbatch has at least one row."
        for name in ("forward", "backward", "collective", "activation", "workspace"):
            yield from check_row(f"{where}.{name}", getattr(work, name), kinds)
    keys = Counter((w.pool, w.layout, w.rows, w.recompute) for w in problem.works)
    for key, times in keys.items():
        if times > 1:
            yield "works", f"{times} works have pool, layout, rows and recompute {key}."


def _values(problem: JointProblem) -> Iterator[Fault]:
    n = len(problem.blocks)
    for index, value in enumerate(problem.boundaries):
        where = f"boundaries[{index}]"
        yield from check_flow(where, value, n)
        if not is_exact(value.row_bytes) or not is_exact(value.fixed_bytes):
            yield where, "A size is not from 0 to 2**60 bytes."
    for index, tie in enumerate(problem.ties):
        if not tie.blocks or not is_ascending(tie.blocks, n):
            yield f"ties[{index}] ({tie.name})", f"{tie.blocks} are not ascending block indices."


def _sizes(problem: JointProblem) -> Iterator[Fault]:
    """Check that all bytes together stay exact, even if a stage has the maximum in flight."""
    most = max(problem.microbatches)
    deep = max(problem.max_stages, 1)
    flying = most if any(map(keeps_all, problem.schedules)) else min(most, deep)
    if any(map(is_stream, problem.schedules)):  # in flight of several minibatches
        flying = max(flying, deep)
    state = sum(
        sum(map(sum, (part.weight, part.gradient, part.optimizer)))
        for layout in problem.layouts
        for part in (layout.dense, layout.experts)
        if part is not None
    )
    state += sum(
        sum(map(sum, (x.buffer, x.tie_weight, x.tie_gradient, x.tie_optimizer)))
        for x in problem.layouts
    )
    repeats = max(Counter(problem.kinds).values())
    work = max((sum(w.activation) + max(w.workspace, default=0) for w in problem.works), default=0)
    rows = max((w.rows for w in problem.works), default=1)
    values = 2 * sum((v.row_bytes * rows + v.fixed_bytes) * v.widened for v in problem.boundaries)
    if (flying + 1) * (repeats * (state + work) + values) > LARGEST:
        yield "bytes", "The sizes add up to more than 2**60 bytes."


def _line(where: str, line: LinearCost) -> Iterator[Fault]:
    if not is_exact(line.latency) or not is_exact(line.inverse):
        yield where, "Latency or inverse is not a number from 0 to 2**60."
