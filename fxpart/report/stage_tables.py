"""Tables of stages and their memory; long ones list equal stages once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum

from fxpart import units
from fxpart.errors import error
from fxpart.plan.model import Plan
from fxpart.plan.number_ranges import format_numbers, parse_numbers
from fxpart.plan.staleness_penalty import ModeCandidate
from fxpart.plan.summary import layout
from fxpart.report.explanation import AsynchronyFigures, Explanation, StageFigures
from fxpart.report.table import shortened, table
from fxpart.units import size

HEADS = ("stages", "devices", "per microbatch", "microbatches", "group")

LONG = 16  # a table with more rows lists equal stages once

_Cells = Callable[[StageFigures], tuple[str, ...]]


def stage_table(found: Explanation) -> list[str]:
    """Return each stage with its modules, ranks, layout and seconds."""
    heads = ("stage", "blocks", "rank", "device", "modules", "layout", "params", "F", "B",
             "transfer", "per step")  # fmt: skip

    def cells(one: StageFigures) -> tuple[str, ...]:
        return (
            shortened(one.devices, 20), layout(one), units.count(one.parameters),
            units.seconds(one.forward_seconds), units.seconds(one.backward_seconds),
            units.seconds(one.transfer_seconds + one.gather_seconds),
            units.seconds(one.step_only_seconds),
        )  # fmt: skip

    rows = [
        (
            _stages(group), _blocks(group), shortened(ranks(group), 16), device, _label(group),
            *rest,
        )
        for group, (device, *rest) in _groups(found, cells)
    ]  # fmt: skip
    return table(heads, ">>><<<>>>>>", rows)


def memory_table(found: Explanation) -> list[str]:
    """Return the peak memory of each rank by cause, and its limit."""
    extra = {
        name: label
        for name, label, there in (
            ("copies", "weight copies", has_weight_copies),
            ("sums", "gradient buckets", has_gradient_buckets),
        )
        if there(found)
    }
    heads = ("rank", "peak", "limit", "used", "weights", "grads", "optim", "activations", "buffers",
             "transfers", *extra.values(), "in flight")  # fmt: skip

    def cells(one: StageFigures) -> tuple[str, ...]:
        memory = one.memory
        parts = [memory.weights, memory.gradients, memory.optimizer, memory.activations,
                 memory.buffers, memory.transfers]  # fmt: skip
        parts += [getattr(memory, name) for name in extra]
        share = one.total / one.limit if one.limit else 0.0
        sizes = (units.size(one.total), units.size(one.limit), units.percent(share))
        return (*sizes, *map(units.size, parts), str(one.in_flight))

    rows = [(shortened(ranks(group), 16), *rest) for group, rest in _groups(found, cells)]
    return table(heads, ">" * len(heads), rows)


def has_weight_copies(found: Explanation) -> bool:
    """Return whether any stage has copies of weights."""
    return any(one.memory.copies for one in found.by_stage)


def has_gradient_buckets(found: Explanation) -> bool:
    """Return whether any stage packs gradients into buckets."""
    return any(one.memory.sums for one in found.by_stage)


def mode_rows(found: Sequence[ModeCandidate]) -> list[tuple[str, ...]]:
    """Return the candidates of the mode "auto" as rows under a row of heads."""
    rows: list[tuple[str, ...]] = [
        ("mode", "weights", "stages", "microbatches", "step time", "delay", "relative steps",
         "time", "penalty"),
    ]  # fmt: skip
    for one in found:
        known = one.step_seconds is not None and one.seconds is not None
        ends = f" ({one.interval[0]:.3g} to {one.interval[1]:.3g})" if one.interval else ""
        rows.append((
            one.mode, one.weights, str(one.stages), str(one.microbatches),
            units.seconds(one.step_seconds or 0.0) if known else "-",
            f"{one.delay:.3g}" if known else "-",
            f"{one.relative_steps:.3g}{ends}" if known else "-",
            units.seconds(one.seconds or 0.0) if known else "-",
            one.source or shortened(one.why, 60) or "-",
        ))  # fmt: skip
    return rows


def asynchrony_table(found: AsynchronyFigures) -> list[str]:
    """:func:`asynchrony_rows` as text."""
    heads, *rows = asynchrony_rows(found)
    return table(heads, ">>>>>", rows)


def asynchrony_rows(found: AsynchronyFigures) -> list[tuple[str, ...]]:
    """Return the staleness of each stage and its costs, under a row of heads.

    Of many consecutive stages with equal staleness and costs, only the first.
    """
    heads = ("stage", "in flight", "staleness", "weight copies", "weight prediction")
    rows = [
        (
            str(one.stage), str(one.in_flight), units.plural(one.staleness, "update"),
            units.size(one.copies), units.seconds(one.predict_seconds),
        )
        for one in found.by_stage
    ]  # fmt: skip
    if len(rows) > LONG:
        rows = [row for k, row in enumerate(rows) if not k or row[2:] != rows[k - 1][2:]]
    return [heads, *rows]


def ranks(group: list[StageFigures]) -> str:
    """Return the ranks of consecutive stages as ranges."""
    return format_numbers([rank for one in group for rank in _numbers(one.ranks)])


def _groups(found: Explanation, cells: _Cells) -> list[tuple[list[StageFigures], tuple[str, ...]]]:
    """Return stages with their cells; a long table joins consecutive stages with equal cells.

    Joined stages have equally many blocks and consecutive ranks.
    """
    groups: list[tuple[list[StageFigures], tuple[str, ...]]] = []
    for one in found.by_stage:
        shown = cells(one)
        if len(found.by_stage) > LONG and groups and groups[-1][1] == shown:
            last = groups[-1][0][-1]
            consecutive = _numbers(last.ranks)[-1] + 1 == _numbers(one.ranks)[0]
            if consecutive and len(_numbers(last.blocks)) == len(_numbers(one.blocks)):
                groups[-1][0].append(one)
                continue
        groups.append(([one], shown))
    return groups


def _numbers(text: str) -> list[int]:
    found = parse_numbers(text)
    assert found, "a stage has blocks and ranks"
    return found


def _stages(group: list[StageFigures]) -> str:
    first, last = group[0].stage, group[-1].stage
    return str(first) if first == last else f"{first}-{last}"


def _blocks(group: list[StageFigures]) -> str:
    """Return the blocks as ranges, with the number of blocks of each stage if stages are joined."""
    numbers = [_numbers(one.blocks) for one in group]
    if len(group) == 1:
        return shortened(group[0].blocks, 24)
    return f"{numbers[0][0]}-{numbers[-1][-1]} by {len(numbers[0])}"


def _label(group: list[StageFigures]) -> str:
    """Return the first and the last module, each short enough for a column."""
    ends = [group[0].label.split(" … ")[0], group[-1].label.split(" … ")[-1]]
    single = len(group) == 1 and " … " not in group[0].label
    return " … ".join(shortened(end, 22) for end in ends[: 1 if single else 2])


def replica_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return each group's stages, devices, seconds per microbatch, microbatches and group seconds.

    The last is the time between two microbatches while all replicas of the group compute; the group
    with the longest is the bottleneck unless transfers are. With queue routing also the staleness
    of the group's gradients. Empty for a plan without replicas and queues.
    """
    if not plan.replicas and not plan.staleness:
        return []
    rows = {row.stage: row for row in plan.prediction.ranks}
    groups = {group[0]: tuple(dict.fromkeys(group)) for group in plan.replicas}
    found: list[tuple[str, ...]] = []
    for first in plan.firsts:
        stages = groups.get(first, (first,))
        each = [rows[stage].microbatch_seconds for stage in stages]
        taken = [rows[stage].taken(plan.microbatches) for stage in stages]
        pace = 1 / fsum(1 / seconds for seconds in each) if all(each) else 0.0
        found.append(
            (
                ", ".join(map(str, stages)),
                ", ".join(plan.stages[stage].device or "-" for stage in stages),
                ", ".join(map(units.seconds, each)),
                ", ".join(map(str, taken)),
                units.seconds(pace),
                *(() if not plan.staleness else (units.plural(plan.staleness[first], "update"),)),
            )
        )
    return found


