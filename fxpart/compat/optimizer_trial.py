"""Step copies of an optimizer on small tensors, whole and in parts, and compare the results.

Small tensors in the groups of the real optimizer are stepped twice: all by one optimizer, and
divided in each way in which the plan divides parameters. If the results differ, the optimizer mixes
the parts. One part at a time has by far the largest gradients, and their scale grows, so that any
limit on a norm is above that of a part and below that of the whole. Counters of steps are advanced
to also test a late phase of training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from fxpart.compat.optimizers import optimizer_over

# By group: pairs of a real parameter and a small one.
Members = list[list[tuple[torch.Tensor, torch.Tensor]]]

# Of the two largest dims, whose order is kept; some optimizers treat matrices with 128 or more rows
# differently.
_LARGEST = (144, 130)
_OTHER = 2  # Size of a further dim.
_MANY = 20_000  # Above this number of elements, fewer tensors are used.
_SHAPES = 3  # Shapes per otherwise equal parameters.
MAX_PARTS = 4  # Per dim.
_UNEVEN = 30.0  # Factor of one part's gradients.
# Scales of the gradients of each step. Tensors that start at zero may show a difference only in the
# first.
_FIRST = (10.0, 1.0)
_EARLY = (3e-5, 1e-3, 0.03, 1.0, 30.0, 3e-5, 0.3, 1e-3, 3.0, 0.03, 1.0, 30.0)
_LATE = (1.0, 0.03, 1e-3, 1.0)
_AHEAD = 998 - len(_EARLY)  # Number of steps to skip before the late ones.
_RATE = 1e-2  # Learning rate if a warm-up starts at zero.
NOT_STEPPED = "its step on small tensors fails"
_SEED = 20_261
_SHIFT = 1021  # Maximum offset between the random numbers of different tensors and steps.


@dataclass(frozen=True)
class ParameterSplit:
    """How a parameter is split: into flat ranges, or along dims; the number of parts of each."""

    flat: int = 1
    dims: tuple[tuple[int, int], ...] = ()

    def __call__(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a contiguous tensor, as views."""
        if self.flat > 1:
            return list(whole.reshape(-1).chunk(self.flat))
        found = [whole]
        for dim, parts in self.dims:
            found = [part for each in found for part in each.chunk(parts, dim)]
        return found


def find_difference(
    optimizer: torch.optim.Optimizer, names: dict[int, str], cut: dict[str, ParameterSplit] | None
) -> str:
    """Step small parameters whole and in parts; return how they differ, "" if they do not.

    cut: splits of parameters by name; None: each part has whole parameters.
    """
    real = _select_parameters(optimizer, names, cut)
    # Float64 distinguishes the smallest update from rounding.
    wide = {torch.float32: torch.float64}
    failed = ""
    with _preserve_random_state():
        for dtypes, ahead in ((wide, _AHEAD), (wide, 0), ({}, _AHEAD), ({}, 0)):
            try:
                starts = _TrialParameters(real, names, cut, dtypes)
                first = _compare(optimizer, starts, _FIRST, (), ahead)
                return first or _compare(optimizer, starts, _EARLY, _LATE, ahead)
            except _UndividedOptimizerError as cause:
                failed = f"{NOT_STEPPED}: {cause}"
    return failed


class _UndividedOptimizerError(Exception):
    """The optimizer of all small tensors raised an exception."""


