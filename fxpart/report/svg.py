"""Pictures for the report, as inline SVG: the schedule in time, and memory against its limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from fxpart import units
from fxpart.plan.model import Plan
from fxpart.plan.number_ranges import format_numbers
from fxpart.report.table import shortened
from fxpart.schedule.action import ActionKind
from fxpart.schedule.timeline import Span, Timeline, UpdateSpan

WIDTH = 1120
LEFT = 76
# Above this many spans, none has a tooltip: the file has to stay below a megabyte.
DETAILED = 2500

_BOTTOM = 30  # height of the time axis
KINDS = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "input gradient",
    ActionKind.W: "weight gradient",
}

PARTS = (
    "weights", "gradients", "optimizer", "activations", "buffers", "transfers", "copies", "sums",
)  # fmt: skip


def timeline_svg(
    timeline: Timeline, labels: Sequence[str] = (), measured: Mapping[str, float] | None = None
) -> str:
    """Draw a row for each rank: forwards, backwards and, below, transfers.

    labels: the plan's ranks in each row, "0-3"; by default the row's number. measured: seconds by
    action ("0F3"), for the tooltips.
    """
    row = 30 if timeline.ranks <= 16 else 16 if timeline.ranks <= 48 else 8
    height = timeline.ranks * row + _BOTTOM
    scale = (WIDTH - LEFT - 10) / timeline.step_seconds if timeline.step_seconds > 0 else 0.0
    label = (
        f"Timeline of {timeline.ranks} ranks over {units.seconds(timeline.step_seconds)}; "
        f"pipeline bubble {units.percent(timeline.bubble)}."
    )
    parts = [opening(height, label, row, scale)]
    parts += ticks(timeline.step_seconds, scale, timeline.ranks * row)  # below the blocks
    detailed = len(timeline.spans) <= DETAILED
    spans: dict[int, list[Span]] = {}
    for span in timeline.spans:
        spans.setdefault(span.rank, []).append(span)
    for rank in range(timeline.ranks):
        name = labels[rank] if rank < len(labels) else str(rank)
        parts.append(f'<g data-ranks="{name}">')
        if row >= 16 or rank % 8 == 0:
            y = max(rank * row + row / 2 + 4, 10)
            text = shortened(name, 9)
            parts.append(f'<text class="axis" x="0" y="{y:.0f}">rank {text}</text>')
        y = rank * row
        parts.append(
            f'<path class="idle" d="M{LEFT} {y + 1}h{WIDTH - LEFT - 10}v{row - 2}H{LEFT}z"/>'
        )
        own = spans.get(rank, [])
        parts += (
            _detailed(own, row, scale, measured or {}) if detailed else _merged(own, row, scale)
        )
        parts += _updates([u for u in timeline.updates if u.rank == rank], row, scale)
        parts.append("</g>")
    parts.append("</svg>")
    return "\n".join(parts)


def opening(height: int, label: str, row: int = 0, scale: float = 0.0) -> str:
    """Return the opening tag of a picture of this height in pixels, described by ``label``.

    row: height of a rank's row, where there is a group for each rank. scale: pixels per second.
    """
    data = ""
    if row:
        unit = 1 / scale if scale else 0.0
        data = (
            f' data-row="{row}" data-bottom="{_BOTTOM}" data-left="{LEFT}" data-unit="{unit:.6g}"'
        )
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}"{data} '
        f'xmlns="http://www.w3.org/2000/svg">'
    )


def _detailed(
    spans: Sequence[Span], row: int, scale: float, measured: Mapping[str, float]
) -> list[str]:
    """Draw a rectangle with a tooltip for each span, and the microbatch's number if it fits.

    The page's script writes the tooltip in full (:mod:`fxpart.report.page_assets`).
    """
    parts = []
    for span in spans:
        x, width = LEFT + span.start * scale, (span.end - span.start) * scale
        y, tall = _row(span, row)
        title = describe_span(span)
        if str(span.action) in measured:
            title += f"\nmeasured {units.seconds(measured[str(span.action)])}"
        parts.append(
            f'<rect class="{_class(span)}" x="{x:.2f}" y="{y}" width="{max(width, 0.4):.2f}" '
            f'height="{tall}"><title>{escape(title)}</title></rect>'
        )
        if span.track == "compute" and width >= 14 and tall >= 12:
            middle, base = x + width / 2, y + tall / 2 + 4
            number = span.action.microbatch
            parts.append(f'<text class="in" x="{middle:.1f}" y="{base:.0f}">{number}</text>')
    return parts


def describe_span(span: Span) -> str:
    """Return a block's action and predicted seconds in short: ``0F3: 10 ms, 30 ms to 40 ms``."""
    times = (span.end - span.start, span.start, span.end)
    seconds, start, end = (units.seconds(value) for value in times)
    return f"{span.action}: {seconds}, {start} to {end}"


