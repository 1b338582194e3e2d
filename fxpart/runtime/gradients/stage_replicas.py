"""Gradient reduction over the replicas of a stage (:mod:`fxpart.program.replicas`).

The gradients of all replicas are summed at the end of a step, in the order of the replicas, so
that all of them take the same optimizer step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxpart.collectives.buckets import bucketed
from fxpart.runtime.gradients import reduce_scatter
from fxpart.runtime.optimizer.optimizer_shards import OptimizerShards
from fxpart.runtime.state.model_state import ModelState, StateEntry
from fxpart.runtime.transport.interface import STATE

# Buckets in flight per stage while the next is packed; each holds a copy of its gradients.
_UNDER_WAY = 1


def reduce_replica_gradients(state: ModelState, shards: OptimizerShards) -> None:
    """Sum the gradients of replicas (and of parameters tied to replicated stages) at the owners.

    Each stage sends its common parameters' gradients to the owner in buckets of 25 MiB (or of one
    parameter). The owner adds them in the order of the stages. Does nothing in a program without
    replicas. :func:`fxpart.runtime.gradients.communication.send_tied_gradients` sends the totals
    back.
    """
    spec = state.mesh_ranks[0].spec
    if not spec.replicas:
        return
    for (owner, stages), entries in _group_by_owner(state, shards).items():
        _sum_group(state, shards, owner, stages, entries)


@contextmanager
def reduce_gradients_temporarily(state: ModelState, shards: OptimizerShards) -> Iterator[None]:
    """Reduce as :func:`reduce_replica_gradients` does, and undo it at the end.

    Used while gradient accumulation continues.
    """
    spec = state.mesh_ranks[0].spec
    entries = [
        e for group in _group_by_owner(state, shards).values() for e in group if spec.replicas
    ]
    mine = [shards.of(copy) for entry in entries for copy in entry.copies.values()]
    before = [None if p.grad is None else p.grad.clone() for p in mine]
    reduce_replica_gradients(state, shards)
    try:
        yield
    finally:
        for parameter, gradient in zip(mine, before, strict=True):
            parameter.grad = gradient


def _group_by_owner(
    state: ModelState, shards: OptimizerShards
) -> dict[tuple[int, tuple[int, ...]], list[StateEntry]]:
    """Return parameters by owner and stages, in the model's order, equal on every rank."""
    found: dict[tuple[int, tuple[int, ...]], list[StateEntry]] = {}
    for name, entry in state.entries.items():
        if entry.trainable and len(entry.stages) > 1 and name not in shards.rows:
            found.setdefault((entry.spec.owner, entry.stages), []).append(entry)
    return found


def _sum_group(
    state: ModelState,
    shards: OptimizerShards,
    owner: int,
    stages: tuple[int, ...],
    entries: list[StateEntry],
) -> None:
    """Sum in buckets, so that few gradients of a rank exist twice."""
    transport, home = state.transport, state.rank(owner, 0)
    own = _get_stage_parameters(shards, entries, owner)
    others, sending, seen = [], [], {id(parameter) for parameter in own}
    for stage in sorted(stages):
        if stage == owner or (own and _is_same_tensor(state, entries[0], owner, stage)):
            continue
        rank = state.rank(stage, 0)
        others.append(rank)
        mine = _get_stage_parameters(shards, entries, stage) if rank in transport.local else []
        if mine and id(mine[0]) not in seen:  # Otherwise they are the owner's tensors.
            sending.append((rank, mine))
    known = own or (sending[0][1] if sending else [])
    sends: deque[Any] = deque()
    for bucket in bucketed(known, reduce_scatter.BUCKET):
        for rank, mine in sending:
            gradients = [_gradient(mine[index]).reshape(-1) for index in bucket]
            line = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
            sends.append(transport.send(rank, home, STATE, line.contiguous()))
        for rank in others if own else ():
            parts = [own[index] for index in bucket]
            size = sum(part.numel() for part in parts)
            handle = transport.post(rank, home, STATE, (size,), parts[0].dtype, parts[0].device)
            _add(parts, transport.wait(handle))
        while len(sends) > _UNDER_WAY * len(sending):
            transport.wait(sends.popleft())
    for handle in sends:
        transport.wait(handle)


def _get_stage_parameters(
    shards: OptimizerShards, entries: list[StateEntry], stage: int
) -> list[torch.Tensor]:
    """Return the stage's parameters, if the stage is in this process."""
    return [shards.of(e.copies[stage, 0]) for e in entries if (stage, 0) in e.copies]


def _is_same_tensor(state: ModelState, entry: StateEntry, owner: int, stage: int) -> bool:
    """Return whether two stages of one rank use the same tensor."""
    mine, theirs = entry.copies.get((owner, 0)), entry.copies.get((stage, 0))
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