class _TrialParameters:
    """The small tensors: for each its real parameter, initial value, and split."""

    def __init__(
        self,
        real: Sequence[Sequence[torch.Tensor]],
        names: Mapping[int, str],
        cut: Mapping[str, ParameterSplit] | None,
        dtypes: Mapping[torch.dtype, torch.dtype],
    ) -> None:
        """real: parameters of each group. dtypes: replacements for dtypes of small tensors."""
        make = torch.Generator().manual_seed(_SEED)
        self.groups: Members = []
        for group in real:
            self.groups.append([])
            for p in group:
                # Half of them start at zero, as biases do; without splits, each part needs some.
                copies = 2 if cut is not None or math.prod(shrink_shape(p.shape)) > _MANY else 4
                self.groups[-1] += [
                    (p, _make_small(p, make, dtypes) * (n < copies // 2)) for n in range(copies)
                ]
        self.flat = [pair for group in self.groups for pair in group]
        self.cuts = [None if cut is None else cut[names[id(p)]] for p, _ in self.flat]
        most = max((p.numel() for _, p in self.flat), default=0)
        self._line = torch.randn(most + _SHIFT, generator=make, dtype=torch.float32) + 0.3
        self.parts = max(
            (2 if c is None else len(c(p)) for c, (_, p) in zip(self.cuts, self.flat, strict=True)),
            default=0,
        )

    def select_part(self, values: Sequence[torch.Tensor], part: int) -> list[list[torch.Tensor]]:
        """Return a part of each tensor; without splits, every second tensor."""
        return [
            ([value] if at % 2 == part else []) if cut is None else cut(value)[part : part + 1]
            for at, (value, cut) in enumerate(zip(values, self.cuts, strict=True))
        ]

    def gradients(self, step: int, scale: float) -> list[torch.Tensor]:
        """Return random gradients; those of one part, which changes every step, are the largest."""
        drawn = []
        for at, (_, p) in enumerate(self.flat):
            start = (step * 101 + at * 37) % _SHIFT
            made = self._line[start : start + p.numel()].view(p.shape) * (
                scale * (1 + 2 * (at % 2))
            )
            drawn.append(made.to(p.device, p.dtype))
        for mine in self.select_part(drawn, step % max(self.parts, 1)):
            for each in mine:
                each.mul_(_UNEVEN)
        return drawn


class _TrialOptimizer:
    """A copy of the optimizer over one part of the small tensors; None: over all."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, starts: _TrialParameters, part: int | None
    ) -> None:
        self._starts, self._part = starts, part
        self._parameters = [
            [torch.nn.Parameter(t.clone(memory_format=torch.contiguous_format)) for t in mine]
            for mine in self._select_part([p for _, p in starts.flat])
        ]
        members: Members = []
        state: dict[torch.Tensor, dict[Any, Any]] = {}
        copies = iter(self._parameters)
        cuts = iter(starts.cuts)
        for group in starts.groups:
            members.append([])
            for real, small in group:
                cut, kept = next(cuts), optimizer.state.get(real)
                for q in next(copies):
                    members[-1].append((real, q))
                    if kept:
                        take = None if part is None else cut
                        state[q] = {
                            k: _slice_state(v, real, small, take, part or 0)
                            for k, v in kept.items()
                        }
        self._made = optimizer_over(optimizer, members, torch.nn.Parameter(torch.empty(0)))
        self._made.state.update(state)
        for options in self._made.param_groups:
            rate = options.get("lr")
            if isinstance(rate, (float, int, torch.Tensor)) and float(rate) == 0.0:
                options["lr"] = options.get("initial_lr") or _RATE

    def step(self, gradients: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Step with this part of the gradients, and write the new parameters into values."""
        for mine, given in zip(self._parameters, self._select_part(gradients), strict=True):
            for q, g in zip(mine, given, strict=True):
                q.grad = g.clone(memory_format=torch.contiguous_format)
        self._made.step()
        for mine, given in zip(self._parameters, self._select_part(values), strict=True):
            for q, t in zip(mine, given, strict=True):
                t.copy_(q.detach().nan_to_num())

    def find_numbers(self) -> dict[tuple[int, Any], tuple[MutableMapping[Any, Any], Any, float]]:
        """Return every number in groups, state and attributes, with its location."""
        found: dict[tuple[int, Any], tuple[MutableMapping[Any, Any], Any, float]] = {}
        made = self._made
        for place in chain((vars(made),), made.param_groups, made.state.values()):
            if isinstance(place, MutableMapping):
                for key, value in place.items():
                    if isinstance(value, torch.Tensor) and value.dim() == 0:
                        found[id(value), None] = place, key, float(value)
                    elif isinstance(value, (int, float)) and not isinstance(value, bool):
                        found[id(place), key] = place, key, float(value)
        return found

    def advance_counters(self, before: Mapping[tuple[int, Any], Any], by: int) -> None:
        """Add ``by`` to each number that has grown by one since ``before``."""
        for at, (place, key, value) in self.find_numbers().items():
            if at in before and value - before[at][2] == 1.0:
                place[key] += by  # In place if it is a tensor.

    def _select_part(self, values: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        if self._part is None:
            return [[value] for value in values]
        return self._starts.select_part(values, self._part)


def _compare(
    optimizer: torch.optim.Optimizer,
    starts: _TrialParameters,
    early: Sequence[float],
    late: Sequence[float],
    ahead: int,
) -> str:
    """Compare the steps on whole tensors and on parts; see :func:`find_difference`.

    early, late: scales of gradients. ahead: number of steps to skip between them.
    """
    if not starts.flat:
        return ""
    with _convert_errors():
        one = _TrialOptimizer(optimizer, starts, None)
    copies = [one, *(_TrialOptimizer(optimizer, starts, part) for part in range(starts.parts))]
    whole, parts = ([p.clone() for _, p in starts.flat] for _ in range(2))
    still = True
    for step, scale in enumerate((*early, *late)):
        gradients = starts.gradients(step, scale)
        count_on = bool(late and ahead) and step == len(early) - 1
        before = [copy.find_numbers() for copy in copies] if count_on else []
        old = [(a.clone(), b.clone()) for a, b in zip(whole, parts, strict=True)]
        with _convert_errors():
            one.step(gradients, whole)
        try:
            for part in copies[1:]:
                part.step(gradients, parts)
        except Exception as cause:
            return f"its step on parts fails: {type(cause).__name__}: {cause}"
        for a, b, (a_old, b_old) in zip(whole, parts, old, strict=True):
            if why := _describe_difference(a, b, a_old, b_old):
                return why
            still = still and torch.equal(a, a_old)
        for copy, was in zip(copies, before, strict=False):
            copy.advance_counters(was, ahead)
    if still and late:
        return "its steps do not change small tensors, so it cannot be checked"
    return ""


def _describe_difference(
    one: torch.Tensor, other: torch.Tensor, one_old: torch.Tensor, other_old: torch.Tensor
) -> str:
    """Return how a step has changed a tensor and its parts differently, "" if it has not."""
    if torch.equal(one, other) and torch.equal(one_old, other_old):
        return ""
    moved = float((one - one_old).abs().max())
    apart = float(((one - one_old) - (other - other_old)).abs().max())
    rounding = 16 * torch.finfo(one.dtype).eps * float(one.abs().max())
    if apart <= max(1e-3 * moved, rounding):
        return ""
    return f"small tensors that change by {moved:.1g} differ by {apart:.1g}"


@contextmanager
def _convert_errors() -> Iterator[None]:
    try:
        yield
    except Exception as cause:  # User code may raise any exception.
        raise _UndividedOptimizerError(f"{type(cause).__name__}: {cause}") from cause


def _select_parameters(
    optimizer: torch.optim.Optimizer, names: dict[int, str], cut: dict[str, ParameterSplit] | None
) -> list[list[torch.Tensor]]:
    """Return for each group one parameter per dtype, number of dims and split."""
    found: list[list[torch.Tensor]] = []
    for group in optimizer.param_groups:
        kinds: dict[Any, dict[tuple[int, ...], torch.Tensor]] = {}
        for p in group["params"]:
            name = names.get(id(p))
            if name is not None and p.numel() and (cut is None or name in cut):
                kind = (p.dim(), p.dtype, None if cut is None else cut[name])
                kinds.setdefault(kind, {}).setdefault(shrink_shape(p.shape), p)
        most = 1 if cut is None else _SHAPES
        found.append([p for shapes in kinds.values() for p in _select_shapes(shapes, most)])
    return found


def _select_shapes(shapes: Mapping[tuple[int, ...], torch.Tensor], most: int) -> list[torch.Tensor]:
    """Return at most ``most`` of the largest, tallest and widest shapes."""
    if len(shapes) <= most:
        return list(shapes.values())
    high = sorted(shapes, key=lambda s: s[0] / s[-1] if len(s) > 1 else s[0])
    kept = dict.fromkeys((max(shapes, key=sorted), high[-1], high[0]))
    return [shapes[shape] for shape in list(kept)[:most]]


def shrink_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape with as many dims, reduced to a size that is fast to step."""
    largest = sorted(range(len(shape)), key=lambda d: -shape[d])[:2]
    most = dict(zip(largest, _LARGEST, strict=False))
    if len(largest) > 1 and shape[largest[0]] == shape[largest[1]]:
        most = dict.fromkeys(largest, min(_LARGEST))
    return tuple(min(size, most.get(dim, _OTHER)) for dim, size in enumerate(shape))


def _make_small(
    like: torch.Tensor, make: torch.Generator, dtypes: Mapping[torch.dtype, torch.dtype]
) -> torch.Tensor:
    """Return a tensor with as many dims on the same device."""
    made = torch.randn(shrink_shape(like.shape), generator=make, dtype=torch.float32)
    return made.to(like.device, dtypes.get(like.dtype, like.dtype))


def _slice_state(
    value: Any, real: torch.Tensor, small: torch.Tensor, take: ParameterSplit | None, number: int
) -> Any:
    """Return one value of a real parameter's state, for a small one."""
    if not isinstance(value, torch.Tensor):
        return value
    fits = all(size in (1, own) for size, own in zip(value.shape, real.shape, strict=False))
    if value.dim() != real.dim() or not value.dim() or not fits:
        return value.detach().clone()
    for dim, size in enumerate(small.shape):
        value = value.narrow(dim, 0, min(size, value.shape[dim]))
    if take is None or any(value.shape[dim] != small.shape[dim] for dim, _ in take.dims):
        return value.detach().clone()
    return take(value)[number].detach().clone()


@contextmanager
def _preserve_random_state() -> Iterator[None]:
    """Disable gradients, and restore the random state afterwards."""
    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_rng_state(state)
