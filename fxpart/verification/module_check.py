"""Compile-time check: compare two steps of the user's module with two of the program."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from fxpart.capture.captured_model import CapturedModel
from fxpart.capture.context_managers import quiet
from fxpart.capture.flat_batch import flatten_batch
from fxpart.capture.model_tensors import loss_prefix, state_of
from fxpart.compiler.float8_linear import without_float8
from fxpart.errors import FxpartError, Problem, error
from fxpart.plan.model import ModuleCheck
from fxpart.verification.comparison_runs import (
    ComparisonSetup,
    ComparisonStep,
    run_eagerly,
    run_module,
    run_program,
)
from fxpart.verification.comparison_sample import (
    MOST_PARAMETERS,
    MOST_WORK,
    batches,
    explain_skip,
    find_leaked_constants,
    parameters,
    samples,
)
from fxpart.verification.differences import DOUBLE, SINGLE, coarseness, differences
from fxpart.verification.findings import (
    drawn_problem,
    failed_problem,
    leaked_problem,
    number_problems,
    python_problems,
)
from fxpart.verification.gradient_hooks import refuse_gradient_hooks
from fxpart.verification.impure_calls import ImpureCalls, advance_clocks
from fxpart.verification.mutable_object import StateChange
from fxpart.verification.reachable_code import ReachableCode
from fxpart.verification.reachable_state import ReachableState

OPTIONS = ("auto", "on", "off")
_SEEDS = (11, 12, 13)


def check_option(check: str) -> str:
    """Return the option; raise FXP109 unless it is ``auto``, ``on`` or ``off``."""
    if check not in OPTIONS:
        raise error(
            "FXP109", where=f"check={check!r}", why=f"unknown check {check!r}",
            fix='use "auto", "on" or "off"',
        )  # fmt: skip
    return check


def check_module(
    model: nn.Module,
    loss: Any,
    captured: CapturedModel,
    graph: fx.GraphModule,
    *,
    seed: int = 0,
    check: str = "auto",
) -> ModuleCheck:
    """Compare the captured program with the module; raise FXP113 if they differ.

    graph: the prepared graph. check: "auto" skips what cannot run or is too expensive, "on" runs
    everything that can run (FXP109 otherwise), "off" runs nothing. Products in 8 bits, whose
    rounding would hide other differences, are compared in bfloat16. The module, its gradients,
    everything reachable from it and the random generators are restored.
    """
    refuse_gradient_hooks(model, loss)
    if check_option(check) == "off":
        return ModuleCheck(status="off")
    reason = explain_skip(captured)
    if reason and check == "on":
        raise error(
            "FXP109", where="check='on'", why=reason, fix='use check="auto", which skips it'
        )
    graph = without_float8(graph)
    kept = [] if reason else find_leaked_constants(captured)
    if kept:
        raise FxpartError(leaked_problem(kept[0]))
    tried = [] if reason else samples(captured, graph)
    if check == "auto" and not reason:
        reason = _too_expensive(captured, tried[0].cost if tried else 0.0)
    if reason:
        return ModuleCheck(status="skipped", reason=reason)
    _ModuleComparison(model, loss, captured, graph, seed).run(
        [s for s in tried if check == "on" or s.cost <= MOST_WORK] or tried[:1]
    )
    return ModuleCheck(status="passed")


def _too_expensive(captured: CapturedModel, work: float) -> str:
    count = parameters(captured)
    if count > MOST_PARAMETERS:
        return f"the model has {count} parameters, more than the limit of {MOST_PARAMETERS}"
    if work > MOST_WORK:
        return f"two steps need {work:.1e} multiplications, more than the limit of {MOST_WORK:.1e}"
    return ""


@dataclass
class _ModuleComparison:
    model: nn.Module
    loss: Any
    captured: CapturedModel
    graph: fx.GraphModule
    seed: int

    def run(self, tried: Sequence[Any]) -> None:
        """Try samples until one gives finite values; raise the problems found."""
        assert self.captured.example is not None, "checked before"
        parts = flatten_batch(self.captured.example())
        code = ReachableCode.of(self.model, self.loss)
        prefix = loss_prefix(self.model)

        def live() -> dict[str, torch.Tensor]:
            return state_of(self.model, self.loss, prefix).tensors

        for index, sample in enumerate(tried):
            given = ComparisonSetup(
                self.captured, self.graph, self.seed,
                batches(self.captured, parts.tensors, sample), parts.tree, live,
            )  # fmt: skip
            last = index == len(tried) - 1
            try:
                if self._compare(given, code) or last:
                    return
            except _SampleRunError as unfit:
                if last:
                    raise FxpartError(failed_problem(unfit.cause, unfit.what)) from unfit.cause

    def _compare(self, given: ComparisonSetup, code: ReachableCode) -> bool:
        """Compare on one sample; return whether the loss was finite, so that it is meaningful."""
        keys = self._keys()
        state = ReachableState.of(self.model, self.loss, code)
        seen, changes = ImpureCalls(), _StepChanges([], [])

        def add_changes(step: int) -> None:
            with seen.paused():
                changes.add(step, state, self)

        with self._undone(state):
            # Python code may draw from torch's generator, whose state is the same in every run.
            try:
                with seen.calls():
                    module = run_module(given, add_changes)
            except FxpartError:
                raise
            except Exception as cause:  # the user's module may raise anything
                raise _SampleRunError(cause) from cause
            fresh = sorted(self._keys() ^ keys)
            refuse_gradient_hooks(self.model, self.loss)
        self._draws(given, state, seen, code, module, changes)
        problems = python_problems(changes.first, changes.second, fresh, code)
        if problems:
            raise FxpartError(problems)
        with self._undone(state):
            try:
                program = run_program(given)
            except Exception as cause:  # operations may raise anything
                raise _SampleRunError(cause, "the captured program") from cause
        coarse = self._coarse()
        found = differences(module, program, SINGLE, coarse)
        if found and not coarse:
            found = self._in_double(given, state) or []
        if found:
            raise FxpartError(number_problems(found, changes.first, seen, code, self.model))
        return all(bool(torch.isfinite(step.loss).all()) for step in module)

    def _in_double(self, given: ComparisonSetup, state: ReachableState) -> list[Any]:
        """Return the differences in double precision, which rounding does not explain."""
        wide = given.in_double()
        with self._undone(state):
            module = run_module(wide)
        with self._undone(state):
            program = run_program(wide)
        return differences(module, program, DOUBLE)

    def _coarse(self) -> float:
        return coarseness(list(self.captured.state.values()), self.captured.precision)

    def _keys(self) -> set[str]:
        keys = set(self.model.state_dict(keep_vars=True))
        if isinstance(self.loss, nn.Module):
            keys |= {f"loss.{key}" for key in self.loss.state_dict(keep_vars=True)}
        return keys

    @contextmanager
    def _undone(self, state: ReachableState) -> Iterator[None]:
        """Restore everything afterwards, including torch's generators."""
        try:
            torch.clear_autocast_cache()  # it may contain values of the tracer
            with torch.inference_mode(False), torch.random.fork_rng(), quiet():
                yield
        finally:
            state.restore()

    def _draws(
        self,
        given: ComparisonSetup,
        state: ReachableState,
        seen: ImpureCalls,
        code: ReachableCode,
        module: Sequence[ComparisonStep],
        changes: _StepChanges,
    ) -> None:
        """Raise FXP113 if random numbers of Python, or a clock, affect the result of forward."""
        drawn = [c for c in changes.first if c.kind == "random"]
        if drawn and any(self._other(given, state, s, module[0]) for s in self._seeded()):
            raise FxpartError(drawn_problem("random", seen.random, drawn[0], code))
        if seen.clock:
            spaces = [f.__globals__ for f in code.functions.values()]
            if self._other(given, state, lambda: advance_clocks(spaces), module[0]):
                raise FxpartError(drawn_problem("clock", seen.clock, None, code))
        if seen.entropy and self._other(given, state, _nothing, module[0]):
            raise FxpartError(drawn_problem("random", seen.entropy, None, code))
        if seen.date:
            raise FxpartError(drawn_problem("clock", seen.date, None, code))

    def _seeded(self) -> Iterator[Callable[[], Any]]:
        """Yield contexts with other seeds or extreme values of Python's and NumPy's generators."""
        for seed in _SEEDS:
            yield partial(_reseeded, seed, None)
        for word in (0, 0xFFFFFFFF):
            yield partial(_reseeded, 1, word)

    def _other(
        self,
        given: ComparisonSetup,
        state: ReachableState,
        within: Callable[[], Any],
        before: ComparisonStep,
    ) -> bool:
        """Return whether the context changes the loss or an output of the first step."""
        from fxpart.verification.differences import distance
        from fxpart.verification.single_process import draws_scalars, keyed_random

        scalars = draws_scalars(given.graph)
        with self._undone(state), within(), torch.no_grad():
            try:
                with keyed_random(given.key(0), scalars=scalars):
                    loss, *outputs = run_eagerly(given, given.leaves(0))
            except Exception:  # a failure is a different code path
                return True
        if distance(loss, before.loss) > max(SINGLE, self._coarse()):
            return True
        pairs = zip(outputs, before.outputs, strict=False)
        return any(distance(a, b) > max(SINGLE, self._coarse()) for a, b in pairs)


