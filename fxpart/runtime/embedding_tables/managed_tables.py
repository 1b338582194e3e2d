"""Managed ids of a trainer: the rows of each batch's ids, and the initialization of these rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fxpart.errors import error
from fxpart.optim import ManagedIds, RowAssignment
from fxpart.runtime.batch.batch_reader import LocalBatch
from fxpart.runtime.batch.mesh_rank_batch import get_global_inputs
from fxpart.runtime.state.model_state import StateEntry

if TYPE_CHECKING:
    from fxpart.runtime.optimizer.trainer_optimizers import TrainerOptimizers
    from fxpart.runtime.trainer_parts import TrainerParts

Assignments = list[RowAssignment]
_FIX = "see fxpart.optim.ManagedIds"


class ManagedTables:
    """The tables of a trainer with managed ids. All ranks map the same global batches alike."""

    def __init__(self, parts: TrainerParts, optimizers: TrainerOptimizers) -> None:
        """Find the tables and inputs; FXP109 for those that cannot be managed."""
        self._parts, self._optimizers = parts, optimizers
        self._managed: Sequence[ManagedIds] = parts.options.managed_ids
        self._pending: Assignments = []
        known = {given.path: given.name for given in get_global_inputs(parts.spec)}
        self._names = [[known.get((key,), "") for key in own.inputs] for own in self._managed]
        for own, names in zip(self._managed, self._names, strict=True):
            if why := self._explain_unsupported(own, names):
                raise error("FXP109", where=f"managed_ids of {own.table}", why=why, fix=_FIX)

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._managed)

    def describe(self) -> str:
        """Return the ids of the batch that is not committed, as text for comparison."""
        return "".join(f" ids {assignment.digest}" for assignment in self._pending)

    def look_up(self, seen: LocalBatch) -> LocalBatch:
        """Return a batch with rows in place of ids; nothing is counted."""
        if not self._managed:
            return seen
        return self._replace(seen, [own.look_up(ids) for own, ids in self._list_ids(seen)])

    def assign(self, seen: LocalBatch, step: int, *, ahead: bool = False) -> LocalBatch:
        """Return the batch of update ``step`` with rows in place of ids, until :meth:`commit`.

        ahead: of the batch behind the one that is not committed.
        """
        if not self._managed:
            return seen
        before: Sequence[RowAssignment | None] = [None] * len(self._managed)
        before = self._pending if ahead else before
        pairs = zip(self._list_ids(seen), before, strict=True)
        found = [own.assign(ids, step, after) for (own, ids), after in pairs]
        if not ahead:
            self._pending = found
        return self._replace(seen, [each.rows for each in found])

    def reset_rows(self) -> None:
        """Initialize the rows that ids of the batch get."""
        for own, assignment in zip(self._managed, self._pending, strict=False):
            entry = self._parts.state.entries[own.table]
            for (_, mesh_rank), weight in entry.copies.items():
                slices = entry.pieces.slices(mesh_rank)
                assert slices is not None, "a shard is one range of rows"
                holders = [o for o in self._optimizers.by_place.values() if weight in o.state]
                own.reset_rows(
                    assignment, weight, next(iter(holders), None), (slices[0], slices[1]),
                    entry.pieces.shape[1],
                )  # fmt: skip
        if self._pending:
            self._parts.note_written()

    def commit(self) -> None:
        """Count the ids of the batch."""
        for own, assignment in zip(self._managed, self._pending, strict=False):
            own.commit(assignment)
        self._pending = []

    # -- internals --------------------------------------------------------------------------------

    def _list_ids(self, seen: LocalBatch) -> Iterator[tuple[ManagedIds, torch.Tensor]]:
        """Yield the ids of each table, flat."""
        for own, names in zip(self._managed, self._names, strict=True):
            if absent := [name for name in names if name not in seen.tensors]:
                raise error(
                    "FXP105", where=f"input {absent[0]}",
                    why="every rank needs the ids of managed tables", fix="pass it on every rank",
                )  # fmt: skip
            if seen.local:
                raise error(
                    "FXP109", where=f"managed_ids of {own.table} and local=True",
                    why="every rank needs the ids of the global batch", fix="pass global batches",
                )  # fmt: skip
            yield own, torch.cat([_select(own, seen.tensors[n]).reshape(-1) for n in names])

    def _replace(self, seen: LocalBatch, rows: Sequence[torch.Tensor]) -> LocalBatch:
        tensors, written = dict(seen.tensors), set[str]()
        for own, names, flat in zip(self._managed, self._names, rows, strict=True):
            parts = flat.split([_select(own, seen.tensors[n]).numel() for n in names])
            for name, part in zip(names, parts, strict=True):
                if name not in written:
                    tensors[name] = tensors[name].clone()
                    written.add(name)
                target = _select(own, tensors[name])
                target.copy_(part.view(target.shape))
        return replace(seen, tensors=tensors)

    def _explain_unsupported(self, own: ManagedIds, names: Sequence[str]) -> str:
        """Return why a table cannot be managed, or ""."""
        entry: StateEntry | None = self._parts.state.entries.get(own.table)
        if entry is None or not entry.trainable:
            return "the model has no trained parameter of this name"
        if tuple(entry.pieces.shape[:1]) != (own.rows,) or len(entry.pieces.shape) != 2:
            return f"its shape is {list(entry.pieces.shape)}, not [{own.rows}, width]"
        if "" in names or not names:
            return f"the batch has no inputs {own.inputs}"
        options = self._parts.options
        if options.ema is not None or self._parts.shards.host is not None:
            return "moving averages and offloaded optimizers keep state of rows that are reset"
        for place, weight in entry.copies.items():
            if self._parts.shards.updated(weight) is not weight:
                return "ZeRO 1 and 2 store parts of rows on several ranks"
            if entry.pieces.slices(place[1]) is None:
                return "a rank has several ranges of its rows"
        return ""


def _select(own: ManagedIds, ids: torch.Tensor) -> torch.Tensor:
    return ids if own.column is None else ids[..., own.column]