def _updates(updates: Sequence[UpdateSpan], row: int, scale: float) -> list[str]:
    """Return a rectangle for the per-step work of each rank."""
    parts = []
    for update in updates:
        if update.end > update.start:
            x, width = LEFT + update.start * scale, (update.end - update.start) * scale
            title = f"per step: {units.seconds(update.end - update.start)}"
            parts.append(
                f'<rect class="u" x="{x:.2f}" y="{update.rank * row + 1}" '
                f'width="{max(width, 0.4):.2f}" height="{row - 2}"><title>{title}</title></rect>'
            )
    return parts


def _merged(spans: Sequence[Span], row: int, scale: float) -> list[str]:
    """Draw one path for each kind of span of each stage, with its microbatches in order."""
    paths: dict[tuple[str, str, int], list[str]] = {}
    numbers: dict[tuple[str, str, int], list[str]] = {}
    for span in spans:
        if span.track == "receive":
            continue
        x, width = LEFT + span.start * scale, max((span.end - span.start) * scale, 0.3)
        y, tall = _row(span, row)
        computes = span.track == "compute"
        what = KINDS.get(span.action.kind, "") if computes else ""
        key = (_class(span), what, span.action.stage if computes else -1)
        paths.setdefault(key, []).append(f"M{x:.1f} {y}h{width:.1f}v{tall}h-{width:.1f}z")
        numbers.setdefault(key, []).append(str(span.action.microbatch))
    found = []
    for (style, what, stage), steps in sorted(paths.items()):
        data = ""
        if what:
            listed = " ".join(numbers[style, what, stage])
            data = f' data-kind="{what}" data-stage="{stage}" data-microbatches="{listed}"'
        found.append(f'<path class="{style}"{data} d="{"".join(steps)}"/>')
    return found


def _row(span: Span, row: int) -> tuple[int, int]:
    """Top and height of a span: computations above, a strip for transfers at the bottom."""
    strip = 5 if row >= 30 else 3 if row >= 16 else 0
    top = span.rank * row + 1
    if span.track == "compute":
        return top, row - 2 - strip
    return top + row - 2 - strip, max(strip - 1, 1)


def _class(span: Span) -> str:
    if span.track != "compute":
        return "t"
    kind = "f" if span.action.kind is ActionKind.F else "b"
    return f"{kind}{span.action.microbatch % 2}"


def ticks(total: float, scale: float, y: int) -> list[str]:
    """Draw a time axis at ``y``, from 0 to ``total`` seconds."""
    parts = ['<g class="time">']
    for index in range(6):
        at = total * index / 5
        x = LEFT + at * scale
        anchor = ("start", "middle", "end")[0 if index == 0 else 2 if index == 5 else 1]
        parts.append(
            f'<path class="tick" d="M{x:.1f} 0V{y + 4}"/>'
            f'<text class="axis" text-anchor="{anchor}" x="{x:.1f}" y="{y + 20}">'
            f"{units.seconds(at)}</text>"
        )
    return [*parts, "</g>"]


def memory_svg(plan: Plan) -> str:
    """Draw a stacked bar for each group of equal ranks, with the limit as a line."""
    ranks = plan.prediction.ranks
    row = 30 if len(ranks) <= 16 else 16 if len(ranks) <= 48 else 8
    most = max((max(r.memory.total, r.memory_limit) for r in ranks), default=0) or 1
    scale = (WIDTH - LEFT - 160) / most
    label = f"Peak memory of {plan.world} ranks against the limit of each."
    parts = [opening(len(ranks) * row + 8, label)]
    for position, entry in enumerate(ranks):
        y, x = position * row + 2, float(LEFT)
        if row >= 16 or position % 8 == 0:
            base = max(y + row / 2 + 2, 10)
            label = shortened(format_numbers(entry.ranks), 9)
            parts.append(f'<text class="axis" x="0" y="{base:.0f}">rank {label}</text>')
        for index, name in enumerate(PARTS):
            value = getattr(entry.memory, name)
            if value:
                parts.append(
                    f'<rect class="m{index}" x="{x:.2f}" y="{y}" width="{value * scale:.2f}" '
                    f'height="{row - 4}"><title>{name}: {units.size(value)}</title></rect>'
                )
            x += value * scale
        limit = LEFT + entry.memory_limit * scale
        parts.append(f'<path class="limit" d="M{limit:.1f} {y - 1}v{row - 2}"/>')
        if row >= 16:
            words = f"{units.size(entry.memory.total)} of {units.size(entry.memory_limit)}"
            parts.append(
                f'<text class="axis" x="{limit + 6:.1f}" y="{y + row / 2 + 2:.0f}">{words}</text>'
            )
    parts.append("</svg>")
    return "\n".join(parts)
