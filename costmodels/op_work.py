"""FLOPs and bytes of an op, independent of the device, as numbers or sympy expressions.

Shapes may contain ints or sympy expressions in the graph's symbols (batch, sequence); the results
are then expressions in the same symbols, made with + and x alone.
"""

from __future__ import annotations

from .contractions import FLOAT8, PRODUCTS, SPECIAL, flops
from .memory_traffic import is_free, is_known, traffic

__all__ = ["FLOAT8", "PRODUCTS", "SPECIAL", "flops", "is_free", "is_known", "traffic"]
