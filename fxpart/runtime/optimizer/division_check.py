"""Whether an optimizer gives the same when a model is divided between several of it.

Small tensors in the groups of the real optimizer are stepped twice: all by one optimizer, and
divided in each way in which the plan divides parameters. What differs then depends on more than
each part. One part at a time has by far the largest gradients, and the scales go from small to
large, so that whatever limit an optimizer sets to a norm lies between a part's and the whole's.
Late in training is looked at too: numbers that count the steps are set ahead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from fxpart.compat import has_step_hooks, optimizer_over
from fxpart.compat.multi_optimizer import MultiOptimizer
from fxpart.errors import FxpartError, error
from fxpart.program.shard_layout import ShardLayout
from fxpart.runtime.optimizer.optimizer_shards import OptimizerShards
from fxpart.runtime.optimizer.user_optimizer import needs_closure
from fxpart.runtime.state.model_state import ModelState
from fxpart.sharding import Shard

Members = list[list[tuple[torch.Tensor, torch.Tensor]]]  # by group: a real parameter, a small one

# Each number of a parameter is updated by its own gradient and state alone.
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD",
    "Rprop", "SparseAdam",
)  # fmt: skip

# Of the two largest dims: some optimizers treat matrices of 128 and more otherwise. The larger one
# stays the larger one.
_LARGEST = (144, 130)
_OTHER = 2  # numbers of a further dim
_MANY = 20_000  # numbers of a tensor, of which fewer are taken
_SHAPES = 3  # of the parameters that are otherwise alike
_PARTS = 4  # of a dim
_UNEVEN = 30.0  # times the gradients of one part
# Of the gradients of each step. The first one may be all that a tensor of zeros shows.
_FIRST = (10.0, 1.0)
_EARLY = (3e-5, 1e-3, 0.03, 1.0, 30.0, 3e-5, 0.3, 1e-3, 3.0, 0.03, 1.0, 30.0)
_LATE = (1.0, 0.03, 1e-3, 1.0)
_AHEAD = 998 - len(_EARLY)  # by which the steps are counted further before the late ones
_RATE = 1e-2  # where a warm-up has begun with none
_SEED = 20_261
_SHIFT = 1021  # numbers by which gradients of tensors and steps lie apart at most


@dataclass(frozen=True)
class ParameterSplit:
    """How parameters are taken apart: flat, or along dims; a number of parts for each."""

    flat: int = 1
    dims: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, pieces: ShardLayout) -> ParameterSplit:
        """As the optimizers of lanes have a parameter, in no more parts of a dim than tell."""
        sizes = dict(zip(pieces.mesh.names, pieces.mesh.shape, strict=True))
        dims: dict[int, int] = {}
        for size, placement in zip(pieces.mesh.shape, pieces.placements, strict=False):
            if isinstance(placement, Shard) and size > 1:
                dims[placement.dim] = min(dims.get(placement.dim, 1) * size, _PARTS)
        return cls(min(sizes.get(pieces.flat, 1), _PARTS), tuple(sorted(dims.items())))

    def __call__(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a contiguous tensor, views where one has more than one number."""
        if self.flat > 1:
            return list(whole.reshape(-1).chunk(self.flat))
        found = [whole]
        for dim, parts in self.dims:
            found = [part for each in found for part in each.chunk(parts, dim)]
        return found


