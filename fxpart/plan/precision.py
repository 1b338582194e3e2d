"""The precision of a plan's computation and of its transfers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

PRECISIONS = ("fp32", "bf16", "fp8")
TRANSFER_DTYPES = ("", "bfloat16")

Constraints = Mapping[str, int | float | str | bool]


def precision_of(constraints: Constraints) -> Literal["fp32", "bf16", "fp8"]:
    """Return "bf16" for autocast in bfloat16, "fp8" with linear products in 8 bits, else "fp32"."""
    given = constraints.get("precision")
    return "fp8" if given == "fp8" else "bf16" if given == "bf16" else "fp32"


def transfer_dtype_of(constraints: Constraints) -> Literal["", "bfloat16"]:
    """ "bfloat16" where float32 is sent in that dtype between ranks, else ""."""
    return "bfloat16" if constraints.get("transfer_dtype") == "bfloat16" else ""


def wire_dtype(dtype: str, transfer_dtype: str) -> str:
    """Return the dtype in which ``dtype`` is sent: float32 as ``transfer_dtype``."""
    return transfer_dtype if transfer_dtype and dtype == "float32" else dtype
