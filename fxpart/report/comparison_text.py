"""A comparison of prediction and measurement as sentences and table rows."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from fxpart import units
from fxpart.report.comparison import (
    WAITING,
    MemoryComparison,
    RecordingComparison,
    StepDifference,
    TimeComparison,
)
from fxpart.report.table import shortened, table
from fxpart.schedule.measured_timeline import CLIP, GRADIENT_REDUCTION, OPTIMIZER, TIED_REDUCTION

_LISTED = 4  # differences that are listed
_SMALL = 0.005  # share of the whole difference below which a part is not listed
_NONE = 1e-9  # seconds that count as zero
_WIDTH = 100
_LABELS = {
    GRADIENT_REDUCTION: "gradient reduction",
    TIED_REDUCTION: "tied-parameter gradient reduction",
    CLIP: "gradient clipping",
    OPTIMIZER: "optimizer step",
}


def format_comparison(found: RecordingComparison) -> str:
    """Return the whole comparison as text."""
    lines = [
        *_wrapped(headline(found)),
        "",
        "By stage (per step: on the busiest rank of the stage)",
    ]
    heads, rows = stage_rows(found)
    lines += [f"  {line}" for line in table(heads, "><<" + ">" * 3, rows)]
    rank = bottleneck_rank(found)
    lines += ["", f"Largest differences (rank {rank}, the busiest of the bottleneck stage)"]
    for line in differences(found):
        lines += _wrapped(line, "  ", "    ")
    if found.memory:
        heads, rows = memory_rows(found.memory)
        lines += ["", "Peak memory by rank"]
        lines += [f"  {line}" for line in table(heads, ">" * len(heads), rows)]
    lines += ["", *found.notes] if found.notes else []
    return "\n".join(lines) + "\n"


def headline(found: RecordingComparison) -> str:
    """Return both step times, their ratio and both bubbles in two sentences."""
    assert found.step.measured is not None, "a recording has steps"
    spread = f"{units.seconds(found.low)} to {units.seconds(found.high)}"
    times = "" if found.step.ratio is None else f", {found.step.ratio:.2f} times as long"
    return (
        f"Step time {units.seconds(found.step.predicted)} predicted, "
        f"{units.seconds(found.step.measured)} measured{times} "
        f"(median of {units.plural(found.steps, 'step')}, {spread}). "
        f"Pipeline bubble {units.percent(found.bubble_predicted)} predicted, "
        f"{units.percent(found.bubble_measured)} measured."
    )


def bottleneck_rank(found: RecordingComparison) -> int:
    """Return the rank whose step the differences describe."""
    return next(stage.slowest for stage in found.stages if stage.stage == found.stage)


def stage_rows(found: RecordingComparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return heads and rows: stage, ranks, part, predicted, measured, ratio."""
    rows: list[tuple[str, ...]] = []
    for stage in found.stages:
        parts = [(f"{name}, per microbatch", part) for name, part in stage.each.items()]
        once = {name: part for name, part in stage.step.items() if name not in stage.each}
        parts += [(f"{label(name)}, per step", part) for name, part in once.items()]
        first = True
        for name, part in parts:
            if abs(part.predicted) < _NONE and abs(part.measured or 0.0) < _NONE:
                continue
            where = (str(stage.stage), shortened(stage.ranks, 12)) if first else ("", "")
            rows.append((*where, name, _seconds(part.predicted), _measured(part), _ratio(part)))
            first = False
    step = found.step
    rows.append(("", "all", "step time", _seconds(step.predicted), _measured(step), _ratio(step)))
    return ("stage", "rank", "part", "predicted", "measured", "ratio"), rows


def differences(found: RecordingComparison) -> list[str]:
    """Return the largest differences as sentences, or one that there is none."""
    if not found.differences or found.differences[0].share is None:
        return [f"Step time is within {units.percent(_off(found.step))} of the prediction."]
    shares = [(abs(each.share or 0.0), each) for each in found.differences[:_LISTED]]
    return [_difference(each) for share, each in shares if share >= _SMALL]


def _difference(each: StepDifference) -> str:
    more = "longer" if each.difference > 0 else "shorter"
    share = "" if each.share is None else f", {units.percent(abs(each.share))} of the difference"
    if each.share is not None and each.share < 0:
        share = f", which offsets {units.percent(-each.share)} of the difference"
    name = "waiting for other ranks" if each.name == WAITING else label(each.name)
    return (
        f"{name}: {_seconds(each.measured)} instead of {_seconds(each.predicted)}, "
        f"{units.seconds(abs(each.difference))} {more}{share}; prediction: {each.source}"
    )


def label(name: str) -> str:
    """Return the label of a part of a step, which recordings call by another name."""
    return _LABELS.get(name, name)


def memory_rows(
    memory: Sequence[MemoryComparison],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return heads and rows: rank, predicted peak, process before and at its peak, live tensors."""
    counted = any(each.live for each in memory)
    heads: tuple[str, ...] = (
        "rank",
        "predicted",
        "measured",
        "ratio",
        "process at start",
        "process peak",
    )
    rows = [
        (
            str(each.rank), units.size(each.predicted), units.size(each.needed),
            f"{each.needed / each.predicted:.2f}" if each.shared == 1 and each.predicted else "",
            units.size(each.baseline),
            units.size(each.peak) + ("" if each.exact else " (since start)")
            + (f" of {each.shared} ranks" if each.shared > 1 else ""),
            *((units.size(each.live),) if counted else ()),
        )
        for each in memory
    ]  # fmt: skip
    return (*heads, "live tensors") if counted else heads, rows


def _wrapped(line: str, first: str = "", others: str = "") -> list[str]:
    return textwrap.wrap(
        line, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    )


def _seconds(value: float) -> str:
    """Return seconds with a unit; a remainder may be negative."""
    return f"-{units.seconds(-value)}" if value < 0 else units.seconds(value)


def _measured(part: TimeComparison) -> str:
    return "overlapped" if part.measured is None else _seconds(part.measured)


def _ratio(part: TimeComparison) -> str:
    return "" if part.ratio is None else f"{part.ratio:.2f}"


def _off(step: TimeComparison) -> float:
    return abs(step.difference) / step.predicted if step.predicted else 0.0
