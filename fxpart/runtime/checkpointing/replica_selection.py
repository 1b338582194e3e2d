"""Which checkpoint to take of what machines' memories hold, and who brings whom which files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from fxpart.runtime.checkpointing.memory_store import Held, step_of


class CheckpointMemoryInventory(msgspec.Struct, frozen=True):
    """What one machine's memory holds.

    held: by checkpoint the bytes of each file that is there. needed: of the checkpoints whose
    manifest is there, those of every file that belongs to it. free: bytes that still fit.
    """

    held: Held
    needed: Held
    free: int


@dataclass(frozen=True)
class ReplicaTransfer:
    """A file that goes from one machine's memory to another's."""

    file: str
    source: str
    target: str


def select_checkpoint(
    machines: Mapping[str, CheckpointMemoryInventory],
    at_least: int = -1,
    tried: Collection[str] = (),
) -> tuple[str, list[ReplicaTransfer]] | None:
    """The newest checkpoint from that step on whose files are all somewhere, and the moves.

    tried: not these. After the moves every machine has every file. A file is only taken from where
    it has the bytes that the manifest says; of several machines, each brings about as many bytes.
    None where no checkpoint is whole, or does not fit. Of the same machines the same on every rank.
    """
    known = {where: files for told in machines.values() for where, files in told.needed.items()}
    for where in sorted(known, key=lambda name: (step_of(name), name), reverse=True):
        if step_of(where) >= at_least and where not in tried:
            moves = _moves(machines, where, known[where])
            if moves is not None:
                return where, moves
    return None


def _moves(
    machines: Mapping[str, CheckpointMemoryInventory], where: str, files: Mapping[str, int]
) -> list[ReplicaTransfer] | None:
    """What brings every file to every machine; None where that cannot be."""
    moves: list[ReplicaTransfer] = []
    brought = dict.fromkeys(machines, 0)
    room = {name: told.free for name, told in machines.items()}
    for file, size in files.items():
        has = [
            name for name, told in machines.items() if told.held.get(where, {}).get(file) == size
        ]
        for name in machines:
            if name in has:
                continue
            if not has or room[name] < size:
                return None
            source = min(has, key=lambda host: (brought[host], host))
            brought[source] += size
            room[name] -= size
            moves.append(ReplicaTransfer(file, source, name))
    return moves
