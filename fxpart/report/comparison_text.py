"""A comparison of prediction and measurement as people read it: words, text and HTML tables."""

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

_TOLD = 4  # differences that are told in words
_SMALL = 0.005  # of the whole difference: one below it is not told
_NONE = 1e-9  # seconds that are none
_WIDTH = 100


def format_comparison(found: RecordingComparison) -> str:
    """The whole comparison as text."""
    lines = [
        *_wrapped(headline(found)),
        "",
        "By stage (once a step: on the stage's busiest rank)",
    ]
    heads, rows = stage_rows(found)
    lines += [f"  {line}" for line in table(heads, "><<" + ">" * 3, rows)]
    lines += ["", f"Largest differences (as rank {pace(found)} spends its step)"]
    for line in differences(found):
        lines += _wrapped(line, "  ", "    ")
    if found.memory:
        heads, rows = memory_rows(found.memory)
        lines += ["", "Peak memory by rank"]
        lines += [f"  {line}" for line in table(heads, ">" * len(heads), rows)]
    lines += ["", *found.notes] if found.notes else []
    return "\n".join(lines) + "\n"


def headline(found: RecordingComparison) -> str:
    """Both steps, their ratio and both bubbles in a sentence or two."""
    assert found.step.measured is not None, "a recording has steps"
    spread = f"{units.seconds(found.low)} to {units.seconds(found.high)}"
    times = "" if found.step.ratio is None else f", {found.step.ratio:.2f} times as long"
    return (
        f"A step was predicted to take {units.seconds(found.step.predicted)} and took "
        f"{units.seconds(found.step.measured)}{times} "
        f"(median of {units.plural(found.steps, 'step')}, {spread}). "
        f"Ranks idle {units.percent(found.bubble_measured)} of it, predicted "
        f"{units.percent(found.bubble_predicted)}."
    )


def pace(found: RecordingComparison) -> int:
    """The rank whose step the differences are of."""
    return next(stage.slowest for stage in found.stages if stage.stage == found.stage)


def stage_rows(found: RecordingComparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows: stage, ranks, what, predicted, measured, ratio."""
    rows: list[tuple[str, ...]] = []
    for stage in found.stages:
        parts = [(f"{name} of a microbatch", part) for name, part in stage.each.items()]
        once = {name: part for name, part in stage.step.items() if name not in stage.each}
        parts += [(f"{name}, once a step", part) for name, part in once.items()]
        first = True
        for name, part in parts:
            if abs(part.predicted) < _NONE and abs(part.measured or 0.0) < _NONE:
                continue
            where = (str(stage.stage), shortened(stage.ranks, 12)) if first else ("", "")
            rows.append((*where, name, _seconds(part.predicted), _measured(part), _ratio(part)))
            first = False
    step = found.step
    rows.append(("", "all", "step", _seconds(step.predicted), _measured(step), _ratio(step)))
    return ("stage", "rank", "what", "predicted", "measured", "ratio"), rows


def differences(found: RecordingComparison) -> list[str]:
    """The largest differences in words, or that there is none to speak of."""
    if not found.differences or found.differences[0].share is None:
        return [f"The step is as predicted, to {units.percent(_off(found.step))}."]
    shares = [(abs(each.share or 0.0), each) for each in found.differences[:_TOLD]]
    return [_difference(each) for share, each in shares if share >= _SMALL]


def _difference(each: StepDifference) -> str:
    more = "longer" if each.difference > 0 else "shorter"
    share = "" if each.share is None else f", {units.percent(abs(each.share))} of the difference"
    if each.share is not None and each.share < 0:
        share = f", which makes up for {units.percent(-each.share)} of the difference"
    name = "waiting for other ranks" if each.name == WAITING else each.name
    return (
        f"{name}: {_seconds(each.measured)} instead of {_seconds(each.predicted)}, "
        f"{units.seconds(abs(each.difference))} {more}{share}; prediction: {each.source}"
    )


def memory_rows(
    memory: Sequence[MemoryComparison],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows: rank, predicted peak, what the process had and its peak, live tensors."""
    counted = any(each.live for each in memory)
    heads: tuple[str, ...] = (
        "rank",
        "predicted",
        "needed",
        "ratio",
        "process before",
        "at its peak",
    )
    rows = [
        (
            str(each.rank), units.size(each.predicted), units.size(each.needed),
            f"{each.needed / each.predicted:.2f}" if each.shared == 1 and each.predicted else "",
            units.size(each.baseline),
            units.size(each.peak) + ("" if each.exact else " (ever)")
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
    """As units has it; a rest may be below 0."""
    return f"-{units.seconds(-value)}" if value < 0 else units.seconds(value)


def _measured(part: TimeComparison) -> str:
    return "hidden" if part.measured is None else _seconds(part.measured)


def _ratio(part: TimeComparison) -> str:
    return "" if part.ratio is None else f"{part.ratio:.2f}"


def _off(step: TimeComparison) -> float:
    return abs(step.difference) / step.predicted if step.predicted else 0.0
