"""Detect calls that tracing records as constants, with the user's source line."""

from __future__ import annotations

import linecache
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch

from fxpart.capture.source_locations import shorten_path
from fxpart.verification.reachable_code import is_models

CLOCKS = (
    time.time, time.monotonic, time.perf_counter, time.process_time,
    time.time_ns, time.monotonic_ns, time.perf_counter_ns, time.process_time_ns,
)  # fmt: skip
DAY = 86_400
_NAMES = frozenset(
    (
        *(clock.__name__ for clock in CLOCKS),
        "random", "getrandbits", "now", "utcnow", "today", "urandom",
    )
)  # fmt: skip


@dataclass
class ImpureCalls:
    """The first source line of each kind: random numbers, clock, date, entropy, differentiation."""

    random: str = ""
    clock: str = ""
    date: str = ""
    entropy: str = ""
    gradient: str = ""
    _codes: frozenset[CodeType] = field(default_factory=frozenset)

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Record the calls made in this context."""
        self._codes = frozenset(_gradient_codes())
        before = sys.getprofile()
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore the calls made in this context, inside of :meth:`calls`."""
        before = sys.getprofile()
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if frame.f_code in self._codes:
                self.gradient = self.gradient or _line(frame.f_back)
        elif event == "c_call" and argument.__name__ in _NAMES:
            self._note(frame, argument)

    def _note(self, frame: FrameType, function: Any) -> None:
        name, owner = function.__name__, getattr(function, "__self__", None)
        if isinstance(owner, random.Random):
            self.random = self.random or _line(frame)
        elif function in CLOCKS:
            self.clock = self.clock or _line(frame)
        elif name == "urandom":
            self.entropy = self.entropy or _line(frame)
        elif isinstance(owner, type) and owner.__module__ == "datetime":
            self.date = self.date or _line(frame)


def _gradient_codes() -> Iterator[CodeType]:
    functions = (
        torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward, torch.func.grad,
        torch.func.grad_and_value, torch.func.vjp, torch.func.jvp, torch.func.jacrev,
        torch.func.jacfwd, torch.func.hessian, torch.autograd.functional.jacobian,
        torch.autograd.functional.hessian, torch.autograd.functional.vjp,
    )  # fmt: skip
    for function in functions:
        code = getattr(function, "__code__", None)
        if code is not None:
            yield code


def _line(frame: FrameType | None) -> str:
    """Return the innermost line of the model's own code, "" if there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_models(file):
            text = linecache.getline(file, frame.f_lineno).strip()
            return f"{shorten_path(file)}:{frame.f_lineno}" + (f": {text}" if text else "")
        frame = frame.f_back
    return ""


@contextmanager
def advance_clocks(namespaces: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Advance the clocks of ``time`` by a day, also under their names in these namespaces."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    known = {id(space): space for space in (vars(time), *namespaces)}
    later = {clock: _later(clock) for clock in CLOCKS}
    try:
        for space in known.values():
            for name, value in list(space.items()):
                if callable(value) and _hashable(value) and value in later:
                    replaced.append((space, name, value))
                    space[name] = later[value]
        yield
    finally:
        for space, name, value in replaced:
            space[name] = value


def _later(clock: Callable[[], float]) -> Callable[[], float]:
    offset = DAY * (1_000_000_000 if clock.__name__.endswith("_ns") else 1) * 1.37
    return lambda: type(clock())(clock() + offset)


def _hashable(value: Any) -> bool:
    return type(value).__hash__ is not None and type(value).__name__ == (
        "builtin_function_or_method"
    )
