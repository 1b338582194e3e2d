"""Values of ``precision``, and the autocast dtype of each."""

from __future__ import annotations

import torch

from fxpart.errors import error

PRECISIONS = ("fp32", "bf16", "fp8")


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype of ``torch.autocast`` around model and loss; None for "fp32".

    Raise FXP109 for an unknown precision.
    """
    if precision == "fp32":
        return None
    if precision in ("bf16", "fp8"):  # Linear products in 8 bits have operands in bfloat16.
        return torch.bfloat16
    half = precision in ("fp16", "float16", "half")
    raise error(
        "FXP109",
        where=f"precision={precision!r}",
        why="float16 requires loss scaling, which fxpart does not support"
        if half
        else f"unknown precision {precision!r}",
        fix='use precision="bf16", which has the range of float32 and needs no loss scaling'
        if half
        else "use " + " or ".join(f'"{name}"' for name in PRECISIONS),
    )
