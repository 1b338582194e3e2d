"""Plot of the losses of several runs as a self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Colors for all kinds of color vision (Okabe and Ito 2008); dashes distinguish further curves.
COLORS = ("#000000", "#e69f00", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a7f00")
DASHES = ("", "7 4", "2 3")

WIDTH, HEIGHT = 900, 480
LEFT, RIGHT, TOP, BOTTOM = 76, 230, 48, 64
_MOST_POINTS = 2000  # of a curve
_RANGE_FACTOR = (
    2.0  # times the range of the curve with the lowest maximum; values above are cut off
)


@dataclass(frozen=True)
class LossCurve:
    """A curve of the plot. values: after update 1, 2, ...; non-finite values interrupt it."""

    name: str
    values: Sequence[float]


def mean_curve(name: str, runs: Sequence[Sequence[float]]) -> LossCurve:
    """Return the mean over runs, up to the shortest."""
    return LossCurve(name, [math.fsum(row) / len(row) for row in zip(*runs, strict=False)])


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and the ``window`` - 1 values before it."""
    found, total, non_finite = [], 0.0, 0
    for end, value in enumerate(values):
        total, non_finite = _update_sum(total, non_finite, value, 1)
        if end >= window:
            total, non_finite = _update_sum(total, non_finite, values[end - window], -1)
        found.append(math.nan if non_finite else total / min(end + 1, window))
    return found if window > 1 else [float(value) for value in values]


def _update_sum(total: float, non_finite: int, value: float, sign: int) -> tuple[float, int]:
    """Add or remove a value from a sum and a count of non-finite values."""
    if math.isfinite(value):
        return total + sign * value, non_finite
    return total, non_finite + sign


