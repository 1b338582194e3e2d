"""torch.compile: whether it works here, and its results."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn


def compiler_fault(backend: str, kind: str = "cpu") -> str | None:
    """Return why stages cannot be compiled here, None if nothing is known to be missing.

    backend: of torch.compile. kind: "cpu" or "cuda". inductor generates C++ for CPUs, which needs a
    compiler and Python's headers, and Triton for GPUs. Uses ``torch._inductor.cpp_builder`` to find
    torch's compiler; searches the usual names if that is missing.
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
    """Return whether ``module.compile`` was called (``_compiled_call_impl``)."""
    return getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def unwrap_compiled(*modules: object) -> Iterator[bool]:
    """Unwrap submodules and functions that torch.compile wrapped, in this context.

    modules: modules, functions or None. Parameter names are then those of the original module,
    without "_orig_mod". Yield whether anything was compiled. Uses ``_orig_mod`` of torch.compile's
    results, ``_compiled_call_impl`` of modules compiled in place, and ``torch.compiler.set_stance``
    for compiled functions (it would break torch.cond).
    """
    inside = [m for root in modules if isinstance(root, nn.Module) for m in root.modules()]
    wrapped = [
        (module._modules, name, child)
        for module in inside
        for name, child in module._modules.items()
        if isinstance(getattr(child, "_orig_mod", None), nn.Module) and not _holds_wrapped(module)
    ]
    in_place = [(m, m._compiled_call_impl) for m in inside if is_compiled(m)]
    for slots, name, child in wrapped:
        slots[name] = child._orig_mod  # type: ignore[union-attr, assignment]
    for module, _ in in_place:
        module._compiled_call_impl = None
    functions = any(map(_is_compiled_function, _functions(inside, modules)))
    try:
        with torch.compiler.set_stance("force_eager") if functions else nullcontext():
            yield bool(wrapped or in_place or functions)
    finally:
        for slots, name, child in wrapped:
            slots[name] = child
        for module, call in in_place:
            module._compiled_call_impl = call


def plain_name(name: str) -> str:
    """Return a tensor's name in the original module, from its name in a compiled module."""
    return name.replace("_orig_mod.", "")


def _functions(inside: Iterable[nn.Module], given: Iterable[object]) -> Iterator[object]:
    """Yield the given functions, attributes and methods of modules, and their modules' globals."""
    yield from given
    kinds = {base for m in inside for base in type(m).__mro__}
    for module in inside:
        yield from vars(module).values()
    for scope in {sys.modules[k.__module__] for k in kinds if k.__module__ in sys.modules}:
        if scope.__name__.partition(".")[0] not in ("torch", "builtins"):
            yield from vars(scope).values()
    for kind in kinds:
        yield from vars(kind).values()


def _is_compiled_function(held: object) -> bool:
    """Return whether torch.compile created a function, which records the original one."""
    return isinstance(held, FunctionType) and "_torchdynamo_orig_callable" in vars(held)


def _holds_wrapped(module: nn.Module) -> bool:
    """Return whether the module itself is a result of torch.compile, with one child."""
    return "_orig_mod" in module._modules


def _cpp_compiler() -> str | None:
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        found = str(get_cpp_compiler())
        return found if shutil.which(found) else None
    except Exception:  # torch raises its own errors, or the function has moved
        names = ("g++", "clang++", "c++")
        return next((name for name in names if shutil.which(name)), None)


def compile_counters() -> Mapping[str, Mapping[str, int]]:
    """Return torch.compile's counters of this process: "stats", "graph_break" (by reason), ...

    Reads ``torch._dynamo.utils.counters``; empty if that is missing.
    """
    try:
        from torch._dynamo.utils import counters
    except ImportError:
        return {}
    found: Any = counters
    return {str(kind): dict(counts) for kind, counts in found.items()}


@contextmanager
def record_autograd() -> Iterator[None]:
    """Record autograd graphs in the implementation of a custom op, where torch does not.

    Uses ``torch._C._SetExcludeDispatchKeyGuard``.
    """
    keys = torch._C.DispatchKey
    with ExitStack() as stack:
        for key in (keys.AutogradFunctionality, keys.ADInplaceOrView):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield


def compiler_errors() -> tuple[type[Exception], ...]:
    """Return what torch.compile raises for code that it cannot compile.

    Reads ``torch._dynamo.exc``; RuntimeError if that is missing.
    """
    try:
        from torch._dynamo.exc import TorchDynamoException
    except ImportError:
        return (RuntimeError,)
    return (TorchDynamoException,)
