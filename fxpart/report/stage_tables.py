"""The tables of stages and of their memory; long ones say stages that look alike once."""

from __future__ import annotations

from collections.abc import Callable

from fxpart import units
from fxpart.plan.number_ranges import numbers_of, text_of
from fxpart.report.explanation import AsynchronyFigures, Explanation, StageFigures
from fxpart.report.table import shortened, table

LONG = 16  # up to so many rows each stands by itself

_Cells = Callable[[StageFigures], tuple[str, ...]]


def stage_table(found: Explanation) -> list[str]:
    """What each stage holds, where, how its ranks share the work, and its seconds."""
    heads = ("stage", "blocks", "rank", "device", "holds", "split", "params", "F", "B", "transfer",
             "step")  # fmt: skip

    def cells(one: StageFigures) -> tuple[str, ...]:
        return (
            shortened(one.devices, 20), degrees(one), units.count(one.parameters),
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
    """Peak memory by cause, against the limit."""
    extra = [
        name
        for name, there in (("copies", has_weight_copies), ("sums", has_gradient_buckets))
        if there(found)
    ]
    heads = ("rank", "peak", "limit", "used", "weights", "grads", "optim", "activations", "buffers",
             "transfers", *extra, "in flight")  # fmt: skip

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
    """Whether any stage holds copies of weights."""
    return any(one.memory.copies for one in found.by_stage)


def has_gradient_buckets(found: Explanation) -> bool:
    """Whether any stage packs gradients to sum them."""
    return any(one.memory.sums for one in found.by_stage)


def stream_table(found: AsynchronyFigures) -> list[str]:
    """:func:`stream_rows` as text."""
    heads, *rows = stream_rows(found)
    return table(heads, ">>>>>", rows)


def stream_rows(found: AsynchronyFigures) -> list[tuple[str, ...]]:
    """Under a row of heads, of each stage what it runs ahead, what it misses, and what that costs.

    Of many stages that follow each other and miss and cost the same, the first.
    """
    heads = ("stage", "in flight", "misses", "copies of weights", "predicting")
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


def degrees(one: StageFigures) -> str:
    """How a stage's ranks share its work: "dp8 tp4 ep2 zero1 recompute full"; "-" for one rank."""
    parts = (
        f"dp{one.data_parallel}" if one.data_parallel > 1 else "",
        f"tp{one.tensor_parallel}" if one.tensor_parallel > 1 else "",
        f"ep{one.expert_parallel}" if one.expert_parallel > 1 else "",
        f"zero{one.zero}" if one.zero else "",
        f"recompute {one.recompute}" if one.recompute != "none" else "",
    )
    return " ".join(filter(None, parts)) or "-"


def ranks(group: list[StageFigures]) -> str:
    """The ranks of stages that follow each other, as runs."""
    return text_of([rank for one in group for rank in _numbers(one.ranks)])


def _groups(found: Explanation, cells: _Cells) -> list[tuple[list[StageFigures], tuple[str, ...]]]:
    """Stages with their cells; in a long table those that follow each other and look alike as one.

    They have equally many blocks, and their ranks go on where those of the stage before end.
    """
    groups: list[tuple[list[StageFigures], tuple[str, ...]]] = []
    for one in found.by_stage:
        shown = cells(one)
        if len(found.by_stage) > LONG and groups and groups[-1][1] == shown:
            last = groups[-1][0][-1]
            goes_on = _numbers(last.ranks)[-1] + 1 == _numbers(one.ranks)[0]
            if goes_on and len(_numbers(last.blocks)) == len(_numbers(one.blocks)):
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
    """The blocks as runs, and how many each stage has where several are said at once."""
    numbers = [_numbers(one.blocks) for one in group]
    if len(group) == 1:
        return shortened(group[0].blocks, 24)
    return f"{numbers[0][0]}-{numbers[-1][-1]} by {len(numbers[0])}"


def _label(group: list[StageFigures]) -> str:
    """The first and the last block, each short enough for a column."""
    ends = [group[0].label.split(" … ")[0], group[-1].label.split(" … ")[-1]]
    single = len(group) == 1 and " … " not in group[0].label
    return " … ".join(shortened(end, 22) for end in ends[: 1 if single else 2])
