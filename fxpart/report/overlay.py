"""A predicted and a measured step on one time axis, as inline SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape

from fxpart import units
from fxpart.report.comparison import RecordingComparison
from fxpart.report.comparison_builder import spans_of
from fxpart.report.svg import DETAILED, LEFT, WIDTH, opening, ticks
from fxpart.schedule.action import ActionKind
from fxpart.schedule.measured_timeline import AGREE, END, MeasuredSpan, MeasuredTimeline
from fxpart.schedule.timeline import Timeline

ROWS = 32  # ranks that are drawn; of more, the first rank of each stage
_HIGH = 15  # pixels of one of a rank's two rows


@dataclass(frozen=True)
class _Bar:
    """A rectangle: its row (0: the first rank's prediction, 1: its measurement, and so on)."""

    row: int
    style: str
    title: str
    start: float
    end: float
    strip: bool = False


def overlay_svg(
    timeline: Timeline | None, recording: MeasuredTimeline, comparison: RecordingComparison
) -> str:
    """Return two rows for each rank, predicted above measured, from the start of the step.

    Computations are colored; transfers are a strip below them; gradient reduction and the optimizer
    step follow. timeline: the predicted one, None where there is none.
    """
    ranks = drawn(recording)
    measured = spans_of(recording, comparison.shown, lambda span: span.rank in set(ranks))
    expected = {} if timeline is None else _predicted_seconds(timeline)
    bars = [
        bar
        for at, rank in enumerate(ranks)
        for bar in _measured(measured, rank, 2 * at + 1, expected)
    ]
    if timeline is not None:
        seconds = measured_seconds(recording, comparison)
        bars += [
            bar
            for at, rank in enumerate(ranks)
            for bar in _predicted(timeline, recording.stage(rank), 2 * at, seconds)
        ]
    total = max((bar.end for bar in bars), default=0.0)
    scale = (WIDTH - LEFT - 10) / total if total > 0 else 0.0
    deep = len(ranks) * (2 * _HIGH + 8)
    words = f"Predicted and measured step of {len(ranks)} ranks over {units.seconds(total)}."
    deep_row = 2 * _HIGH + 8
    parts = [opening(deep + 30, words, deep_row, scale)]
    parts += ticks(total, scale, deep)
    detailed = len(bars) <= DETAILED
    for at, rank in enumerate(ranks):
        y = at * deep_row
        parts.append(f'<g data-ranks="{rank}">')
        parts.append(f'<text class="axis" x="0" y="{y + _HIGH + 4}">rank {rank}</text>')
        for row in (y, y + _HIGH):
            area = f"M{LEFT} {row + 1}h{WIDTH - LEFT - 10}v{_HIGH - 2}H{LEFT}z"
            parts.append(f'<path class="idle" d="{area}"/>')
        parts += [_rectangle(bar, scale, detailed) for bar in bars if bar.row // 2 == at]
        parts.append("</g>")
    parts.append("</svg>")
    return "\n".join(parts)


def drawn(recording: MeasuredTimeline) -> list[int]:
    """Return the ranks that are drawn."""
    ranks = list(recording.ranks)
    if len(ranks) > ROWS:
        ranks = sorted(stage[0] for stage in recording.places)
    return ranks[:ROWS]


def measured_seconds(
    recording: MeasuredTimeline, comparison: RecordingComparison
) -> dict[str, float]:
    """Return the seconds of each computation in the step that is drawn, by action.

    Of a stage with several ranks the longest counts.
    """
    found: dict[str, float] = {}
    for span in spans_of(recording, comparison.shown, lambda span: span.track == "compute"):
        found[span.name] = max(span.seconds, found.get(span.name, 0.0))
    return found


def _predicted_seconds(timeline: Timeline) -> dict[str, float]:
    """Return the predicted seconds of each computation by action."""
    spans = (span for span in timeline.spans if span.track == "compute")
    return {str(span.action): span.end - span.start for span in spans}


def _beside(title: str, other: str, seconds: float | None) -> str:
    """Return the title with the other value of the same computation, where it is known."""
    return title if seconds is None else f"{title}\n{other} {units.seconds(seconds)}"


def _measured(
    spans: Iterable[MeasuredSpan], rank: int, row: int, expected: Mapping[str, float]
) -> Iterable[_Bar]:
    for span in spans:
        if span.rank != rank or span.track in ("wait", "receive", "whole", "collective"):
            continue
        title = f"measured {span.name}: {units.seconds(span.seconds)}"
        if span.track == "compute":
            style = _style(span.action.kind, span.action.microbatch)
            title = _beside(title, "predicted", expected.get(span.name))
            yield _Bar(row, style, title, span.start, span.end)
        elif span.track == "send":
            title += "" if span.exact else " at most"
            yield _Bar(row, "t", title, span.start, span.end, strip=True)
        elif span.name not in (AGREE, END):  # in these it waits
            yield _Bar(row, "u", title, span.start, span.end)


def _predicted(
    timeline: Timeline, stage: int, row: int, seconds: Mapping[str, float]
) -> Iterable[_Bar]:
    for span in timeline.spans:
        if span.action.stage != stage or span.track == "receive":
            continue
        title = f"predicted {span.action}: {units.seconds(span.end - span.start)}"
        strip = span.track == "send"
        if not strip:
            title = _beside(title, "measured", seconds.get(str(span.action)))
        style = "t" if strip else _style(span.action.kind, span.action.microbatch)
        yield _Bar(row, style, title, span.start, span.end, strip)
    for update in timeline.updates:
        if update.stage == stage:
            spent = units.seconds(update.end - update.start)
            title = f"predicted gradient reduction and optimizer step: {spent}"
            yield _Bar(row, "u", title, update.start, update.end)


def _style(kind: ActionKind, microbatch: int) -> str:
    return f"{'f' if kind is ActionKind.F else 'b'}{microbatch % 2}"


def _rectangle(bar: _Bar, scale: float, detailed: bool) -> str:
    top = (bar.row // 2) * (2 * _HIGH + 8) + (bar.row % 2) * _HIGH + 1
    y, tall = (top + _HIGH - 5, 2) if bar.strip else (top, _HIGH - 6)
    x, width = LEFT + bar.start * scale, max((bar.end - bar.start) * scale, 0.4)
    place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{tall}"'
    if not detailed:
        return f'<rect class="{bar.style}" {place}/>'
    return f'<rect class="{bar.style}" {place}><title>{escape(bar.title)}</title></rect>'
