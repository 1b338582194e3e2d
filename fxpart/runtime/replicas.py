"""Stages of several copies: microbatches in turn, one gradient for all.

Where stages differ in how many ranks they have, a stage is copied onto each of its ranks, and
microbatch m of a stage of n copies is done by copy m mod n (PipeDream's round robin, Narayanan et
al., SOSP 2019). A copy is a stage of the program like any other; what makes it a copy is that it
takes its own microbatches only, and that its gradients are summed with those of the others at the
end of a step, in the order of the copies, so that all take the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec
import torch

from fxpart.errors import error
from fxpart.program import ProgramSpec, StageSpec
from fxpart.runtime.held import Held
from fxpart.runtime.state import Entry, ModelState
from fxpart.runtime.transport import STATE


def replicated(spec: ProgramSpec, counts: Sequence[int]) -> ProgramSpec:
    """The program with so many copies of each stage, one after another.

    counts: by stage, 1 or more. The stage modules of copies are those of the stage. Raises FXP109
    for counts that do not fit, and for stages of several ranks, which share their work otherwise.
    """
    if len(counts) != len(spec.stages) or min(counts, default=0) < 1:
        why = f"{len(spec.stages)} stages need a number of copies each, 1 or more"
        raise error("FXP109", where=f"replicas={tuple(counts)}", why=why, fix="")
    if max(counts) == 1:
        return spec
    if spec.sharding is not None or spec.replicas:
        raise error(
            "FXP109",
            where=f"replicas={tuple(counts)}",
            why="the ranks of a stage share its work already",
            fix='copies of stages need mesh="none"',
        )
    firsts = [0, *accumulate(counts)][:-1]
    groups = [tuple(range(first, first + n)) for first, n in zip(firsts, counts, strict=True)]

    def copied(stage: StageSpec, index: int) -> StageSpec:
        return msgspec.structs.replace(
            stage,
            index=index,
            sources=tuple(s if s < 0 else firsts[s] for s in stage.sources),
            targets=tuple(tuple(firsts[t] for t in targets) for targets in stage.targets),
            state=tuple(msgspec.structs.replace(s, owner=firsts[s.owner]) for s in stage.state),
        )

    return msgspec.structs.replace(
        spec,
        stages=tuple(
            copied(stage, index)
            for stage, group in zip(spec.stages, groups, strict=True)
            for index in group
        ),
        ties={
            name: tuple(copy for stage in stages for copy in groups[stage])
            for name, stages in spec.ties.items()
        },
        replicas=tuple(group for group in groups if len(group) > 1),
    )


def original(spec: ProgramSpec, stage: int) -> int:
    """The stage that a stage is a copy of, counted without copies."""
    return stage - sum(sum(1 for copy in group[1:] if copy <= stage) for group in spec.replicas)


def sum_copies(state: ModelState, held: Held) -> None:
    """Sum the gradients of copies (and of ties, whose holders are copied) at the owners.

    One message a step from each holder to each owner; what holders have in common is sent as one
    line of numbers. Holders add up in the order of the stages. Does nothing in a program without
    copies; what the owner has is given back by :func:`fxpart.runtime.gradients.share_ties`.
    """
    spec = state.lanes[0].spec
    if not spec.replicas:
        return
    for (owner, holders), entries in _groups(state).items():
        _sum_group(state, held, owner, holders, entries)


def _groups(state: ModelState) -> dict[tuple[int, tuple[int, ...]], list[Entry]]:
    """Parameters by owner and holders, each in the model's order, the same on every rank."""
    found: dict[tuple[int, tuple[int, ...]], list[Entry]] = {}
    for entry in state.entries.values():
        if entry.trainable and len(entry.stages) > 1:
            found.setdefault((entry.spec.owner, entry.stages), []).append(entry)
    return found


def _sum_group(
    state: ModelState, held: Held, owner: int, holders: tuple[int, ...], entries: list[Entry]
) -> None:
    transport, home = state.transport, state.rank(owner, 0)
    own = [held.of(e.copies[owner, 0]) for e in entries if (owner, 0) in e.copies]
    sends, seen = [], {id(parameter) for parameter in own}
    for holder in sorted(holders):
        rank = state.rank(holder, 0)
        if holder == owner or rank not in transport.local:
            continue
        mine = [held.of(entry.copies[holder, 0]) for entry in entries]
        if id(mine[0]) in seen:  # the same tensors, on the owner's rank
            continue
        lines = torch.cat([_gradient(parameter).reshape(-1) for parameter in mine])
        sends.append(transport.send(rank, home, STATE, lines))
    if own:
        for holder in sorted(holders):
            rank = state.rank(holder, 0)
            if holder == owner or _shared(state, entries[0], owner, holder):
                continue
            like = torch.cat([p.detach().reshape(-1)[:0] for p in own])
            size = sum(p.numel() for p in own)
            handle = transport.post(rank, home, STATE, (size,), like.dtype, like.device)
            _add(own, transport.wait(handle))
    for handle in sends:
        transport.wait(handle)


def _shared(state: ModelState, entry: Entry, owner: int, holder: int) -> bool:
    """Whether two stages of one rank hold the same tensor."""
    mine, theirs = entry.copies.get((owner, 0)), entry.copies.get((holder, 0))
    return mine is not None and mine is theirs


def _add(parameters: list[torch.Tensor], line: torch.Tensor) -> None:
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, part in zip(parameters, line.split(sizes), strict=True):
        part = part.view(parameter.shape)
        parameter.grad = part.clone() if parameter.grad is None else parameter.grad.add_(part)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
