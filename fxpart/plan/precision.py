"""In which numbers a plan computes and sends: what it may say of them, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

PRECISIONS = ("fp32", "bf16")
TRANSFER_DTYPES = ("", "bfloat16")

Constraints = Mapping[str, int | float | str | bool]


def precision_of(constraints: Constraints) -> Literal["fp32", "bf16"]:
    """ "bf16" where the model runs under autocast in bfloat16, else "fp32"."""
    return "bf16" if constraints.get("precision") == "bf16" else "fp32"


def transfer_dtype_of(constraints: Constraints) -> Literal["", "bfloat16"]:
    """ "bfloat16" where float32 is sent as that from rank to rank, else ""."""
    return "bfloat16" if constraints.get("transfer_dtype") == "bfloat16" else ""


def wire_dtype(dtype: str, transfer_dtype: str) -> str:
    """As what a value of ``dtype`` is sent: float32 as ``transfer_dtype``, all else as it is."""
    return transfer_dtype if transfer_dtype and dtype == "float32" else dtype
