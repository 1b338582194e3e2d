"""Whether an optimizer gives the same when a model is divided between several of it.

Small tensors in the groups of the real optimizer are stepped twice: all by one optimizer, and
divided as the plan divides the parameters. What differs then depends on more than each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fxpart.compat import optimizer_over
from fxpart.compat.several import Several
from fxpart.errors import FxpartError, error
from fxpart.runtime.held import Held
from fxpart.runtime.pieces import Pieces
from fxpart.runtime.state import ModelState
from fxpart.runtime.user_optimizer import needs_closure
from fxpart.sharding import Shard

Members = list[list[tuple[torch.Tensor, torch.Tensor]]]  # by group: a real parameter, a small one
Cut = Callable[[torch.Tensor], list[torch.Tensor]]  # the parts of a tensor, views

# Each number of a parameter is updated by its own gradient and state alone.
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD",
    "Rprop", "SparseAdam",
)  # fmt: skip

_LARGEST = 130  # of the two largest dims: some optimizers treat matrices of 128 and more otherwise
_OTHER = 3  # numbers of a further dim
_SCALES = (1.0, 30.0, 0.03, 1.0, 1.0, 1.0, 0.3, 3.0)  # of the gradients of each step
_RATE = 1e-2  # where a warm-up has begun with none
_SEED = 20_261


@dataclass(frozen=True)
class Division:
    """How a plan divides parameters between optimizers.

    between: whether parameters of the model belong to optimizers of different ranks. copies:
    whether this process has several ranks with the same parameters. cut: those of which a rank
    updates a part only, by name, with what takes a tensor of as many dims apart the same way.
    """

    between: bool
    copies: bool
    cut: dict[str, Cut]


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known, or says by ``elementwise = True``, to update number by number."""
    kind = type(optimizer)
    if getattr(kind, "elementwise", False):
        return True
    return any(kind is getattr(torch.optim, name, None) for name in ELEMENTWISE)


def check_division(
    optimizer: torch.optim.Optimizer, division: Division, names: dict[int, str]
) -> bool:
    """Return whether parameters are updated independently; raise where the plan needs it and not.

    names: of the optimizer's parameters, by identity. FXP109 where a part of a parameter is not
    updated as the whole, FXP115 where parameters depend on each other, or the step needs a closure.
    """
    if isinstance(optimizer, Several):
        found = [check_division(each, division, names) for each in optimizer.each]  # all of them
        return all(found)
    if is_elementwise(optimizer):
        return True
    kind = type(optimizer).__name__
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


