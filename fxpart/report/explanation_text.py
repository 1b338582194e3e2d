"""A plan in words: what it decides, what that costs, how good it is, what it was chosen over."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from fxpart import units
from fxpart.plan.model import Certificate, Plan, PlanInput
from fxpart.plan.number_ranges import text_of
from fxpart.report import sharding
from fxpart.report.explanation import (
    AsynchronyFigures,
    Explanation,
    RejectedAlternative,
    StepFigures,
)
from fxpart.report.explanation_builder import explanation
from fxpart.report.replicas import copies_lines
from fxpart.report.stage_tables import memory_table, stage_table, stream_table
from fxpart.report.table import shortened, table
from fxpart.schedule.weight_modes import FLUSH


def explain(plan: Plan) -> str:
    """Plain text of about 40 lines and two for each stage, ending in a newline."""
    found = explanation(plan)
    parts = [
        _summary(plan, found),
        _stages(found),
        copies_lines(plan),
        _step(found),
        _memory(found),
        _stream(found),
        _queued(found),
        sharding.lines(plan),
        ["How good it is", *(line for words in certificate(plan) for line in _wrapped(words))],
        _rejected("Rejected", found.rejected),
        _rejected("With one decision changed", found.changes),
        _ties(plan),
        _pairs("Where the costs come from", plan.provenance),
        _pairs("Fixed by you", {k: str(v) for k, v in plan.constraints.items()}),
        _not_runnable(found),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _summary(plan: Plan, found: Explanation) -> list[str]:
    model, step = plan.model, found.step
    pieces = units.plural(plan.microbatches, "microbatch")
    rate = step.samples_per_second or 0.0
    return [
        f"{shortened(model.name, 60)} on {shortened(plan.cluster.name, 40)}: "
        f"{units.plural(found.stages, 'stage')} on {units.plural(found.ranks, 'rank')}"
        f"{spare(found)}, schedule {schedule(plan)}",
        f"  model      {units.count(model.parameters)} parameters "
        f"({units.size(model.parameter_bytes)}), {model.nodes} ops in {model.blocks} blocks",
        f"  inputs     {shortened(', '.join(map(_input, model.inputs)), 160) or 'none'}",
        f"  batch      {plan.batch_size} samples in {pieces}, optimizer {plan.optimizer}, "
        f"seed {plan.seed}",
        f"  step       {units.seconds(step.seconds)} predicted "
        f"({units.seconds(step.simulated_seconds)} by {describe_method(step.method)}"
        f"{_rehearsed(step)}), {rate:.4g} samples/s, "
        f"bubble {units.percent(step.bubble)}",
        *(
            [f"  check      {check_text(plan.check.status, plan.check.reason)}"]
            if plan.check
            else []
        ),
        *([f"  order      {shortened(text_of(plan.order), 100)} (blocks)"] if plan.order else []),
        *_results(plan),
        *(f"  host       {words}" for words in crowded_words(found)),
        *([f"  sharding   {sharding.headline(plan)}"] if plan.sharding is not None else []),
    ]


def _results(plan: Plan) -> list[str]:
    """What the plan promises of its results, compared with single-process training."""
    known = plan.equivalence
    if known is None:
        return []
    reasons = f": {'; '.join(known.reasons)}" if known.reasons else ""
    words = {
        "bitwise": "bitwise those of single-process training",
        "rounding": "those of single-process training up to rounding",
        "per microbatch": "computed per microbatch, not for the whole batch",
    }[known.promise]
    return textwrap.wrap(
        f"results    {words}{reasons}", 98, initial_indent="  ", subsequent_indent=" " * 13
    )


def _rehearsed(step: StepFigures) -> str:
    """What it took, where it was run, or else what runs of other plans make of the simulation."""
    if step.rehearsed_seconds:
        return f", {units.seconds(step.rehearsed_seconds)} when run"
    known = step.corrected_seconds
    return f", {units.seconds(known)} as other plans' runs correct it" if known else ""


def crowded_words(found: Explanation) -> list[str]:
    """Of each host that ranks share, how much longer its computations take."""
    return [
        f"shared by rank {shortened(given.ranks, 24)}: computations take {given.slowdown[-1]:.3g} "
        f"times as long while all compute, {given.slowdown[0]:.3g} alone "
        f"({given.assumed:.3g} in the seconds below)"
        for given in found.hosts
    ]


def schedule(plan: Plan) -> str:
    """The schedule, and the pieces of each stage where there are several."""
    pieces = f" of {plan.virtual} pieces a stage" if plan.virtual > 1 else ""
    weights = f" with weights {plan.weights}" if plan.weights != FLUSH else ""
    queues = " from queues" if plan.staleness else ""
    return f"{plan.schedule}{pieces}{queues}{weights}"


def spare(found: Explanation) -> str:
    """Of how many devices the ranks are, where some are left over."""
    return f" of {found.devices} devices" if found.devices > found.ranks else ""


def describe_method(method: str) -> str:
    """How the schedule's own time was found."""
    return method if method == "simulation" else f"the {method}, not simulated"


