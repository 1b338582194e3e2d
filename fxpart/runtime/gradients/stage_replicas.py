"""Gradient reduction over the replicas of a stage (:mod:`fxpart.program.replicas`).

The gradients of all replicas are summed at the end of a step, in the order of the replicas, so
that all of them take the same optimizer step. Where a replica is a mesh of ranks, it first reduces
its gradients over its own mesh; then equal mesh ranks of the replicas add their shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxpart.collectives.buckets import bucketed
from fxpart.runtime.gradients import reduce_scatter
from fxpart.runtime.optimizer.optimizer_shards import OptimizerShards
from fxpart.runtime.state.model_state import ModelState, StateEntry
from fxpart.runtime.transport.interface import STATE

Groups = dict[tuple[int, tuple[int, ...]], list[StateEntry]]  # by owner and stages
TensorSelector = Callable[[torch.Tensor], torch.Tensor]

# Buckets in flight per stage while the next is packed; each holds a copy of its gradients.
_UNDER_WAY = 1


def reduce_replica_gradients(state: ModelState, shards: OptimizerShards) -> None:
    """Sum the gradients of replicas (and of parameters tied to replicated stages) at the owners.

    Gradients have been reduced over each stage's mesh. Each stage sends its common parameters'
    gradients to the owner in buckets of 25 MiB (or of one parameter). The owner adds them in the
    order of the stages. Does nothing in a program without replicas.
    :func:`fxpart.runtime.gradients.communication.send_tied_gradients` sends the totals back.
    """
    _sum_all(state, _group_by_owner(state, shards), shards.of)


@contextmanager
def reduce_gradients_temporarily(state: ModelState, shards: OptimizerShards) -> Iterator[None]:
    """Reduce as :func:`reduce_replica_gradients` does, and undo it at the end.

    Used while gradient accumulation continues, before gradients are reduced over meshes.
    """
    groups, tensor = _group_by_owner(state, shards), shards.accumulating
    entries = [entry for group in groups.values() for entry in group]
    mine = [tensor(copy) for entry in entries for copy in entry.copies.values()]
    before = [None if p.grad is None else p.grad.clone() for p in mine]
    _sum_all(state, groups, tensor)
    try:
        yield
    finally:
        for parameter, gradient in zip(mine, before, strict=True):
            parameter.grad = gradient


def _group_by_owner(state: ModelState, shards: OptimizerShards) -> Groups:
    """Return parameters by owner and stages, in the model's order, equal on every rank.

    Empty in a program without replicas.
    """
    found: Groups = {}
    for name, entry in state.entries.items() if state.mesh_ranks[0].spec.replicas else ():
        if entry.trainable and len(entry.stages) > 1 and name not in shards.rows:
            found.setdefault((entry.spec.owner, entry.stages), []).append(entry)
    return found


def _sum_all(state: ModelState, groups: Groups, tensor: TensorSelector) -> None:
    for (owner, _), entries in groups.items():
        for mesh_rank in state.mesh_ranks:
            _sum_group(state, tensor, owner, mesh_rank.index, entries)


def _sum_group(
    state: ModelState, tensor: TensorSelector, owner: int, mesh_rank: int, entries: list[StateEntry]
) -> None:
    """Sum in buckets, so that few gradients of a rank exist twice."""
    transport, home = state.transport, state.rank(owner, mesh_rank)

    def of_stage(stage: int) -> list[torch.Tensor]:
        """Return the stage's parameters, if this mesh rank of the stage is in this process."""
        found = [entry.copies.get((stage, mesh_rank)) for entry in entries]
        return [tensor(parameter) for parameter in found if parameter is not None]

    own = of_stage(owner)
    others, sending, seen = [], [], {id(parameter) for parameter in own}
    for stage in sorted(entries[0].stages):
        if stage == owner or (own and _is_same_tensor(entries[0], owner, stage, mesh_rank)):
            continue
        rank = state.rank(stage, mesh_rank)
        others.append(rank)
        mine = of_stage(stage) if rank in transport.local else []
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


def _is_same_tensor(entry: StateEntry, owner: int, stage: int, mesh_rank: int) -> bool:
    """Return whether two stages of one rank use the same tensor."""
    mine, theirs = entry.copies.get((owner, mesh_rank)), entry.copies.get((stage, mesh_rank))
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
