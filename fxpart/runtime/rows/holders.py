"""Sparse gradients of tables that several stages hold (ties, copies): rows to the owner and back.

The owner puts them in the order of one process: by microbatch, and within one the later uses first.
Copies of a stage have taken the microbatches in turns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fxpart.program import ProgramSpec
from fxpart.runtime.rows.parts import Parts, merged
from fxpart.runtime.state import Entry, ModelState
from fxpart.runtime.transport import STATE, Transport

Way = tuple[int, int]  # from rank, to rank


def collect(
    state: ModelState, entry: Entry, lane: int, parts: dict[int, Parts | None]
) -> Parts | None:
    """The rows of all holders in the process of the owner; None elsewhere and where none has any.

    parts: of the holders in this process, by stage; those that share a tensor have it once.
    """
    transport, owner = state.transport, entry.spec.owner
    home = state.rank(owner, lane)
    sends: list[object] = []
    for stage in entry.stages:
        rank = state.rank(stage, lane)
        if stage in parts and rank != home:
            sends += _send(transport, (rank, home), parts[stage])
    found: dict[int, Parts] = {}
    if owner in parts:
        like = entry.copies[owner, lane]
        for stage in entry.stages:
            rank = state.rank(stage, lane)
            got = parts.get(stage) if rank == home else _receive(transport, (rank, home), like)
            if got is not None:
                found[stage] = got
    for handle in sends:
        transport.wait(handle)
    spec = state.lanes[0].spec
    later = sorted(found, reverse=True)
    return merged((_microbatches(spec, s, found[s]), found[s]) for s in later) if found else None


def spread(state: ModelState, entry: Entry, lane: int, total: Parts | None) -> Parts | None:
    """The owner's rows in every process that holds the table. total: of the owner's process."""
    transport, owner = state.transport, entry.spec.owner
    home = state.rank(owner, lane)
    others = dict.fromkeys(state.rank(stage, lane) for stage in entry.stages)
    others.pop(home, None)
    if home in transport.local:
        sends = [handle for rank in others for handle in _send(transport, (home, rank), total)]
        for rank in others:
            if rank in transport.local:  # one process has both ends
                _receive(transport, (home, rank), next(iter(entry.copies.values())))
        for handle in sends:
            transport.wait(handle)
        return total
    mine = [rank for rank in others if rank in transport.local]
    found = None
    for rank in mine:
        found = _receive(transport, (home, rank), next(iter(entry.copies.values())))
    return found


def _microbatches(spec: ProgramSpec, stage: int, parts: Parts) -> Iterator[int]:
    """The microbatch of each of a stage's backwards."""
    turns = next((group for group in spec.replicas if stage in group), (stage,))
    own = [at for at, copy in enumerate(turns) if copy == stage]
    for number in range(len(parts.lengths)):
        yield number // len(own) * len(turns) + own[number % len(own)]


def _send(transport: Transport, way: Way, parts: Parts | None) -> list[object]:
    """How many backwards (-1: no gradient), the rows of each, ids, numbers."""
    source, target = way
    if parts is None:
        return [transport.send(source, target, STATE, torch.tensor([-1]))]
    lengths = torch.tensor(parts.lengths, dtype=torch.long)
    messages = [torch.tensor([len(parts.lengths)])]
    messages += [m for m in (lengths, parts.ids, parts.values) if m.numel()]
    return [transport.send(source, target, STATE, m.contiguous()) for m in messages]


def _receive(transport: Transport, way: Way, like: torch.Tensor) -> Parts | None:
    """What :func:`_send` has sent."""
    cpu = torch.device("cpu")
    count = int(_take(transport, way, (1,), torch.long, cpu))
    if count < 0:
        return None
    lengths = tuple(_take(transport, way, (count,), torch.long, cpu).tolist())
    rows = sum(lengths)
    ids = _take(transport, way, (rows,), torch.long, like.device)
    values = _take(transport, way, (rows, *like.shape[1:]), like.dtype, like.device)
    return Parts(lengths, ids, values)


def _take(
    transport: Transport, way: Way, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    if not torch.Size(shape).numel():
        return torch.empty(shape, dtype=dtype, device=device)
    return transport.wait(transport.post(*way, STATE, shape, dtype, device))
