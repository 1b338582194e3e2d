"""What an op does, whatever the device: FLOPs and bytes, as numbers or sympy expressions.

Shapes may hold ints or sympy expressions in the graph's symbols (batch, sequence); the answers are
then expressions in the same symbols, made with + and x alone.
"""

from __future__ import annotations

from .contractions import PRODUCTS, SPECIAL, flops
from .memory_traffic import is_free, is_known, traffic

__all__ = ["PRODUCTS", "SPECIAL", "flops", "is_free", "is_known", "traffic"]
