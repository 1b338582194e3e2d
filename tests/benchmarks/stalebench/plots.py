"""Pictures of the results: loss curves, and differences with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from benchmarks.stalebench.intervals import Difference
from benchmarks.stalebench.methods import METHODS
from benchmarks.stalebench.summary import Table

from fxpart.emulator.loss_plot import losses_svg, mean_curve

WIDTH, LEFT, RIGHT, TOP, EACH = 900, 270, 40, 60, 24
_COLORS = {"worse": "#d55e00", "better": "#009e73", "not worse": "#0072b2"}


def draw_curves(table: Table, title: str, steps: int) -> str:
    """Return the mean training loss of each method over updates."""
    lines = []
    for row in table.rows:
        if not row.diverged:
            each = steps // len(row.curves[0])
            long = [[value for value in curve for _ in range(each)] for curve in row.curves]
            lines.append(mean_curve(METHODS[row.method].label, long))
    return losses_svg(
        lines, title, window=1, label=f"training loss, mean of {len(table.seeds)} seeds"
    )


def draw_differences(table: Table, title: str, margin: float) -> str:
    """Return each method's difference to synchronous training with its 95 % interval."""
    rows = [(METHODS[r.method].label, r.difference, r.verdict) for r in table.rows if r.difference]
    low = min(-margin, *(d.low for _, d, _ in rows))
    high = max(margin, *(d.high for _, d, _ in rows))
    bottom = TOP + EACH * len(rows)

    def x(value: float) -> str:
        return f"{LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 50}"'
        f' width="{WIDTH}" height="{bottom + 50}" font-family="sans-serif" font-size="13"'
        ' role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{bottom + 50}" fill="#ffffff"/>',
        f'<text x="20" y="28" font-size="16">{escape(title)}</text>',
        f'<rect x="{x(-margin)}" y="{TOP - 8}" height="{bottom - TOP + 8}" fill="#eeeeee"'
        f' width="{float(x(margin)) - float(x(-margin)):.1f}"/>',
        f'<path d="M{x(0)} {TOP - 8}V{bottom}" stroke="#333333"/>',
        *_draw_rows(rows, x),
    ]
    for value in (low, 0.0, high):
        parts.append(
            f'<text x="{x(value)}" y="{bottom + 18}" text-anchor="middle">{value:+.3g}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{bottom + 40}" text-anchor="middle">test'
        " loss less synchronous, 95 % interval; gray: counts as none</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def _draw_rows(rows: Sequence[tuple[str, Difference, str]], x: object) -> list[str]:
    assert callable(x)
    found = []
    for index, (label, d, verdict) in enumerate(rows):
        y, color = TOP + EACH * index + 8, _COLORS.get(verdict, "#777777")
        found.append(
            f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{escape(label)}</text>'
            f'<path d="M{x(d.low)} {y}H{x(d.high)}" stroke="{color}" stroke-width="2"/>'
            f'<circle cx="{x(d.mean)}" cy="{y}" r="4" fill="{color}"/>'
        )
    return found