def window_of(curves: Sequence[LossCurve]) -> int:
    """Return the default averaging window in updates: a twentieth of the longest run."""
    return max(1, max((len(c.values) for c in curves), default=0) // 20)


def losses_svg(
    curves: Sequence[LossCurve],
    title: str,
    *,
    window: int | None = None,
    label: str = "training loss",
) -> str:
    """Return the picture: loss over updates, a curve per run, labeled with its last value.

    window: values are means of so many updates, as labeled at the axis; None: a twentieth of the
    run, 1: no averaging. Values far above the curve with the lowest maximum are cut off.
    """
    window = window_of(curves) if window is None else max(1, window)
    lines = [LossCurve(curve.name, smoothed(curve.values, window)) for curve in curves]
    frame = _PlotFrame.of(lines)
    mean = f", mean of {window} updates" if window > 1 else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="13" role="img">',
        f"<title>{_escape_text(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="28" font-size="16">{_escape_text(title)}</text>',
        *frame.axes(f"{label}{mean}"),
    ]
    for number, line in enumerate(lines):
        style = _make_style(number)
        points = " ".join(frame.path(line.values))
        parts.append(
            f'<path d="{points}" fill="none" stroke-width="1.8" stroke-linejoin="round" {style}>'
            f"<title>{_escape_text(line.name)}</title></path>"
        )
        parts += _make_legend_entry(number, line, style)
    if any(value > frame.top for line in lines for value in line.values):
        parts.append(
            f'<text x="{LEFT}" y="{TOP - 6}" font-size="11" fill="#555555">'
            f"values above {_format_number(frame.top)} are not shown</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True)
class _PlotFrame:
    """Mapping of values to picture coordinates."""

    updates: int
    bottom: float
    top: float

    @classmethod
    def of(cls, lines: Sequence[LossCurve]) -> _PlotFrame:
        rows = [[v for v in line.values if math.isfinite(v)] for line in lines]
        tops = [max(row) for row in rows if row] or [0.0]
        lowest, highest = min((min(row) for row in rows if row), default=0.0), max(tops)
        if min(tops) > lowest:  # show all of the curve with the lowest maximum
            highest = min(highest, lowest + _RANGE_FACTOR * (min(tops) - lowest))
        step = _round_up_step(max(highest - lowest, 1e-9 * max(abs(highest), 1.0)) / 6)
        bottom, top = math.floor(lowest / step) * step, math.ceil(highest / step) * step
        longest = max((len(line.values) for line in lines), default=1)
        return cls(max(longest, 2), bottom, top if top > bottom else bottom + step)

    def x(self, update: float) -> float:
        """Return the coordinate of update 1, 2, ..."""
        return LEFT + (update - 1) / (self.updates - 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        part = (value - self.bottom) / (self.top - self.bottom)
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)

    def path(self, values: Sequence[float]) -> list[str]:
        """Return the path commands; of very long runs only every n-th update and the last."""
        stride = -(-len(values) // _MOST_POINTS) or 1
        found, command = [], "M"
        for index, value in enumerate(values):
            if index % stride and index != len(values) - 1:
                continue
            if not (math.isfinite(value) and value <= self.top):
                command = "M"
                continue
            found.append(f"{command}{self.x(index + 1):.2f} {self.y(value):.2f}")
            command = "L"
        return found

    def axes(self, label: str) -> list[str]:
        """Return axis lines, ticks and labels."""
        floor, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        parts = []
        step = _round_up_step((self.top - self.bottom) / 6)
        for index in range(round((self.top - self.bottom) / step) + 1):
            value = self.bottom + index * step
            y = self.y(value)
            parts.append(
                f'<path d="M{LEFT} {y:.2f}H{right}" stroke="#dddddd"/>'
                f'<text x="{LEFT - 8}" y="{y + 4:.2f}" text-anchor="end">'
                f"{_format_number(value)}</text>"
            )
        step = max(1.0, _round_up_step(self.updates / 6))
        for update in [1, *(round(step * i) for i in range(1, int(self.updates / step) + 1))]:
            if update == 1 and step == 1.0:
                continue
            x = self.x(update)
            parts.append(
                f'<path d="M{x:.2f} {floor}v5" stroke="#333333"/>'
                f'<text x="{x:.2f}" y="{floor + 20}" text-anchor="middle">{update}</text>'
            )
        middle, across = (TOP + floor) / 2, (LEFT + right) / 2
        parts.append(f'<path d="M{LEFT} {TOP}V{floor}H{right}" fill="none" stroke="#333333"/>')
        parts.append(
            f'<text x="{across:.0f}" y="{HEIGHT - 18}" text-anchor="middle">updates</text>'
            f'<text transform="translate(18 {middle:.0f}) rotate(-90)" text-anchor="middle">'
            f"{_escape_text(label)}</text>"
        )
        return parts


def _make_legend_entry(number: int, line: LossCurve, style: str) -> list[str]:
    """Return a curve's row of the legend."""
    x, y = WIDTH - RIGHT + 18, TOP + 10 + 22 * number
    last = line.values[-1] if line.values else math.nan
    end = _format_number(last) if math.isfinite(last) else "diverged"
    return [
        f'<path d="M{x} {y}h26" stroke-width="2.5" {style}/>',
        f'<text x="{x + 34}" y="{y + 4}">{_escape_text(line.name)}</text>'
        f'<text x="{WIDTH - 12}" y="{y + 4}" text-anchor="end">{end}</text>',
    ]


def _make_style(number: int) -> str:
    dash = DASHES[number // len(COLORS) % len(DASHES)]
    return f'stroke="{COLORS[number % len(COLORS)]}"' + (
        f' stroke-dasharray="{dash}"' if dash else ""
    )


def _round_up_step(rough: float) -> float:
    """Return the next of 1, 2, 5 times a power of ten that is not smaller."""
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough * (1 - 1e-9))


def _format_number(value: float) -> str:
    return f"{0.0 if abs(value) < 1e-12 else value:.4g}"


def _escape_text(text: str) -> str:
    """Escape a text and remove what XML does not support."""
    return escape("".join(c if c.isprintable() else "?" for c in text))
