"""Look up the functions of a graph by name.

A graph file may be untrusted, so names are looked up in a list of known safe functions and never
imported.
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
_NO_OPS = frozenset({"aten.from_file"})  # opens and may create a file


def name_of(function: Any) -> str:
    """Return the name of a function, such as "operator:add", that :func:`function` looks up."""
    return f"{function.__module__}:{function.__qualname__}"


def function(name: str) -> Any:
    """Return the function of this name; raise ValueError if it is not allowed in a graph."""
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
    raise ValueError(f"{name[:80]!r} is not a function that a graph may call")


def operation(name: str) -> Any:
    """Return the op of torch or of an installed library; raise ValueError for an unknown name."""
    found: Any = torch.ops
    if _OP.fullmatch(str(name)) and str(name).rpartition(".")[0] not in _NO_OPS:
        for part in name.split("."):
            found = getattr(found, part, None)
        if getattr(found, "namespace", "") == "higher_order" or (
            is_op(found) and has_kernel(found)
        ):
            return found
    raise ValueError(f"Unknown op: {str(name)[:80]!r}")