def split(
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


def division_of(state: ModelState, held: Held, *, by_stage: bool) -> Division:
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
    return Division(
        between=any(names != every for names in owners.values()),
        copies=not by_stage and sum(bool(owners.get(rank)) for rank in state.transport.local) > 1,
        cut={name: _cut_as(held.pieces(name)) for name in held.cut()},
    )


def _cut_as(pieces: Pieces) -> Cut:
    """What takes a small tensor apart as a parameter is: flat, or along its sharded dims."""
    dims = sorted({p.dim for p in pieces.placements if isinstance(p, Shard)})

    def take(whole: torch.Tensor) -> list[torch.Tensor]:
        if pieces.flat:
            line = whole.view(-1)
            return [line[: len(line) // 2], line[len(line) // 2 :]]
        found = [whole]
        for dim in dims:
            found = [part for each in found for part in each.chunk(2, dim)]
        return found

    return take


# -- the comparison ---------------------------------------------------------------------------


def _differs(
    optimizer: torch.optim.Optimizer, names: dict[int, str], cut: dict[str, Cut] | None
) -> str:
    """Step small parameters as a whole and in parts; why they differ, "" if they do not.

    cut: parts of parameters by name; None: each part has whole parameters.
    """
    real = _representatives(optimizer, names, cut)
    with _random_state_kept():
        try:  # in float64, in which the smallest update is no rounding
            return _compare(optimizer, real, names, cut, {torch.float32: torch.float64})
        except _WholeError:
            pass
        try:
            return _compare(optimizer, real, names, cut, {})
        except _WholeError as cause:
            return f"a step of it on small tensors fails: {cause}"


class _WholeError(Exception):
    """The optimizer of all small tensors raised this."""


def _compare(
    optimizer: torch.optim.Optimizer,
    real: list[list[torch.Tensor]],
    names: dict[int, str],
    cut: dict[str, Cut] | None,
    dtypes: Mapping[torch.dtype, torch.dtype],
) -> str:
    """See :func:`_differs`; dtypes: those of small tensors in place of others."""
    make = torch.Generator().manual_seed(_SEED)
    starts = [
        # Two for each part, of which one begins with zeros, as biases do.
        [(p, _small(p, make, dtypes) * (n < 2)) for p in group for n in range(4)]
        for group in real
    ]
    flat = [pair for group in starts for pair in group]
    gradients = [
        [_drawn(p, scale, make) * (1 + 2 * (at % 2)) for at, (_, p) in enumerate(flat)]
        for scale in _SCALES
    ]
    whole, parts = [p.clone() for _, p in flat], [p.clone() for _, p in flat]
    try:
        _run(optimizer, starts, [[[q] for q in whole]], gradients)
    except Exception as cause:  # whatever a class raises
        raise _WholeError(f"{type(cause).__name__}: {cause}") from cause
    cuts: list[Cut | None] = [None if cut is None else cut[names[id(p)]] for p, _ in flat]
    pieces = [[q] if take is None else take(q) for take, q in zip(cuts, parts, strict=True)]
    if cut is None:  # every second parameter
        sets = [[mine if at % 2 == n else [] for at, mine in enumerate(pieces)] for n in (0, 1)]
    else:
        most = max(map(len, pieces), default=0)
        sets = [[mine[n : n + 1] for mine in pieces] for n in range(most)]
    try:
        _run(optimizer, starts, sets, gradients, cuts)
    except Exception as cause:
        return f"a step on parts fails: {type(cause).__name__}: {cause}"
    for (_, start), one, other in zip(flat, whole, parts, strict=True):
        one, other = one.nan_to_num(), other.nan_to_num()
        moved = float((one - start).abs().max())
        apart = float((one - other).abs().max())
        rounding = 16 * torch.finfo(one.dtype).eps * float(one.abs().max())
        if apart > max(1e-3 * moved, rounding):
            return f"small tensors that move by {moved:.1g} end {apart:.1g} apart"
    return ""


def _run(
    optimizer: torch.optim.Optimizer,
    starts: Members,
    sets: Sequence[Sequence[Sequence[torch.Tensor]]],
    gradients: Sequence[Sequence[torch.Tensor]],
    cuts: Sequence[Cut | None] | None = None,
) -> None:
    """Step one copy of the optimizer for each set of tensors; a set has tensors for each start."""
    copies = []
    for number, tensors in enumerate(sets):
        held = [[torch.nn.Parameter(t.detach()) for t in mine] for mine in tensors]
        copies.append((number, held, _over(optimizer, starts, held, number, cuts)))
    for drawn in gradients:
        for number, held, made in copies:
            for at, mine in enumerate(held):
                take = None if cuts is None else cuts[at]
                for q in mine:
                    whole = drawn[at]
                    q.grad = (whole if take is None else take(whole)[number]).clone()
            made.step()
    for (_, held, _), tensors in zip(copies, sets, strict=True):
        for mine, given in zip(held, tensors, strict=True):
            for q, t in zip(mine, given, strict=True):
                t.copy_(q.detach())


def _over(
    optimizer: torch.optim.Optimizer,
    starts: Members,
    held: Sequence[Sequence[torch.Tensor]],
    number: int,
    cuts: Sequence[Cut | None] | None,
) -> torch.optim.Optimizer:
    """A copy of the optimizer over small tensors, with what state it has made at once."""
    members: Members = []
    state: dict[torch.Tensor, dict[Any, Any]] = {}
    at = 0
    for group in starts:
        members.append([])
        for real, small in group:
            for q in held[at]:
                members[-1].append((real, q))
                take = None if cuts is None else cuts[at]
                kept = optimizer.state.get(real)
                if kept:
                    state[q] = {k: _corner(v, real, small, take, number) for k, v in kept.items()}
            at += 1
    made = optimizer_over(optimizer, members, torch.nn.Parameter(torch.empty(0)))
    made.state.update(state)
    for options in made.param_groups:
        rate = options.get("lr")
        if isinstance(rate, (float, int, torch.Tensor)) and float(rate) == 0.0:
            options["lr"] = options.get("initial_lr") or _RATE
    return made


def _representatives(
    optimizer: torch.optim.Optimizer, names: dict[int, str], cut: dict[str, Cut] | None
) -> list[list[torch.Tensor]]:
    """One parameter of each group, number of dims and dtype; with ``cut`` of those that are."""
    found: list[list[torch.Tensor]] = []
    for group in optimizer.param_groups:
        kinds: dict[Any, torch.Tensor] = {}
        for p in group["params"]:
            name = names.get(id(p))
            if name is not None and p.numel() and (cut is None or name in cut):
                kinds.setdefault((p.dim(), p.dtype), p)
        found.append(list(kinds.values()))
    return found


def _small(
    like: torch.Tensor, make: torch.Generator, dtypes: Mapping[torch.dtype, torch.dtype]
) -> torch.Tensor:
    """A tensor of as many dims, cut to a size that is stepped in no time; the same device."""
    largest = sorted(range(like.dim()), key=lambda d: -like.shape[d])[:2]
    shape = [min(s, _LARGEST if d in largest else _OTHER) for d, s in enumerate(like.shape)]
    made = torch.randn(shape, generator=make, dtype=torch.float32)
    return made.to(like.device, dtypes.get(like.dtype, like.dtype))


def _drawn(like: torch.Tensor, scale: float, make: torch.Generator) -> torch.Tensor:
    made = torch.randn(like.shape, generator=make, dtype=torch.float32) + 0.3
    return (made * scale).to(like.device, like.dtype)


def _corner(
    value: Any, real: torch.Tensor, small: torch.Tensor, take: Cut | None, number: int
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
