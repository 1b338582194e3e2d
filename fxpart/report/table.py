"""Plain text tables: columns as wide as their widest cell."""

from __future__ import annotations

from collections.abc import Sequence

LEFT, RIGHT = "<", ">"


def table(heads: Sequence[str], align: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; ``align`` has one of ``<`` and ``>`` for each column."""
    assert len(align) == len(heads) and all(len(row) == len(heads) for row in rows)
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = []
    for row in (heads, *rows):
        cells = (
            f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return lines


def shortened(text: str, width: int) -> str:
    """Return the text on one line, without its middle if it is longer than ``width``."""
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"