def replica_lines(plan: Plan) -> list[str]:
    """:func:`replica_rows` as text under a heading; empty without replicas."""
    rows = replica_rows(plan)
    if not rows:
        return []
    heads: tuple[str, ...] = HEADS
    sides, how = "<<<<>", "round-robin routing"
    if plan.staleness:
        heads, sides = (*heads, "staleness"), sides + ">"
        how = "queue routing;\nmicrobatches and seconds are those of round-robin routing"
    return [
        *f"Replicas (the stages of a row have the same blocks; {how})".splitlines(),
        *(f"  {line}" for line in table(heads, sides, rows)),
    ]


def largest(plan: Plan) -> str:
    """Return the ten largest tensors of each stage; raises FXP109 for a plan without them."""
    rows = [entry for entry in plan.prediction.ranks if entry.top]
    if not rows:
        raise error(
            "FXP109",
            where="--memory",
            why="this plan does not list the tensors that are alive at the peak",
            fix="plan again; plans whose stages are contiguous blocks list them",
        )
    lines: list[str] = []
    for entry in rows:
        first, last = min(entry.ranks), max(entry.ranks)
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        if lines:
            lines.append("")
        lines.append(
            f"Stage {entry.stage} ({ranks}): {size(entry.peak)} at the peak, "
            f"{size(entry.memory.total)} as the sum of the peaks by cause"
        )
        width = max(len(tensor.name) for tensor in entry.top)
        lines += [
            f"  {size(tensor.bytes):>9}  {tensor.name:<{width}}  {tensor.why}"
            for tensor in entry.top
        ]
    return "\n".join(lines)
