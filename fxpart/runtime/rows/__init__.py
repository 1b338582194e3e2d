"""Sparse gradients of tables: they travel as the rows that were touched, and stay sparse."""

from __future__ import annotations

from fxpart.runtime.rows.numbers import numbers
from fxpart.runtime.rows.parts import Parts
from fxpart.runtime.rows.rows import Rows
from fxpart.runtime.rows.supported import check_gradients

__all__ = ["Parts", "Rows", "check_gradients", "numbers"]
