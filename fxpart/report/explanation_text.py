"""A plan as text: decisions, step time, memory, certificate and rejected alternatives."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from fxpart import units
from fxpart.plan.model import Certificate, Plan, PlanInput
from fxpart.plan.number_ranges import format_numbers
from fxpart.plan.summary import (
    describe_check,
    describe_results,
    describe_schedule,
    throughput_rows,
)
from fxpart.report import sharding
from fxpart.report.explanation import (
    AsynchronyFigures,
    Explanation,
    RejectedAlternative,
)
from fxpart.report.explanation_builder import explanation
from fxpart.report.stage_tables import (
    asynchrony_table,
    memory_table,
    mode_rows,
    replica_lines,
    stage_table,
)
from fxpart.report.table import shortened, table


def explain(plan: Plan) -> str:
    """Return about 40 lines and two for each stage."""
    found = explanation(plan)
    parts = [
        _summary(plan, found),
        _stages(found),
        replica_lines(plan),
        _step(found),
        _memory(found),
        _modes(found),
        _asynchrony(found),
        _queues(found),
        sharding.lines(plan),
        ["Certificate", *(line for text in certificate(plan) for line in _wrapped(text))],
        _rejected("Rejected alternatives", found.rejected),
        _rejected("With one decision changed", found.changes),
        _ties(plan),
        _pairs("Sources of the costs", plan.provenance),
        _pairs("Constraints", {k: str(v) for k, v in plan.constraints.items()}),
        _not_runnable(found),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _order(plan: Plan) -> str:
    return f"{shortened(format_numbers(plan.order), 100)} (blocks)"


def _summary(plan: Plan, found: Explanation) -> list[str]:
    model, step = plan.model, found.step
    rows = [
        ("model", f"{units.count(model.parameters)} parameters "
         f"({units.size(model.parameter_bytes)}), {model.nodes} ops in {model.blocks} blocks"),
        ("inputs", shortened(", ".join(map(_input, model.inputs)), 160) or "none"),
        ("batch", f"{plan.batch_size} samples in {units.plural(plan.microbatches, 'microbatch')}, "
         f"optimizer {plan.optimizer}, seed {plan.seed}"),
        ("step", f"{units.seconds(step.step_time)} predicted ({step.source}), pipeline bubble "
         f"{units.percent(step.bubble)}"),
        *throughput_rows(step.throughput),
        *([("verified", shortened(describe_check(plan.check), 240))] if plan.check else []),
        *([("order", _order(plan))] if plan.order else []),
        *([("results", describe_results(plan))] if plan.equivalence else []),
        *(("host", line) for line in contention_lines(found)),
        *([("sharding", sharding.headline(plan))] if plan.sharding is not None else []),
    ]  # fmt: skip
    head = (
        f"{shortened(model.name, 60)} on {shortened(plan.cluster.name, 40)}: "
        f"{units.plural(found.stages, 'stage')} on {units.plural(found.ranks, 'rank')}"
        f"{spare(found)}, schedule {describe_schedule(plan)}"
    )
    return [head, *(line for name, value in rows for line in _row(name, value))]


def _row(name: str, value: str) -> list[str]:
    """Return a row of the summary, wrapped below its value."""
    return textwrap.wrap(
        f"{name:<11}{value}", 108, initial_indent="  ", subsequent_indent=" " * 13,
        break_on_hyphens=False,
    )  # fmt: skip


def contention_lines(found: Explanation) -> list[str]:
    """Return a line on CPU contention for each host that ranks share."""
    return [
        f"CPU contention of rank {shortened(given.ranks, 24)}: a computation takes "
        f"{given.slowdown[-1]:.3g} times as long while all compute, {given.slowdown[0]:.3g} alone "
        f"({given.assumed:.3g} in the seconds below)"
        for given in found.hosts
    ]


def spare(found: Explanation) -> str:
    """Return how many devices the cluster has, if not all are used."""
    return f" of {found.devices} devices" if found.devices > found.ranks else ""


def _input(item: PlanInput) -> str:
    """Return an input as "input_ids int64[s0*, 64]"; the star marks the batch dimension."""
    dims = [f"{d}*" if i == item.batch_dim else str(d) for i, d in enumerate(item.shape)]
    return f"{item.name} {item.dtype}[{', '.join(dims)}]"


def _stages(found: Explanation) -> list[str]:
    return [
        "Stages (F, B, transfer per microbatch; per step: gradient reduction, optimizer, runtime)",
        *_indented(stage_table(found)),
    ]


def _step(found: Explanation) -> list[str]:
    heads, *rows = step_rows(found)
    return [
        f"Breakdown of the closed form (stage {found.bottleneck.stage})",
        *_indented(table(heads, "<>>", rows)),
        *(line for text in bottleneck_lines(found) for line in _wrapped(text)),
    ]


def step_rows(found: Explanation) -> list[tuple[str, ...]]:
    """Return the parts of the closed form and their sum, as rows under a row of heads."""
    step = found.step
    rows = [
        (name, units.seconds(seconds), units.percent(step.shares[name]))
        for name, seconds in step.parts.named().items()
        if seconds
    ]
    whole = ("closed form", units.seconds(step.closed_form_seconds), units.percent(1.0))
    return [("", "seconds", "share"), *rows, whole]


def bottleneck_lines(found: Explanation) -> list[str]:
    """Return sentences on the bottleneck stage and the next one."""
    given = found.bottleneck
    lines = [
        f"Stage {given.stage} is the bottleneck: {units.seconds(given.microbatch_seconds)} per "
        f"microbatch, balance (max/mean) {given.balance:.2f}, and "
        f"{units.seconds(given.step_only_seconds)} per step; {given.largest} takes "
        f"{units.percent(given.largest_share)} of its time."
    ]
    if given.as_slow:
        are = "is" if given.as_slow == 1 else "are"
        lines.append(f"{units.plural(given.as_slow, 'other stage')} {are} as slow, within 0.1 %.")
    if given.second is not None and given.second_bound_seconds is not None:
        lines.append(
            f"The next is stage {given.second}: {units.seconds(given.second_bound_seconds)} "
            f"instead of {units.seconds(given.bound_seconds)} without the time that the pipeline "
            "needs to fill."
        )
    return lines


def _memory(found: Explanation) -> list[str]:
    text = [line for sentence in memory_lines(found) for line in _wrapped(sentence)]
    return ["Peak memory by rank", *_indented(memory_table(found)), *text]


def _modes(found: Explanation) -> list[str]:
    """Return the section on the modes that were compared by time to a target loss."""
    if not found.modes:
        return []
    heads, *rows = mode_rows(found.modes)
    text = (
        "The time is the step time multiplied by the steps to the target loss relative to "
        "synchronous training, as measured by emulation, with their 95 % interval over seeds. "
        "Between measured delays the logarithm of the steps is interpolated linearly."
    )
    rows_ = table(heads, "<<>>>>>><", rows)
    return ["Modes by time to the target loss", *_wrapped(text), *_indented(rows_)]


def _asynchrony(found: Explanation) -> list[str]:
    """Return the section on the asynchronous pipeline."""
    given = found.asynchrony
    if given is None:
        return []
    text = [line for sentence in asynchrony_lines(given) for line in _wrapped(sentence)]
    return ["Asynchronous pipeline", *text, *_indented(asynchrony_table(given))]


def _queues(found: Explanation) -> list[str]:
    """Return the section on queue routing by staleness."""
    given = found.queues
    if given is None:
        return []
    rows = [(", ".join(map(str, given.staleness)) + " (plan)", given.seconds)]
    rows += list(given.others.items())
    round_robin = given.round_robin_seconds
    shown = [
        (name, units.seconds(seconds), f"{round_robin / seconds:.2f}" if seconds else "-")
        for name, seconds in rows
    ]
    return [
        "Queue routing (simulated without CPU contention)",
        *_indented(table(("staleness", "minibatch", "speedup over round-robin"), "<>>", shown)),
        f"  With round-robin routing a minibatch takes {units.seconds(round_robin)}.",
    ]


def asynchrony_lines(given: AsynchronyFigures) -> list[str]:
    """Return sentences on the weight mode and the speedup of an asynchronous pipeline."""
    lines = [f"No stage waits for the updates of another; weight mode {given.weights}."]
    if given.speedup is not None:
        lines.append(
            f"With a flush before each update, these stages take "
            f"{units.seconds(given.flushed_seconds)} per step (simulated): without flushes they "
            f"are {given.speedup:.2f} times as fast. Equal stages that only compute gain "
            f"(m + S - 1) / m = {given.speedup_bound:.2f}."
        )
    return lines


def memory_lines(found: Explanation) -> list[str]:
    """Return sentences on the ranks with the least free memory, and on what memory prevents."""
    given = found.fullest
    lines = [
        f"Stage {given.stage} (rank {shortened(given.ranks, 24)}) has the least free memory: "
        f"{units.size(given.free)} of {units.size(given.limit)}."
    ]
    if given.offload != "none":
        lines.append(
            f"offload={given.offload}: at most {units.size(given.host)} per rank in host memory."
        )
    if given.resident:
        lines.append(
            f"Its process takes {units.size(given.resident)} at the peak: "
            f"{units.size(given.total)} of tensors, {units.size(given.process)} for interpreter "
            f"and libraries, and {units.size(given.allocator)} of allocator overhead and spread "
            "between equal runs, as measured on this host."
        )
    if found.binding:
        best = min(found.binding, key=lambda r: r.unfit_slower or 0.0)
        lines.append(
            f"Memory is the limit: {named(best)} has a closed form of "
            f"{units.seconds(best.unfit_seconds or 0.0)} ({relative(best.unfit_slower)}), but "
            f"{best.why}."
        )
    elif found.rejected or found.changes:
        lines.append("No rejected alternative would be faster with more memory.")
    return lines


def named(other: RejectedAlternative) -> str:
    """Return a rejected choice by its degrees, or by its size."""
    pieces = units.plural(other.microbatches, "microbatch")
    return other.what or f"{units.plural(other.stages, 'stage')}, {pieces}"


def relative(share: float | None) -> str:
    """Return a difference as "+3.1 %", "" where it is not known."""
    return "" if share is None else f"{share:+.1%}".replace("%", " %")


def certificate(plan: Plan) -> list[str]:
    """Return the certificates as sentences: of the degrees where they were searched, and the cuts.

    Their objectives are closed forms, not the step time.
    """
    given, whole = plan.certificate, plan.degrees
    lines = [] if whole is None else [f"Degrees: {_proven(whole, 'best found')}"]
    solvers = given.solver if whole is None else " and ".join({whole.solver: 0, given.solver: 0})
    return [
        *lines,
        f"Stages: {_proven(given)}",
        f"Solved by {solvers}. The objective is the closed form of the step under the predicted "
        f"costs; the step time is found by {plan.prediction.method} of the plan's schedule.",
    ]


def _proven(given: Certificate, best: str = "best found within the time limit") -> str:
    status = {
        "optimal": "optimal",
        "within gap": "within the requested gap of the optimum",
        "best found": best,
    }[given.status]
    over = f" Search space: {given.over}." if given.over else ""
    return (
        f"{status}; objective {units.seconds(given.objective)}, lower bound "
        f"{units.seconds(given.lower_bound)}, gap {units.percent(given.gap)}.{over}"
    )


def _rejected(title: str, others: tuple[RejectedAlternative, ...]) -> list[str]:
    if not others:
        return []
    heads, *rows = rejected_rows(others)
    return [title, *_indented(table(heads, "<>><><"[-len(heads) :], rows))]


def rejected_rows(others: Sequence[RejectedAlternative]) -> list[tuple[str, ...]]:
    """Return rejected choices as rows under a row of heads; an empty first column is left out."""
    heads = ("choice", "stages", "microbatches", "schedule", "closed form", "reason")
    first = 0 if any(other.what for other in others) else 1
    return [row[first:] for row in (heads, *map(_rejected_row, others))]


def _rejected_row(other: RejectedAlternative) -> tuple[str, ...]:
    closed = "-"
    if other.closed_form_seconds is not None:
        closed = f"{units.seconds(other.closed_form_seconds)} ({relative(other.slower)})"
    elif other.unfit_seconds is not None:
        closed = f"({units.seconds(other.unfit_seconds)} if it fit)"
    return (
        shortened(other.what, 60) or "-", str(other.stages), str(other.microbatches),
        other.schedule or "-", closed, shortened(other.why, 110),
    )  # fmt: skip


def _ties(plan: Plan) -> list[str]:
    lines = []
    for tie in plan.ties:
        names = shortened(" = ".join(tie.names), 60)
        if len(tie.stages) == 1:
            lines.append(f"  {names}: all uses on stage {tie.owner}")
            continue
        others = ", ".join(str(s) for s in tie.stages if s != tie.owner)
        lines.append(f"  {names}: stage {tie.owner} owns it, copies on {others}; gradients reduced")
    return ["Tied parameters", *lines] if lines else []


def _pairs(title: str, pairs: dict[str, str]) -> list[str]:
    if not pairs:
        return []
    rows = [(key, value) for key, value in sorted(pairs.items())]
    width = max(len(key) for key, _ in rows)
    lines = [title]
    for key, value in rows:
        first, *more = textwrap.wrap(shortened(value, 400), 100) or [""]
        lines += [f"  {key:<{width}}  {first}", *(f"  {'':<{width}}  {text}" for text in more)]
    return lines


def _not_runnable(found: Explanation) -> list[str]:
    if not found.not_runnable:
        return []
    title = "This version cannot train by this plan (fxpart explain FXP306)"
    return [title, *(f"  {reason}" for reason in found.not_runnable)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="    ")


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
