"""Gradient reduction over the replicas of a stage (:mod:`fxpart.program.replicas`).

The gradients of all replicas are summed at the end of a step, in the order of the replicas, so
that all of them take the same optimizer step. Where a replica is a mesh of ranks, it first reduces
its gradients over its own mesh; then equal mesh ranks of the replicas add their shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
    """Sum the gradients of replicas (and of parameters tied to replicated stages).

    Gradients have been reduced over each stage's mesh. Each stage sends its common parameters'
    gradients to the owner in buckets of 25 MiB (or of one parameter). The owner adds them in the
    order of the stages, and sends the totals back. Does nothing in a program without replicas.
    """
    for group in _list_groups(state, shards, shards.of):
        group.add_at_owner()
        group.send_back()


@contextmanager
def reduce_gradients_temporarily(state: ModelState, shards: OptimizerShards) -> Iterator[None]:
    """Reduce as :func:`reduce_replica_gradients` does, and undo it at the end.

    Used while gradient accumulation continues, before gradients are reduced over meshes.
    """
    groups = list(_list_groups(state, shards, shards.accumulating))
    mine = [parameter for group in groups for parameter in group.list_local()]
    before = [None if p.grad is None else p.grad.clone() for p in mine]
    for group in groups:
        group.add_at_owner()
    try:
        yield
    finally:
        for parameter, gradient in zip(mine, before, strict=True):
            parameter.grad = gradient


def _list_groups(
    state: ModelState, shards: OptimizerShards, tensor: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[_ReplicaGroup]:
    """Yield parameters by owner and stages, in the model's order, equal on every rank.

    Nothing in a program without replicas. tensor: returns the tensor with a parameter's gradient.
    """
    found: dict[tuple[int, tuple[int, ...]], list[StateEntry]] = {}
    for name, entry in state.entries.items() if state.mesh_ranks[0].spec.replicas else ():
        if entry.trainable and len(entry.stages) > 1 and name not in shards.rows:
            found.setdefault((entry.spec.owner, entry.stages), []).append(entry)
    for entries in found.values():
        for mesh_rank in state.mesh_ranks:
            yield _ReplicaGroup(state, entries, mesh_rank.index, tensor)


class _ReplicaGroup:
    """Parameters of the same stages on one mesh rank.

    Behind the gradients of the last bucket, a number for each parameter is 0 where the stage has no
    gradient. Where none has one, it stays absent, and an optimizer skips the parameter.
    """

    def __init__(
        self,
        state: ModelState,
        entries: Sequence[StateEntry],
        mesh_rank: int,
        tensor: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """See :func:`_list_groups`."""
        self._transport, owner = state.transport, entries[0].spec.owner
        self._home = state.rank(owner, mesh_rank)
        self._own = _list_tensors(entries, owner, mesh_rank, tensor)
        self._others: list[int] = []  # ranks with which the owner communicates, if it is here
        self._local: dict[int, list[torch.Tensor]] = {}  # of other ranks in this process
        for stage in sorted({*entries[0].stages} - {owner}):
            mine = _list_tensors(entries, stage, mesh_rank, tensor)
            if self._own and mine and mine[0] is self._own[0]:
                continue  # a stage of the owner's rank uses the same tensors
            rank = state.rank(stage, mesh_rank)
            self._others += [rank] if self._own else []
            self._local |= {rank: mine} if mine else {}
        known = self._own or next(iter(self._local.values()), [])
        self._buckets = bucketed(known, reduce_scatter.BUCKET)

    def list_local(self) -> list[torch.Tensor]:
        """Return the tensors of this process."""
        return [*self._own, *(each for mine in self._local.values() for each in mine)]

    def add_at_owner(self) -> None:
        """Add the gradients of all stages in their order."""
        there = [float(parameter.grad is not None) for parameter in self._own]
        sends: deque[Any] = deque()
        for number in range(len(self._buckets)):
            for rank, mine in self._local.items():
                line = self._pack(mine, number)
                sends.append(self._transport.send(rank, self._home, STATE, line))
            for rank in self._others:
                parts, flags = self._receive(rank, self._home, self._own, number)
                for parameter, part in parts:
                    total = part.clone() if parameter.grad is None else parameter.grad.add_(part)
                    parameter.grad = total
                there = list(map(max, there, flags)) if flags else there
            self._wait(sends, _UNDER_WAY * len(self._local))
        _remove_absent(self._own, there)
        self._wait(sends, 0)

    def send_back(self) -> None:
        """Send the owner's gradients to all other stages."""
        sends: deque[Any] = deque()
        for number in range(len(self._buckets)):
            line = self._pack(self._own, number) if self._others else None
            for rank in self._others:
                assert line is not None, "the owner is here"
                # Within a process a message is the tensor itself; stages must not share memory.
                message = line.clone() if rank in self._transport.local else line
                sends.append(self._transport.send(self._home, rank, STATE, message))
            for rank, mine in self._local.items():
                parts, flags = self._receive(self._home, rank, mine, number)
                for parameter, part in parts:
                    parameter.grad = part
                _remove_absent(mine, flags)
            self._wait(sends, _UNDER_WAY * len(self._others))
        self._wait(sends, 0)

    def _wait(self, sends: deque[Any], most: int) -> None:
        """Wait for the oldest sends until at most so many are in flight."""
        while len(sends) > most:
            self._transport.wait(sends.popleft())

    def _pack(self, parameters: list[torch.Tensor], number: int) -> torch.Tensor:
        """Return a bucket of gradients as one message."""
        lines = [_gradient(parameters[index]).reshape(-1) for index in self._buckets[number]]
        if number + 1 == len(self._buckets):
            flags = torch.tensor([float(p.grad is not None) for p in parameters])
            lines.append(flags.to(lines[0].device, lines[0].dtype))
        return lines[0].contiguous() if len(lines) == 1 else torch.cat(lines)

    def _receive(
        self, source: int, target: int, parameters: list[torch.Tensor], number: int
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[float]]:
        """Return the bucket's parameters with the received gradients, and the last one's flags."""
        bucket = [parameters[index] for index in self._buckets[number]]
        sizes = [parameter.numel() for parameter in bucket]
        sizes.append(len(parameters) if number + 1 == len(self._buckets) else 0)
        like = bucket[0]
        handle = self._transport.post(source, target, STATE, (sum(sizes),), like.dtype, like.device)
        *parts, flags = self._transport.wait(handle).split(sizes)
        shaped = [part.view(each.shape) for each, part in zip(bucket, parts, strict=True)]
        return list(zip(bucket, shaped, strict=True)), flags.abs().tolist()


def _list_tensors(
    entries: Sequence[StateEntry],
    stage: int,
    mesh_rank: int,
    tensor: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Return a stage's tensors, if this mesh rank of it is in this process."""
    found = [entry.copies.get((stage, mesh_rank)) for entry in entries]
    return [tensor(parameter) for parameter in found if parameter is not None]


def _remove_absent(parameters: Sequence[torch.Tensor], there: Sequence[float]) -> None:
    """Remove the gradients that no stage has; empty flags remove nothing."""
    for parameter, exists in zip(parameters, there, strict=False):
        if not exists:
            parameter.grad = None


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
