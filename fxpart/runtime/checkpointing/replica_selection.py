"""Selection of an in-memory checkpoint, and of the file transfers between hosts that complete
it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from fxpart.runtime.checkpointing.memory_store import FileSizes, step_of


class CheckpointMemoryInventory(msgspec.Struct, frozen=True):
    """Files in one host's memory.

    present: sizes of the present files by checkpoint. needed: sizes of all files of checkpoints
    whose manifest is present. free: free bytes.
    """

    present: FileSizes
    needed: FileSizes
    free: int


@dataclass(frozen=True)
class ReplicaTransfer:
    """Transfer of a file from one host's memory to another."""

    file: str
    source: str
    target: str


def select_checkpoint(
    machines: Mapping[str, CheckpointMemoryInventory],
    at_least: int = -1,
    tried: Collection[str] = (),
) -> tuple[str, list[ReplicaTransfer]] | None:
    """Return the newest checkpoint with all files on some host, and the transfers.

    at_least: first step to consider. tried: checkpoints to skip. After the transfers every host has
    every file. A source must have the size that the manifest says; sources are balanced by bytes.
    None if no checkpoint is complete or fits. The result is equal on every rank for equal
    inventories.
    """
    known = {
        where: files for inventory in machines.values() for where, files in inventory.needed.items()
    }
    for where in sorted(known, key=lambda name: (step_of(name), name), reverse=True):
        if step_of(where) >= at_least and where not in tried:
            transfers = _plan_transfers(machines, where, known[where])
            if transfers is not None:
                return where, transfers
    return None


def _plan_transfers(
    machines: Mapping[str, CheckpointMemoryInventory], where: str, files: Mapping[str, int]
) -> list[ReplicaTransfer] | None:
    """Return the transfers that bring every file to every host; None if impossible."""
    transfers: list[ReplicaTransfer] = []
    sent_bytes = dict.fromkeys(machines, 0)
    free = {name: inventory.free for name, inventory in machines.items()}
    for file, size in files.items():
        sources = [
            name
            for name, inventory in machines.items()
            if inventory.present.get(where, {}).get(file) == size
        ]
        for name in machines:
            if name in sources:
                continue
            if not sources or free[name] < size:
                return None
            source = min(sources, key=lambda host: (sent_bytes[host], host))
            sent_bytes[source] += size
            free[name] -= size
            transfers.append(ReplicaTransfer(file, source, name))
    return transfers
