"""Check whether an optimizer updates a divided model as it updates the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxpart.compat import has_step_hooks, optimizer_over
from fxpart.compat.multi_optimizer import MultiOptimizer
from fxpart.compat.optimizer_parts import ELEMENTWISE, is_elementwise
from fxpart.compat.optimizer_trial import MAX_PARTS, Members, ParameterSplit, find_difference
from fxpart.errors import FxpartError, error
from fxpart.runtime.optimizer.optimizer_shards import OptimizerShards
from fxpart.runtime.optimizer.user_optimizer import needs_closure
from fxpart.runtime.state.model_state import ModelState
from fxpart.runtime.state.shard_layout import ShardLayout
from fxpart.sharding import Shard
from fxpart.sharding.mesh import parse_axes


@dataclass(frozen=True)
class OptimizerDivision:
    """How a plan divides parameters between optimizers.

    between: whether optimizers of different ranks own different parameters. copies: whether this
    process has several ranks with the same parameters. cut: parameters of which a rank updates only
    a part, by name.
    """

    between: bool
    copies: bool
    cut: dict[str, ParameterSplit]


def check_division(
    optimizer: torch.optim.Optimizer, division: OptimizerDivision, names: dict[int, str]
) -> bool:
    """Return whether parameters are updated independently; raise if the plan requires it.

    names: of the optimizer's parameters, by identity. FXP109 if a part of a parameter is updated
    differently from the whole. FXP115 if parameters depend on each other, or the step needs a
    closure.
    """
    if isinstance(optimizer, MultiOptimizer):
        # Check all of them.
        found = [check_division(each, division, names) for each in optimizer.each]
        return all(found)
    kind = type(optimizer).__name__
    if is_elementwise(optimizer):
        return True
    mine = {names[id(p)] for g in optimizer.param_groups for p in g["params"] if id(p) in names}
    cut = {name: take for name, take in division.cut.items() if name in mine}
    if cut and (why := find_difference(optimizer, names, cut)):
        raise _make_parts_error(kind, list(cut), why)
    if needs_closure(optimizer):
        fix = "use an optimizer whose step() needs no closure, such as torch.optim.AdamW"
        why = "its step needs a closure that recomputes the loss, which a trainer does not provide"
        raise _make_error(kind, why, fix)
    if not (division.between or division.copies) or not mine:
        return True
    why = find_difference(optimizer, names, None)
    if why and division.between:
        raise _make_error(
            kind,
            "the update of a parameter depends on other parameters, which are on other ranks of "
            f"the plan: {why}",
            'use one stage without sharding (constraints={"stages": 1}), or an optimizer that '
            "updates each parameter independently",
        )
    return not why


def check_step_hooks(optimizer: torch.optim.Optimizer, division: OptimizerDivision) -> None:
    """Raise FXP115 for step hooks of an optimizer whose tensors are divided between ranks."""
    each = optimizer.each if isinstance(optimizer, MultiOptimizer) else (optimizer,)
    divided = division.between or division.copies or division.cut
    for one in each if divided else ():
        if has_step_hooks(one):
            raise _make_error(
                type(one).__name__,
                "it has step hooks, but each rank steps an optimizer of its own tensors",
                "use clip_norm= or clip_value= of the trainer, a callback of fit, or one rank",
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
    state: ModelState, shards: OptimizerShards, *, by_stage: bool
) -> OptimizerDivision:
    """Return how a program's parameters are divided.

    by_stage: whether each stage has its own optimizer, even if a rank runs several.
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
        cut={name: _split_as(shards.pieces(name)) for name in shards.cut()},
    )


def _split_as(pieces: ShardLayout) -> ParameterSplit:
    """Return the split of a parameter over mesh ranks, with a limited number of parts."""
    dims: dict[int, int] = {}
    for size, placement in zip(pieces.mesh.shape, pieces.placements, strict=False):
        if isinstance(placement, Shard) and size > 1:
            dims[placement.dim] = min(dims.get(placement.dim, 1) * size, MAX_PARTS)
    ranges = pieces.mesh.count(*parse_axes(pieces.flat))
    return ParameterSplit(min(ranges, MAX_PARTS), tuple(sorted(dims.items())))


def _make_parts_error(kind: str, cut: list[str], why: str) -> FxpartError:
    shown = ", ".join(cut[:3]) + (f" and {len(cut) - 3} more" if len(cut) > 3 else "")
    return error(
        "FXP109",
        where=f"optimizer {kind}",
        why=f"each rank updates only a part of {shown}, and a part is updated differently from the "
        f"whole: {why}",
        fix=f"use one of {', '.join(ELEMENTWISE)}; or shard neither these parameters nor the "
        "optimizer state",
    )


def _make_error(kind: str, why: str, fix: str) -> FxpartError:
    return error("FXP115", where=f"optimizer {kind}", why=why, fix=fix)
