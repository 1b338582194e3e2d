"""Functions of a graph by name, and back: only those that compute with tensors and sizes.

A graph's file may come from anyone. What it names is looked up among what is known to be harmless,
never imported.
"""

from __future__ import annotations

import builtins
import math
import operator
import re
from typing import Any

import torch

from fxpart import collectives
from fxpart.compat import has_kernel
from fxpart.compiler.effects import is_op
from fxpart.rng import seeded

_OPERATORS = (
    "abs add and_ concat eq floordiv ge getitem gt index inv invert is_ is_not le lshift lt matmul "
    "mod mul ne neg not_ or_ pos pow rshift sub truediv truth xor"
)
_BUILTINS = "abs bool complex float int len max min pow round"
_MATH = (
    "acos acosh asin asinh atan atan2 atanh ceil cos cosh exp fabs floor fmod isfinite isinf isnan "
    "log log10 log1p log2 pow sin sinh sqrt tan tanh trunc"
)
_OP = re.compile(r"[A-Za-z]\w*(\.\w+){1,2}", re.ASCII)
_NO_OPS = frozenset({"aten.from_file"})  # it opens, and may make, the file that it is given


def name_of(function: Any) -> str:
    """ "operator:add" and the like: what :func:`function` finds again."""
    return f"{function.__module__}:{function.__qualname__}"


def function(name: str) -> Any:
    """The function of that name; ValueError for any that is not one of a graph."""
    module, _, own = str(name).partition(":")
    if module in ("operator", "_operator") and own in _OPERATORS.split():
        return getattr(operator, own)
    if module == "math" and own in _MATH.split():
        return getattr(math, own)
    if module == "builtins" and own in _BUILTINS.split():
        return getattr(builtins, own)
    if module == "torch" and own.startswith("sym_") and own.isidentifier():
        return getattr(torch, own)
    if name == name_of(seeded):
        return seeded
    found = getattr(collectives, own, None) if own.isidentifier() else None
    if callable(found) and name == name_of(found):
        return found
    raise ValueError(f"{name[:80]!r} is no function that a graph calls")


def operation(name: str) -> Any:
    """The op of torch, or of an installed library, of that name; ValueError where it is none."""
    found: Any = torch.ops
    if _OP.fullmatch(str(name)) and str(name).rpartition(".")[0] not in _NO_OPS:
        for part in name.split("."):
            found = getattr(found, part, None)
        if getattr(found, "namespace", "") == "higher_order" or (
            is_op(found) and has_kernel(found)
        ):
            return found
    raise ValueError(f"{str(name)[:80]!r} is no op")