@dataclass(frozen=True)
class OptimizerDivision:
    """How a plan divides parameters between optimizers.

    between: whether parameters of the model belong to optimizers of different ranks. copies:
    whether this process has several ranks with the same parameters. cut: those of which a rank
    updates a part only, by name.
    """

    between: bool
    copies: bool
    cut: dict[str, ParameterSplit]


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known, or says by ``elementwise = True``, to update number by number."""
    kind = type(optimizer)
    if getattr(kind, "elementwise", False):
        return True
    return any(kind is getattr(torch.optim, name, None) for name in ELEMENTWISE)


def check_division(
    optimizer: torch.optim.Optimizer, division: OptimizerDivision, names: dict[int, str]
) -> bool:
    """Return whether parameters are updated independently; raise where the plan needs it and not.

    names: of the optimizer's parameters, by identity. FXP109 where a part of a parameter is not
    updated as the whole, FXP115 where parameters depend on each other, or the step needs a closure.
    """
    if isinstance(optimizer, MultiOptimizer):
        found = [check_division(each, division, names) for each in optimizer.each]  # all of them
        return all(found)
    kind = type(optimizer).__name__
    if is_elementwise(optimizer):
        return True
    mine = {names[id(p)] for g in optimizer.param_groups for p in g["params"] if id(p) in names}
    cut = {name: take for name, take in division.cut.items() if name in mine}
    if cut and (why := _differs(optimizer, names, cut)):
        raise _parts(kind, list(cut), why)
    if needs_closure(optimizer):
        fix = "an optimizer whose step() needs no closure, such as torch.optim.AdamW"
        why = "its step needs a closure that computes the loss again, and a trainer has none"
        raise _refused(kind, why, fix)
    if not (division.between or division.copies) or not mine:
        return True
    why = _differs(optimizer, names, None)
    if why and division.between:
        raise _refused(
            kind,
            "the update of a parameter depends on other parameters, which the plan gives to "
            f"other ranks: {why}",
            'one stage without sharding (constraints={"stages": 1}), or an optimizer that treats '
            "each parameter by itself",
        )
    return not why


def check_step_hooks(optimizer: torch.optim.Optimizer, division: OptimizerDivision) -> None:
    """FXP115 for hooks on the steps of an optimizer whose tensors several ranks have parts of."""
    each = optimizer.each if isinstance(optimizer, MultiOptimizer) else (optimizer,)
    divided = division.between or division.copies or division.cut
    for one in each if divided else ():
        if has_step_hooks(one):
            raise _refused(
                type(one).__name__,
                "it has step hooks, and each rank steps an optimizer of its own tensors",
                "clip_norm= or clip_value= of the trainer, a callback of fit, or one rank",
            )


def split_optimizer(
    optimizer: torch.optim.Optimizer, sets: Sequence[Sequence[torch.Tensor]]
) -> list[torch.optim.Optimizer]:
    """Return an optimizer of the same class and groups for each set of its parameters."""
    made = []
    for own in sets:
        wanted = set(map(id, own))
        members: Members = [
            [(p, p) for p in group["params"] if id(p) in wanted] for group in optimizer.param_groups
        ]
        each = optimizer_over(optimizer, members, torch.nn.Parameter(torch.empty(0)))
        each.state.update({p: optimizer.state[p] for p in own if p in optimizer.state})
        made.append(each)
    return made


def get_optimizer_division(
    state: ModelState, held: OptimizerShards, *, by_stage: bool
) -> OptimizerDivision:
    """Return how a program's parameters are divided.

    by_stage: whether each stage has an optimizer of its own, also where a rank has several.
    """
    owners: dict[int, set[str]] = {}
    every: set[str] = set()
    for name, entry in state.entries.items():
        if not entry.trainable:
            continue
        every.add(name)
        stages = [entry.spec.owner] if by_stage else entry.stages
        for stage in stages:
            for rank in (stage,) if by_stage else state.ranks[stage]:
                owners.setdefault(rank, set()).add(name)
    return OptimizerDivision(
        between=any(names != every for names in owners.values()),
        copies=not by_stage and sum(bool(owners.get(rank)) for rank in state.transport.local) > 1,
        cut={name: ParameterSplit.of(held.pieces(name)) for name in held.cut()},
    )


# -- the comparison ---------------------------------------------------------------------------


def _differs(
    optimizer: torch.optim.Optimizer, names: dict[int, str], cut: dict[str, ParameterSplit] | None
) -> str:
    """Step small parameters as a whole and in parts; why they differ, "" if they do not.

    cut: parts of parameters by name; None: each part has whole parameters.
    """
    real = _representatives(optimizer, names, cut)
    wide = {torch.float32: torch.float64}  # in which the smallest update is no rounding
    failed = ""
    with _random_state_kept():
        for dtypes, ahead in ((wide, _AHEAD), (wide, 0), ({}, _AHEAD), ({}, 0)):
            try:
                starts = _TrialParameters(real, names, cut, dtypes)
                first = _compare(optimizer, starts, _FIRST, (), ahead)
                return first or _compare(optimizer, starts, _EARLY, _LATE, ahead)
            except _UndividedOptimizerError as cause:
                failed = f"a step of it on small tensors fails: {cause}"
    return failed


class _UndividedOptimizerError(Exception):
    """The optimizer of all small tensors raised this."""


class _TrialParameters:
    """The small tensors: for each its real parameter, how it begins, and how it is taken apart."""

    def __init__(
        self,
        real: Sequence[Sequence[torch.Tensor]],
        names: Mapping[int, str],
        cut: Mapping[str, ParameterSplit] | None,
        dtypes: Mapping[torch.dtype, torch.dtype],
    ) -> None:
        """real: of each group. dtypes: those of small tensors in place of others."""
        make = torch.Generator().manual_seed(_SEED)
        self.groups: Members = []
        for group in real:
            self.groups.append([])
            for p in group:
                # Half of them begin with zeros, as biases do; without cuts some for both parts.
                copies = 2 if cut is not None or math.prod(_small_shape(p.shape)) > _MANY else 4
                self.groups[-1] += [
                    (p, _small(p, make, dtypes) * (n < copies // 2)) for n in range(copies)
                ]
        self.flat = [pair for group in self.groups for pair in group]
        self.cuts = [None if cut is None else cut[names[id(p)]] for p, _ in self.flat]
        most = max((p.numel() for _, p in self.flat), default=0)
        self._line = torch.randn(most + _SHIFT, generator=make, dtype=torch.float32) + 0.3
        self.parts = max(
            (2 if c is None else len(c(p)) for c, (_, p) in zip(self.cuts, self.flat, strict=True)),
            default=0,
        )

    def taken(self, values: Sequence[torch.Tensor], part: int) -> list[list[torch.Tensor]]:
        """What a part has of a tensor for each start; every second one where none is cut."""
        return [
            ([value] if at % 2 == part else []) if cut is None else cut(value)[part : part + 1]
            for at, (value, cut) in enumerate(zip(values, self.cuts, strict=True))
        ]

    def gradients(self, step: int, scale: float) -> list[torch.Tensor]:
        """Drawn for each start; those of one part, another one at each step, are the largest."""
        drawn = []
        for at, (_, p) in enumerate(self.flat):
            start = (step * 101 + at * 37) % _SHIFT
            made = self._line[start : start + p.numel()].view(p.shape) * (
                scale * (1 + 2 * (at % 2))
            )
            drawn.append(made.to(p.device, p.dtype))
        for mine in self.taken(drawn, step % max(self.parts, 1)):
            for each in mine:
                each.mul_(_UNEVEN)
        return drawn


class _TrialOptimizer:
    """A copy of the optimizer over what a part has of the small tensors; None: over all."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, starts: _TrialParameters, part: int | None
    ) -> None:
        self._starts, self._part = starts, part
        self._held = [
            [torch.nn.Parameter(t.clone(memory_format=torch.contiguous_format)) for t in mine]
            for mine in self._mine([p for _, p in starts.flat])
        ]
        members: Members = []
        state: dict[torch.Tensor, dict[Any, Any]] = {}
        held = iter(self._held)
        cuts = iter(starts.cuts)
        for group in starts.groups:
            members.append([])
            for real, small in group:
                cut, kept = next(cuts), optimizer.state.get(real)
                for q in next(held):
                    members[-1].append((real, q))
                    if kept:
                        take = None if part is None else cut
                        state[q] = {
                            k: _corner(v, real, small, take, part or 0) for k, v in kept.items()
                        }
        self._made = optimizer_over(optimizer, members, torch.nn.Parameter(torch.empty(0)))
        self._made.state.update(state)
        for options in self._made.param_groups:
            rate = options.get("lr")
            if isinstance(rate, (float, int, torch.Tensor)) and float(rate) == 0.0:
                options["lr"] = options.get("initial_lr") or _RATE

    def step(self, gradients: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Step with parts of gradients, and write what parameters have become into values."""
        for mine, given in zip(self._held, self._mine(gradients), strict=True):
            for q, g in zip(mine, given, strict=True):
                q.grad = g.clone(memory_format=torch.contiguous_format)
        self._made.step()
        for mine, given in zip(self._held, self._mine(values), strict=True):
            for q, t in zip(mine, given, strict=True):
                t.copy_(q.detach().nan_to_num())

    def counted(self) -> dict[tuple[int, Any], tuple[MutableMapping[Any, Any], Any, float]]:
        """Every number in the groups, the state and the attributes: where it is, and what."""
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

    def count_on(self, before: Mapping[tuple[int, Any], Any], by: int) -> None:
        """Add to each number that has grown by one since."""
        for at, (place, key, value) in self.counted().items():
            if at in before and value - before[at][2] == 1.0:
                place[key] += by  # in place where it is a tensor

    def _mine(self, values: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        if self._part is None:
            return [[value] for value in values]
        return self._starts.taken(values, self._part)


def _compare(
    optimizer: torch.optim.Optimizer,
    starts: _TrialParameters,
    early: Sequence[float],
    late: Sequence[float],
    ahead: int,
) -> str:
    """See :func:`_differs`.

    early, late: scales of gradients. ahead: by how much steps are counted further between them.
    """
    if not starts.flat:
        return ""
    with _whole_error():
        one = _TrialOptimizer(optimizer, starts, None)
    copies = [one, *(_TrialOptimizer(optimizer, starts, part) for part in range(starts.parts))]
    whole, parts = ([p.clone() for _, p in starts.flat] for _ in range(2))
    still = True
    for step, scale in enumerate((*early, *late)):
        gradients = starts.gradients(step, scale)
        count_on = bool(late and ahead) and step == len(early) - 1
        before = [copy.counted() for copy in copies] if count_on else []
        old = [(a.clone(), b.clone()) for a, b in zip(whole, parts, strict=True)]
        with _whole_error():
            one.step(gradients, whole)
        try:
            for part in copies[1:]:
                part.step(gradients, parts)
        except Exception as cause:
            return f"a step on parts fails: {type(cause).__name__}: {cause}"
        for a, b, (a_old, b_old) in zip(whole, parts, old, strict=True):
            if why := _apart(a, b, a_old, b_old):
                return why
            still = still and torch.equal(a, a_old)
        for copy, was in zip(copies, before, strict=False):
            copy.count_on(was, ahead)
    if still and late:
        return "none of its steps moves small tensors, so that nothing is known of it"
    return ""


def _apart(
    one: torch.Tensor, other: torch.Tensor, one_old: torch.Tensor, other_old: torch.Tensor
) -> str:
    """Whether a step has moved a tensor and its parts alike, however far apart they were."""
    if torch.equal(one, other) and torch.equal(one_old, other_old):
        return ""
    moved = float((one - one_old).abs().max())
    apart = float(((one - one_old) - (other - other_old)).abs().max())
    rounding = 16 * torch.finfo(one.dtype).eps * float(one.abs().max())
    if apart <= max(1e-3 * moved, rounding):
        return ""
    return f"small tensors that move by {moved:.1g} end {apart:.1g} apart"


@contextmanager
def _whole_error() -> Iterator[None]:
    try:
        yield
    except Exception as cause:  # whatever a class raises
        raise _UndividedOptimizerError(f"{type(cause).__name__}: {cause}") from cause


def _representatives(
    optimizer: torch.optim.Optimizer, names: dict[int, str], cut: dict[str, ParameterSplit] | None
) -> list[list[torch.Tensor]]:
    """Of each group parameters of every dtype, number of dims and cut; with cut only such."""
    found: list[list[torch.Tensor]] = []
    for group in optimizer.param_groups:
        kinds: dict[Any, dict[tuple[int, ...], torch.Tensor]] = {}
        for p in group["params"]:
            name = names.get(id(p))
            if name is not None and p.numel() and (cut is None or name in cut):
                kind = (p.dim(), p.dtype, None if cut is None else cut[name])
                kinds.setdefault(kind, {}).setdefault(_small_shape(p.shape), p)
        most = 1 if cut is None else _SHAPES
        found.append([p for shapes in kinds.values() for p in _telling(shapes, most)])
    return found


def _telling(shapes: Mapping[tuple[int, ...], torch.Tensor], most: int) -> list[torch.Tensor]:
    """Those of the largest, the highest and the widest shape, if they are too many."""
    if len(shapes) <= most:
        return list(shapes.values())
    high = sorted(shapes, key=lambda s: s[0] / s[-1] if len(s) > 1 else s[0])
    kept = dict.fromkeys((max(shapes, key=sorted), high[-1], high[0]))
    return [shapes[shape] for shape in list(kept)[:most]]


def _small_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """As many dims, cut to a size that is stepped in no time."""
    largest = sorted(range(len(shape)), key=lambda d: -shape[d])[:2]
    most = dict(zip(largest, _LARGEST, strict=False))
    if len(largest) > 1 and shape[largest[0]] == shape[largest[1]]:
        most = dict.fromkeys(largest, min(_LARGEST))
    return tuple(min(size, most.get(dim, _OTHER)) for dim, size in enumerate(shape))


def _small(
    like: torch.Tensor, make: torch.Generator, dtypes: Mapping[torch.dtype, torch.dtype]
) -> torch.Tensor:
    """A tensor of as many dims on the same device."""
    made = torch.randn(_small_shape(like.shape), generator=make, dtype=torch.float32)
    return made.to(like.device, dtypes.get(like.dtype, like.dtype))


def _corner(
    value: Any, real: torch.Tensor, small: torch.Tensor, take: ParameterSplit | None, number: int
) -> Any:
    """One value of a real parameter's state, for a small one."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != real.shape or not value.dim():
        return value.detach().clone()
    for dim, size in enumerate(small.shape):
        value = value.narrow(dim, 0, size)
    return (value if take is None else take(value)[number]).detach().clone()


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Gradients are recorded nowhere, and generators are as they were afterwards."""
    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_rng_state(state)


def _parts(kind: str, cut: list[str], why: str) -> FxpartError:
    shown = ", ".join(cut[:3]) + (f" and {len(cut) - 3} more" if len(cut) > 3 else "")
    return error(
        "FXP109",
        where=f"optimizer {kind}",
        why=f"each rank updates only a part of {shown}, and a part is not updated as the whole "
        f"is: {why}",
        fix=f"use one of {', '.join(ELEMENTWISE)}; or shard neither these parameters nor the "
        "optimizer's state",
    )


def _refused(kind: str, why: str, fix: str) -> FxpartError:
    return error("FXP115", where=f"optimizer {kind}", why=why, fix=fix)
