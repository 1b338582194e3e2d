"""Communication of gradients between the last backward and the update."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxpart.runtime.mesh.mesh_ranks import find_receivers
from fxpart.runtime.optimizer.optimizer_shards import OptimizerShards
from fxpart.runtime.state.model_state import ModelState, StateEntry
from fxpart.runtime.transport.interface import STATE


def send_tied_gradients(state: ModelState, shards: OptimizerShards) -> None:
    """Send the owner's total gradient of each tied parameter to its other copies.

    The sums are computed during the backward passes
    (:mod:`fxpart.runtime.gradients.tied_parameters`); for programs with replicas see
    :mod:`fxpart.runtime.gradients.stage_replicas`. Each mesh rank sends within its own pipeline,
    and to those that it represents.
    """
    for name, entry in find_tied_entries(state):
        if name in shards.rows:
            continue
        for mesh_rank in state.mesh_ranks:
            _send_tied_gradient(state, shards, entry, mesh_rank.index)


def find_tied_entries(state: ModelState) -> list[tuple[str, StateEntry]]:
    """Return the trainable entries that several stages own, sorted by name."""
    return sorted(
        (name, entry)
        for name, entry in state.entries.items()
        if entry.trainable and len(entry.stages) > 1
    )


def _send_tied_gradient(
    state: ModelState, shards: OptimizerShards, entry: StateEntry, mesh_rank: int
) -> None:
    transport, owner = state.transport, entry.spec.owner
    home = state.rank(owner, mesh_rank)
    copies = {stage: t for (stage, at), t in entry.copies.items() if at == mesh_rank}
    shared = [s for s, t in copies.items() if t is copies.get(owner) and s != owner]
    others = [s for s in sorted(entry.stages, reverse=True) if s != owner and s not in shared]
    sends = []
    if owner in copies:
        total = _gradient(shards.of(copies[owner]))
        for stage in others:
            # Within a process a message is the tensor itself, and copies must not share memory.
            for rank in find_receivers(state.ranks, owner, stage, mesh_rank):
                if rank == home:
                    shards.of(copies[stage]).grad = total.clone()
                    continue
                message = total.clone() if rank in transport.local else total.contiguous()
                sends.append(transport.send(home, rank, STATE, message))
    for stage in others:
        if stage in copies and state.rank(stage, mesh_rank) != home:
            copy = shards.of(copies[stage])
            copy.grad = transport.wait(_post(state, home, state.rank(stage, mesh_rank), copy))
    for handle in sends:
        transport.wait(handle)


def gather_gradients(
    state: ModelState, shards: OptimizerShards, own: Mapping[int, Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return whole gradients by name on every process, if there are any.

    own: per mesh rank of this process the owners' gradients, sharded as in the mesh rank or in its
    optimizer.
    """
    names = [name for name, entry in state.entries.items() if entry.trainable]
    found: dict[str, dict[int, torch.Tensor]] = {name: {} for name in names}
    flat = {}
    for mesh_rank, gradients in own.items():
        for name, gradient in gradients.items():
            found[name][mesh_rank] = gradient
            if tuple(gradient.shape) != state.entries[name].pieces.local_shape(mesh_rank):
                flat[name] = shards.axis(name)
    # 1: a gradient exists; 3: each mesh rank's optimizer has a shard of it.
    message = bytes(bool(found[name]) + 2 * (name in flat) for name in names)
    rows = state.transport.exchange_bytes(message)
    there = {name: max(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    wanted = {name: found[name] for name in names if there[name]}
    cut = {name: shards.axis(name) for name in wanted if there[name] == 3}
    return state.gather(wanted, flat=cut)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _post(state: ModelState, source: int, target: int, like: torch.Tensor) -> object:
    return state.transport.post(source, target, STATE, like.shape, like.dtype, like.device)
