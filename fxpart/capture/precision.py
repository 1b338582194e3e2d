"""What ``precision`` may be, and the autocast that it stands for."""

from __future__ import annotations

import torch

from fxpart.errors import error

PRECISIONS = ("fp32", "bf16")


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The dtype of ``torch.autocast`` around model and loss; None for "fp32". FXP109 for others."""
    if precision == "fp32":
        return None
    if precision == "bf16":
        return torch.bfloat16
    half = precision in ("fp16", "float16", "half")
    raise error(
        "FXP109",
        where=f"precision={precision!r}",
        why="float16 needs its loss scaled, which fxpart does not do" if half else "not known",
        fix='precision="bf16", which has the range of float32 and needs no scaling'
        if half
        else " or ".join(f'"{name}"' for name in PRECISIONS),
    )