def _input(item: PlanInput) -> str:
    """An input as "input_ids int64[s0*, 64]": the star marks the dim that counts samples."""
    dims = [f"{d}*" if i == item.batch_dim else str(d) for i, d in enumerate(item.shape)]
    return f"{item.name} {item.dtype}[{', '.join(dims)}]"


def check_text(status: str, reason: str) -> str:
    """What is known of the captured program beside the module as written."""
    if status == "passed":
        return "two steps of the captured program equal those of the module as written"
    if status == "off":
        return "the captured program was not compared with the module (check=off)"
    return f"the captured program was not compared with the module: {shortened(reason, 160)}"


def _stages(found: Explanation) -> list[str]:
    return [
        "Stages (F, B and transfer per microbatch; step: sums, optimizer, runtime; once a step)",
        *_indented(stage_table(found)),
    ]


def _step(found: Explanation) -> list[str]:
    given = found.bottleneck
    named = found.step.parts.named()
    rows = [
        (name, units.seconds(seconds), units.percent(found.step.shares[name]))
        for name, seconds in named.items()
        if seconds
    ]
    return [
        f"Where the step goes (as stage {given.stage} spends it)",
        *_indented(table(("", "seconds", "share"), "<>>", rows)),
        *(line for words in pace_words(found) for line in _wrapped(words)),
    ]


def pace_words(found: Explanation) -> list[str]:
    """The bottleneck as sentences."""
    given = found.bottleneck
    words = [
        f"Stage {given.stage} sets the pace: {units.seconds(given.microbatch_seconds)} a "
        f"microbatch, {given.of_mean:.2f} times the mean, and "
        f"{units.seconds(given.step_only_seconds)} once a step; {given.largest} takes "
        f"{units.percent(given.largest_share)} of it."
    ]
    if given.as_slow:
        are = "is" if given.as_slow == 1 else "are"
        words.append(f"{units.plural(given.as_slow, 'other stage')} {are} as slow, within 0.1 %.")
    if given.second is not None and given.second_pace_seconds is not None:
        words.append(
            f"Next is stage {given.second}: {units.seconds(given.second_pace_seconds)} instead of "
            f"{units.seconds(given.pace_seconds)}."
        )
    return words


def _memory(found: Explanation) -> list[str]:
    words = [line for sentence in memory_words(found) for line in _wrapped(sentence)]
    return ["Peak memory by rank", *_indented(memory_table(found)), *words]


def _stream(found: Explanation) -> list[str]:
    """What asynchronous training gains and costs."""
    given = found.asynchrony
    if given is None:
        return []
    words = [line for sentence in stream_words(given) for line in _wrapped(sentence)]
    return ["Asynchronous training", *words, *_indented(stream_table(given))]


def _queued(found: Explanation) -> list[str]:
    """What queues gain, by how many updates may be missed."""
    given = found.queues
    if given is None:
        return []
    rows = [(", ".join(map(str, given.staleness)) + " (plan)", given.seconds)]
    rows += [(str(staleness), seconds) for staleness, seconds in given.others.items()]
    shown = [
        (words, units.seconds(seconds), f"{given.turns_seconds / seconds:.2f}" if seconds else "-")
        for words, seconds in rows
    ]
    return [
        "From queues (the dispatcher simulated, each rank as if it were alone on its host)",
        *_indented(table(("staleness", "a minibatch", "times as fast as turns"), "<>>", shown)),
        f"  In turns a step takes {units.seconds(given.turns_seconds)} then.",
    ]


def stream_words(given: AsynchronyFigures) -> list[str]:
    """What a stream gains, and by which weights, as sentences."""
    words = [f"No stage waits for an update of another; weights by the mode {given.weights}."]
    if given.faster is not None:
        words.append(
            f"A minibatch takes {units.seconds(given.seconds)} in the full stream, and "
            f"{units.seconds(given.flushed_seconds)} if these stages drained before each update: "
            f"{given.faster:.2f} times as fast, where equal stages with nothing else to do gain "
            f"(m + S - 1) / m = {given.at_most:.2f}."
        )
    return words


