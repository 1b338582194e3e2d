"""Tables of stages and their memory; long ones list equal stages once."""

from __future__ import annotations

from collections.abc import Callable

from fxpart import units
from fxpart.plan.number_ranges import numbers_of, text_of
from fxpart.plan.summary import layout
from fxpart.report.explanation import AsynchronyFigures, Explanation, StageFigures
from fxpart.report.table import shortened, table

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
    return text_of([rank for one in group for rank in _numbers(one.ranks)])


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
    found = numbers_of(text)
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
