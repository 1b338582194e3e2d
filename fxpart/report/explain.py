"""A plan in words: what it decides, what that costs, how good it is, what it was chosen over."""

from __future__ import annotations

import textwrap

import msgspec

from fxpart.plan import Alternative, Plan, PlanInput, RankPrediction
from fxpart.report import sharding, units
from fxpart.report.table import shortened, table


def explain(plan: Plan) -> str:
    """Plain text of about 30 lines and one for each rank, ending in a newline."""
    parts = [
        _summary(plan),
        _stages(plan),
        _memory(plan),
        sharding.lines(plan),
        ["How good it is", *(wrapped for line in certificate(plan) for wrapped in _wrapped(line))],
        _rejected(plan),
        _ties(plan),
        _pairs("Where the costs come from", plan.provenance),
        _pairs("Fixed by you", {k: str(v) for k, v in plan.constraints.items()}),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _summary(plan: Plan) -> list[str]:
    model, prediction = plan.model, plan.prediction
    ranks = units.plural(len(prediction.ranks), "rank")
    pieces = units.plural(plan.microbatches, "microbatch")
    rate = plan.batch_size / prediction.step_seconds if prediction.step_seconds else 0.0
    return [
        f"{shortened(model.name, 60)} on {shortened(plan.cluster.name, 40)}: "
        f"{units.plural(len(plan.stages), 'stage')} on {ranks}, schedule {plan.schedule}",
        f"  model      {units.count(model.parameters)} parameters "
        f"({units.size(model.parameter_bytes)}), {model.nodes} ops in {model.blocks} blocks",
        f"  inputs     {shortened(', '.join(map(_input, model.inputs)), 160) or 'none'}",
        f"  batch      {plan.batch_size} samples in {pieces}, optimizer {plan.optimizer}, "
        f"seed {plan.seed}",
        f"  step       {units.seconds(prediction.step_seconds)} predicted "
        f"({units.seconds(prediction.simulated_seconds)} by simulation), {rate:.4g} samples/s, "
        f"bubble {units.percent(prediction.bubble)}",
        *([f"  sharding   {sharding.headline(plan)}"] if plan.sharding is not None else []),
    ]


def _input(item: PlanInput) -> str:
    """An input as "input_ids int64[s0*, 64]": the star marks the dim that counts samples."""
    dims = [f"{d}*" if i == item.batch_dim else str(d) for i, d in enumerate(item.shape)]
    return f"{item.name} {item.dtype}[{', '.join(dims)}]"


def _stages(plan: Plan) -> list[str]:
    heads = ("stage", "blocks", "rank", "device", "holds", "params", "F", "B", "transfer", "step")
    rows = []
    for ranks, entry in alike(plan):
        stage = plan.stages[entry.stage]
        rows.append(
            (
                str(entry.stage), f"{stage.first}-{stage.last}", ranks,
                shortened(entry.device, 20), _label(stage.label),
                units.count(stage.parameters), units.seconds(entry.forward_seconds),
                units.seconds(entry.backward_seconds), units.seconds(entry.transfer_seconds),
                units.seconds(entry.sync_seconds + entry.optimizer_seconds),
            )
        )  # fmt: skip
    slowest = max(plan.prediction.ranks, key=per_microbatch)
    return [
        "Stages (F, B and transfer per microbatch; step: gradient sums and optimizer, once a step)",
        *_indented(table(heads, ">>><<>>>>>", rows)),
        f"  Stage {slowest.stage} is the slowest: {units.seconds(per_microbatch(slowest))} a "
        f"microbatch, {balance(plan):.2f} times the mean.",
    ]


def alike(plan: Plan) -> list[tuple[str, RankPrediction]]:
    """The ranks' predictions, those of one stage that are alike once: "4-7" and the first's."""
    found: list[list[RankPrediction]] = []
    for entry in plan.prediction.ranks:
        if found and _same(found[-1][-1], entry):
            found[-1].append(entry)
        else:
            found.append([entry])
    return [(str(g[0].rank) if len(g) == 1 else f"{g[0].rank}-{g[-1].rank}", g[0]) for g in found]


def _same(one: RankPrediction, next_: RankPrediction) -> bool:
    """Whether a rank is predicted like the one before it in the same stage."""
    moved = msgspec.structs.replace(one, rank=next_.rank, device=next_.device)
    return one.rank + 1 == next_.rank and moved == next_


def _memory(plan: Plan) -> list[str]:
    heads = ("rank", "peak", "limit", "used", "weights", "grads", "optim", "activations", "buffers",
             "transfers", "in flight")  # fmt: skip
    rows = []
    for ranks, entry in alike(plan):
        memory = entry.memory
        used = memory.total / entry.memory_limit if entry.memory_limit else 0.0
        parts = (memory.weights, memory.gradients, memory.optimizer, memory.activations,
                 memory.buffers, memory.transfers)  # fmt: skip
        rows.append(
            (ranks, units.size(memory.total), units.size(entry.memory_limit),
             units.percent(used), *map(units.size, parts), str(entry.in_flight))
        )  # fmt: skip
    return ["Peak memory by rank", *_indented(table(heads, ">" * len(heads), rows))]


def certificate(plan: Plan) -> list[str]:
    """The certificate as sentences."""
    given = plan.certificate
    objective, bound = units.seconds(given.objective), units.seconds(given.lower_bound)
    over = f" ({given.over})" if given.over else ""
    if given.status == "optimal":
        first = f"Optimal: no choice takes less than {objective} a step{over}."
    elif given.status == "within gap":
        first = (
            f"Within {units.percent(given.gap)} of the best: this one takes {objective} a step, "
            f"and none takes less than {bound}{over}."
        )
    else:
        first = (
            f"The best found in the time given: {objective} a step. None takes less than {bound}, "
            f"so at most {units.percent(given.gap)} is left{over}."
        )
    return [
        first,
        f"Proved by {given.solver}, for the predicted costs; a measured step may differ.",
    ]


def _rejected(plan: Plan) -> list[str]:
    if not plan.alternatives:
        return []
    rows = [alternative(other) for other in plan.alternatives]
    heads = ("stages", "microbatches", "step", "why not")
    return ["Rejected", *_indented(table(heads, ">>><", rows))]


def alternative(other: Alternative) -> tuple[str, str, str, str]:
    """A rejected choice as four cells: stages, microbatches, step time, why it lost."""
    step = "-" if other.step_seconds is None else units.seconds(other.step_seconds)
    return str(other.stages), str(other.microbatches), step, shortened(other.why, 170)


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
    return [title, *(f"  {key:<{width}}  {shortened(value, 100)}" for key, value in rows)]


def per_microbatch(entry: RankPrediction) -> float:
    """Seconds that one microbatch takes on a rank."""
    return entry.forward_seconds + entry.backward_seconds + entry.transfer_seconds


def balance(plan: Plan) -> float:
    """The slowest rank's seconds for a microbatch over the mean; 1 where all are equal."""
    times = [per_microbatch(entry) for entry in plan.prediction.ranks]
    mean = sum(times) / len(times)
    return max(times) / mean if mean else 1.0


def _label(text: str) -> str:
    """A stage's first and last block, each short enough for a column."""
    return " … ".join(shortened(end, 22) for end in text.split(" … ")[:2])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="    ")


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
