"""Estimate a plan after a change of the cluster or of decisions, and plan again.

Estimates come from the costed problem beside the plan, without model, torch and cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fxpart.cluster.link_index import has_equal_links
from fxpart.errors import error
from fxpart.plan.model import Plan
from fxpart.schedule.spec import list_closed_forms
from fxpart.solver.joint.choice_translation import ChoiceTranslation
from fxpart.solver.joint.constraints.apply import apply_constraints
from fxpart.solver.joint.constraints.parse import PlanConstraint
from fxpart.solver.joint.objective import Degrees, JointEvaluation, degrees, evaluate
from fxpart.solver.joint.problem import (
    JointChoice,
    JointProblem,
    JointSolution,
    count_option_devices,
)
from fxpart.solver.joint.what_if import with_devices, with_links, with_memory, with_microbatches
from fxpart.units import plural


@dataclass(frozen=True)
class WhatIfChange:
    """A change of cluster or decisions; zero, one and empty values change nothing.

    devices: their total number (of the only type) or by type, "h100=6". without: ranks of the plan
    whose devices are removed. bandwidth, latency, memory: factors. microbatches: candidate numbers.
    constraints: those that fix or forbid decisions.
    """

    devices: str = ""
    without: tuple[int, ...] = ()
    bandwidth: float = 1.0
    latency: float = 1.0
    memory: float = 1.0
    microbatches: tuple[int, ...] = ()
    constraints: tuple[PlanConstraint, ...] = ()

    def __str__(self) -> str:
        words = [f"devices {self.devices}"] if self.devices else []
        words += [f"without rank {rank}" for rank in self.without]
        words += [
            f"{name} x{factor:g}"
            for name in ("bandwidth", "latency", "memory")
            if (factor := getattr(self, name)) != 1
        ]
        if self.microbatches:
            words.append(f"microbatches {', '.join(map(str, self.microbatches))}")
        return ", ".join([*words, *map(str, self.constraints)]) or "nothing changed"


def changed(problem: JointProblem, plan: Plan, change: WhatIfChange) -> JointProblem:
    """Return the changed problem; raises FXP109 for unknown devices, FXP202 for constraints."""
    counts = _counts(problem, plan, change)
    if counts != [pool.devices for pool in problem.pools]:
        problem = with_devices(problem, counts)
    if change.bandwidth != 1 or change.latency != 1:
        problem = with_links(problem, change.bandwidth, change.latency)
    if change.memory != 1:
        problem = with_memory(problem, change.memory)
    if change.microbatches:
        problem = with_microbatches(problem, change.microbatches)
    return apply_constraints(problem, change.constraints)


def _counts(problem: JointProblem, plan: Plan, change: WhatIfChange) -> list[int]:
    """Return the number of devices by pool after the change."""
    counts = [pool.devices for pool in problem.pools]
    names = [pool.name for pool in problem.pools]
    for part in filter(None, change.devices.split(",")):
        name, _, number = part.rpartition("=")
        place = names.index(name) if name in names else 0 if not name and len(names) == 1 else None
        if place is None or not number.strip().isdecimal() or len(number) > 9:
            raise error(
                "FXP109",
                where=f"devices {part!r}",
                why="the value is not a number of devices of a type in the problem",
                fix=" or ".join(f"{n}={c}" for n, c in zip(names, counts, strict=True)),
            )
        counts[place] = int(number)
    chosen = choice_of(problem, plan)
    for rank in change.without:
        stage = next((s.index for s in plan.stages if rank in s.ranks), None)
        if stage is None:
            last = sum(len(s.ranks) for s in plan.stages) - 1
            why, fix = "the plan has no such rank", f"use 0 to {last}"
            raise error("FXP109", where=f"without rank {rank}", why=why, fix=fix)
        counts[problem.options[chosen.options[stage]].pool] -= 1
    if sum(pool.devices for pool in problem.pools) == 1 < sum(counts):
        raise error(
            "FXP109",
            where=f"devices {change.devices}",
            why="the plan was priced on one device, so that the costs of communication are unknown",
            fix="plan again for a cluster with links: fxpart plan MODEL --cluster FILE",
        )
    return counts


def list_unpriced(problem: JointProblem, plan: Plan, change: WhatIfChange) -> tuple[str, ...]:
    """Return what the change needs and the problem has no price of; empty: the answer is exact.

    An exact answer is that of the problem of the changed cluster.
    """
    old, new = [pool.devices for pool in problem.pools], _counts(problem, plan, change)
    found = []
    if any(b > a for a, b in zip(old, new, strict=True)):
        found.append(f"degrees of more than {plural(max(old), 'device')}: only stages are added")
    if new != old and not has_equal_links(plan.cluster):
        found.append("the links between the devices that are left, as links differ")
    if problem.worst:
        found.append("the devices and links themselves: all were priced as the slowest of them")
    if (change.bandwidth, change.latency) != (1, 1) and any(
        any(work.collective) for work in problem.works
    ):
        found.append(
            "strategies of sharded ops at other speeds of links: collectives within blocks are "
            "those of the same strategies, and scale with the bandwidth"
        )
    if counts := sorted({*change.microbatches} - {*problem.microbatches}):
        numbers = ", ".join(map(str, counts))
        found.append(f"{numbers} microbatches: their costs are interpolated")
    return tuple(found)


def choice_of(problem: JointProblem, plan: Plan) -> JointChoice:
    """Return the plan's decisions as a choice of the problem.

    Raises FXP303 where the problem does not have them, and FXP109 for a schedule without a closed
    form and for replicated stages.
    """
    schedule = plan.schedule
    if schedule not in list_closed_forms():
        raise error(
            "FXP109",
            where=f"a plan of schedule {plan.schedule}",
            why="the estimates are closed forms, and this schedule has none",
            fix=f"plan with one of the schedules {', '.join(list_closed_forms())}",
        )
    if plan.replicas:
        raise error(
            "FXP109",
            where="a plan with replicated stages",
            why="the costed problem beside the plan has no replicated stages",
            fix="plan for the changed cluster, or plan with --constraint copies=none",
        )
    options = []
    for stage in plan.stages:
        wanted = _decided(plan, stage.index)
        found = [i for i in range(len(problem.options)) if degrees(problem, i) == wanted]
        found.sort(key=lambda i: _pool(problem, i) != stage.device)  # its own type first
        if not found:
            raise error(
                "FXP303",
                where=f"stage {stage.index}",
                why="the costed problem beside the plan does not have its degrees",
                fix="plan again to write both files",
            )
        options.append(found[0])
    pieces = sorted(span for stage in plan.stages for span in stage.spans)
    return JointChoice(
        microbatches=plan.microbatches,
        schedule=schedule,
        starts=tuple(first for first, _ in pieces),
        options=tuple(options),
        virtual=plan.virtual,
    )


def _pool(problem: JointProblem, option: int) -> str:
    return problem.pools[problem.options[option].pool].name


def _decided(plan: Plan, index: int) -> Degrees:
    stage = plan.stages[index]
    return Degrees(
        stage.data_parallel, stage.tensor_parallel, stage.expert_parallel, stage.zero,
        stage.recompute, stage.context_parallel, stage.shard_degree, plan.offload,
    )  # fmt: skip


@dataclass(frozen=True)
class WhatIfResult:
    """Closed-form estimates of one plan before and after a change, and of a new plan.

    before: the plan without the change; kept: its decisions after the change, None where the
    changed problem does not have them. solution, after: the new plan and its estimate. was, now:
    the decisions of both as text. unpriced: see :func:`list_unpriced`.
    """

    change: WhatIfChange
    problem: JointProblem
    before: JointEvaluation
    kept: JointEvaluation | None
    solution: JointSolution
    after: JointEvaluation | None
    was: tuple[str, ...]
    now: tuple[str, ...]
    unpriced: tuple[str, ...]


def solve_whatif(
    problem: JointProblem,
    plan: Plan,
    change: WhatIfChange,
    *,
    time_limit: float = 30.0,
    seed: int = 0,
) -> WhatIfResult:
    """Solve the changed problem, and cost the old decisions under it."""
    from fxpart.solver.joint.portfolio import solve

    chosen = choice_of(problem, plan)
    new = changed(problem, plan, change)
    try:
        kept = evaluate(new, ChoiceTranslation(problem, new)(chosen))
    except LookupError:
        kept = None
    solution = solve(new, time_limit=time_limit, seed=seed)
    found = solution.choice
    return WhatIfResult(
        change=change,
        problem=new,
        before=evaluate(problem, chosen),
        kept=kept,
        solution=solution,
        after=None if found is None else evaluate(new, found),
        was=decisions(problem, chosen),
        now=() if found is None else decisions(new, found),
        unpriced=list_unpriced(problem, plan, change),
    )


def decisions(problem: JointProblem, choice: JointChoice) -> tuple[str, ...]:
    """Return a choice as text: schedule and counts, then each run of stages with equal options."""
    count = len(choice.options)
    pieces = plural(choice.microbatches, "microbatch")
    head = f"{choice.schedule}, {pieces}, {plural(count, 'stage')}"
    if choice.virtual > 1:
        head += f" with {choice.virtual} virtual stages per rank"
    sizes = [
        after - start
        for start, after in zip(
            choice.starts, (*choice.starts[1:], len(problem.blocks)), strict=True
        )
    ]
    rows = []
    first = 0
    while first < count:
        last = first
        while last + 1 < count and choice.options[last + 1] == choice.options[first]:
            last += 1
        rows.append(f"{_stages(first, last)}: {_option(problem, choice.options[first])}")
        first = last + 1
    used = Counter(
        problem.pools[problem.options[o].pool].name
        for o in choice.options
        for _ in range(count_option_devices(problem, problem.options[o]))
    )
    devices = ", ".join(f"{n} {name}" for name, n in sorted(used.items()))
    return (head, f"on {devices}", *rows, f"blocks per stage: {_runs(sizes)}")


def _stages(first: int, last: int) -> str:
    return f"stage {first}" if first == last else f"stages {first}-{last}"


def _option(problem: JointProblem, index: int) -> str:
    data, tensor, expert, zero, recompute, context, shards, offload = degrees(problem, index)
    words = [f"dp {data}", f"tp {tensor}"]
    words += [f"cp {context}"] if context > 1 else []
    words += [f"ep {expert}"] if expert > 1 else []
    words += [f"ZeRO-{zero}"] if zero else []
    words += [f"shard degree {shards}"] if shards else []
    words += [f"{recompute} recompute"] if recompute != "none" else []
    words += [f"offload {offload}"] if offload != "none" else []
    return " x ".join(words[:2]) + "".join(f", {w}" for w in words[2:])


def _runs(sizes: Sequence[int]) -> str:
    """Return run lengths: 7, 6, 6, 6 as "7, 6 x3"."""
    words: list[str] = []
    index = 0
    while index < len(sizes):
        end = index
        while end < len(sizes) and sizes[end] == sizes[index]:
            end += 1
        words.append(str(sizes[index]) + (f" x{end - index}" if end - index > 1 else ""))
        index = end
    return ", ".join(words)