def memory_words(found: Explanation) -> list[str]:
    """The fullest ranks, and whether memory keeps the plan from being faster, as sentences."""
    given = found.fullest
    words = [
        f"Fullest is stage {given.stage} (rank {shortened(given.ranks, 24)}): "
        f"{units.size(given.free)} of {units.size(given.limit)} are free."
    ]
    if given.resident:
        words.append(
            f"A process of it takes {units.size(given.resident)} at its peak: "
            f"{units.size(given.total)} of tensors, {units.size(given.process)} beside them, and "
            f"{units.size(given.allocator)} that the allocator loses, as measured here, or that"
            " equal runs differ by."
        )
    if found.binding:
        best = min(found.binding, key=lambda r: r.unfit_slower or 0.0)
        words.append(
            f"Memory binds: {named(best)} would take {units.seconds(best.unfit_seconds or 0.0)} "
            f"({relative(best.unfit_slower)}), but {best.why}."
        )
    elif found.rejected or found.changes:
        words.append("Of the rejected choices none would be faster with more memory.")
    return words


def named(other: RejectedAlternative) -> str:
    """A rejected choice by what it does, or by its size."""
    pieces = units.plural(other.microbatches, "microbatch")
    return other.what or f"{units.plural(other.stages, 'stage')}, {pieces}"


def relative(share: float | None) -> str:
    """A difference as "+3.1 %"; "" for none that can be told."""
    return "" if share is None else f"{share:+.1%}".replace("%", " %")


def certificate(plan: Plan) -> list[str]:
    """The certificates as sentences: of the cuts, and of the degrees where they were chosen."""
    given, whole = plan.certificate, plan.degrees
    lines = [_proven(given)] if whole is None else [_proven(whole), f"Cuts: {_proven(given)}"]
    solvers = given.solver if whole is None else " and ".join({whole.solver: 0, given.solver: 0})
    return [
        *lines,
        f"Proved by {solvers}, for the predicted costs; a measured step may differ.",
    ]


def _proven(given: Certificate) -> str:
    objective, bound = units.seconds(given.objective), units.seconds(given.lower_bound)
    over = f" ({given.over})" if given.over else ""
    if given.status == "optimal":
        return f"Optimal: no choice takes less than {objective} a step{over}."
    if given.status == "within gap":
        return (
            f"Within {units.percent(given.gap)} of the best: this one takes {objective} a step, "
            f"and none takes less than {bound}{over}."
        )
    return (
        f"The best found in the time given: {objective} a step. None takes less than {bound}, "
        f"so at most {units.percent(given.gap)} is left{over}."
    )


def _rejected(title: str, others: tuple[RejectedAlternative, ...]) -> list[str]:
    if not others:
        return []
    heads, *rows = rejected_rows(others)
    return [title, *_indented(table(heads, "<>><><"[-len(heads) :], rows))]


def rejected_rows(others: Sequence[RejectedAlternative]) -> list[tuple[str, ...]]:
    """Rejected choices as rows under a row of heads; what they are is left out if none says it."""
    heads = ("what", "stages", "microbatches", "schedule", "step", "why not")
    first = 0 if any(other.what for other in others) else 1
    return [row[first:] for row in (heads, *map(_rejected_row, others))]


def _rejected_row(other: RejectedAlternative) -> tuple[str, ...]:
    step = "-"
    if other.step_seconds is not None:
        step = f"{units.seconds(other.step_seconds)} ({relative(other.slower)})"
    elif other.unfit_seconds is not None:
        step = f"({units.seconds(other.unfit_seconds)} if it fitted)"
    return (
        shortened(other.what, 60) or "-", str(other.stages), str(other.microbatches),
        other.schedule or "-", step, shortened(other.why, 110),
    )  # fmt: skip


def _ties(plan: Plan) -> list[str]:
    lines = []
    for tie in plan.ties:
        names = shortened(" = ".join(tie.names), 60)
        if len(tie.stages) == 1:
            lines.append(f"  {names}: all uses on stage {tie.owner}")
            continue
        others = ", ".join(str(s) for s in tie.stages if s != tie.owner)
        lines.append(f"  {names}: stage {tie.owner} owns it, copies on {others}; gradients summed")
    return ["Shared parameters", *lines] if lines else []


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
    title = "This version cannot train by it (fxpart explain FXP306)"
    return [title, *(f"  {reason}" for reason in found.not_runnable)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="    ")


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
