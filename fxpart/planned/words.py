"""Names of stages and of decisions, as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def label(blocks: Sequence[str]) -> str:
    """Blocks as people name them: the first and the last."""
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} … {blocks[-1]}"