@dataclass
class _StepChanges:
    """Changes of the first step, and changes repeated in the second step."""

    first: list[StateChange]
    second: list[StateChange]
    _middle: ReachableState | None = None

    def add(self, step: int, state: ReachableState, check: _ModuleComparison) -> None:
        if step == 0:
            self.first = state.changes()
            self._middle = ReachableState.of(
                check.model, check.loss, ReachableCode.of(check.model, check.loss)
            )
        elif self._middle is not None:
            self.second = self._middle.changes()


class _SampleRunError(Exception):
    """Raised if the module or the program cannot run on the sample."""

    def __init__(self, cause: Exception, what: str = "the module as written") -> None:
        super().__init__(str(cause))
        self.cause, self.what = cause, what


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _reseeded(seed: int, word: int | None) -> Iterator[None]:
    """Reseed Python's and NumPy's generators. word: their first output, 256 times."""
    random.seed(seed)
    if word is not None:
        version, numbers, gauss = random.getstate()
        raw = _untempered(word)
        random.setstate((version, (*[raw] * 256, *numbers[256:624], 0), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
        if word is not None:
            kind, numbers, *_ = numpy.random.get_state()
            numbers = numbers.copy()
            numbers[:256] = _untempered(word)
            numpy.random.set_state((kind, numbers, 0, 0, 0.0))
    yield


def _untempered(word: int) -> int:
    """Return the Mersenne Twister state word whose next output is this number."""
    y = word ^ (word >> 18)
    y ^= (y << 15) & 0xEFC60000
    value = y
    for _ in range(5):
        value = y ^ ((value << 7) & 0x9D2C5680)
    y = value
    value = y
    for _ in range(3):
        value = y ^ (value >> 11)
    return value & 0xFFFFFFFF


__all__ = ["OPTIONS", "Problem", "check_module", "check_option"]
