"""torch.compile: whether it can work here, and what it made."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def compiler_fault(backend: str, kind: str = "cpu") -> str | None:
    """Why stages cannot be compiled here, None where nothing is known to be missing.

    backend: of torch.compile. kind: "cpu" or "cuda". inductor writes C++ for CPUs, which needs a
    compiler and Python's headers, and Triton for GPUs. Uses ``torch._inductor.cpp_builder`` to ask
    for the compiler that torch would take; looks for the usual names where that is gone.
    """
    if backend != "inductor":
        return None
    if kind == "cuda":
        missing = importlib.util.find_spec("triton") is None
        return "Triton is not installed, in which it writes code for GPUs" if missing else None
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Python's headers (Python.h) are not installed, which its C++ code needs"
    return None if _cpp_compiler() else "there is no C++ compiler (g++ or clang++)"


def is_compiled(module: Any) -> bool:
    """Whether ``module.compile`` was called (``_compiled_call_impl``)."""
    return getattr(module, "_compiled_call_impl", None) is not None


def _cpp_compiler() -> str | None:
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        found = str(get_cpp_compiler())
        return found if shutil.which(found) else None
    except Exception:  # torch raises its own kinds where it finds none, or it has moved
        names = ("g++", "clang++", "c++")
        return next((name for name in names if shutil.which(name)), None)


def compile_counters() -> Mapping[str, Mapping[str, int]]:
    """What torch.compile has counted in this process: "stats", "graph_break" (by reason), ...

    Reads ``torch._dynamo.utils.counters``; empty where that is gone.
    """
    try:
        from torch._dynamo.utils import counters
    except ImportError:
        return {}
    found: Any = counters
    return {str(kind): dict(counts) for kind, counts in found.items()}
