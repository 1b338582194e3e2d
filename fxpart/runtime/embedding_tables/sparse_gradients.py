"""Sparse gradients of a process between the backwards and the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from math import prod

import torch

from fxpart.compat import replaced_names
from fxpart.compat.multi_optimizer import MultiOptimizer
from fxpart.compat.optimizer_parameters import check_gradient_layouts
from fxpart.runtime.embedding_tables.row_gather import gather
from fxpart.runtime.embedding_tables.sparse_gradient_parts import (
    SparseGradientCapture,
    SparseGradientParts,
)
from fxpart.runtime.embedding_tables.tied_tables import (
    TiedTables,
    broadcast_owner_rows,
    collect_rows_at_owner,
)
from fxpart.runtime.gradients import reduce_scatter
from fxpart.runtime.mesh.communicators import MeshCommunicators
from fxpart.runtime.mesh.mesh_ranks import MeshRank
from fxpart.runtime.state.model_state import ModelState, StateEntry

# Returns the tensor in the optimizer for a table, and this mesh rank's range of the flat table.
Place = Callable[[str, StateEntry, int, torch.Tensor], tuple[torch.Tensor, tuple[int, int]]]


class SparseGradients:
    """Sparse gradients of this process's embedding tables, per backward."""

    def __init__(
        self, state: ModelState, meshes: MeshCommunicators | None, *, shared: bool
    ) -> None:
        """Capture the gradients of tables. shared: include tables that several stages use."""
        self._state = state
        self._meshes = meshes
        self.entries: dict[str, StateEntry] = {
            name: entry
            for name, entry in state.entries.items()
            if entry.trainable and entry.spec.sparse and (shared or len(entry.stages) == 1)
        }
        self._capture = SparseGradientCapture()
        self._reduced: dict[
            int, SparseGradientParts
        ] = {}  # over mesh ranks, of tables that other stages use too
        for _, parameter in self._copies():
            self._capture.watch(parameter)

    def __contains__(self, name: str) -> bool:
        """Return whether a parameter's gradient is sparse."""
        return name in self.entries

    def reset(self) -> None:
        """Drop all gradients."""
        self._capture.reset()
        self._reduced.clear()

    def drop(self, parameter: torch.Tensor) -> None:
        """Drop the gradient of one parameter."""
        self._capture.drop(parameter)
        self._reduced.pop(id(parameter), None)

    def finish(self, mesh_rank: MeshRank, stage: int) -> None:
        """Gather the rows of all mesh ranks; all mesh ranks of the stage call it."""
        groups: dict[tuple[str, ...], list[tuple[StateEntry, torch.Tensor]]] = {}
        for entry in self.entries.values():
            parameter = entry.copies.get((stage, mesh_rank.index))
            if parameter is not None:
                groups.setdefault(self._axes(entry), []).append((entry, parameter))
        for axes, owned in groups.items():
            mine = [(parameter, self.pending(parameter)) for _, parameter in owned]
            found = [parts for _, parts in mine]
            if axes:
                assert self._meshes is not None, "axes are of a mesh"
                found = gather(self._meshes.of(stage, mesh_rank.index), axes, mine)
            for (entry, parameter), parts in zip(owned, found, strict=True):
                if len(entry.stages) == 1:
                    self._set(parameter, parts)
                elif parts is not None:
                    self._reduced[id(parameter)] = parts

    def share(self) -> None:
        """Set the gradient of tied tables to the sum over their stages, ordered by the owner."""
        totals = self.sums()
        for names, tables in self._group_tied_tables():
            if not all((name, tables.mesh_rank) in totals for name in names):
                continue
            found = broadcast_owner_rows(tables, [totals[name, tables.mesh_rank] for name in names])
            for entry, parts in zip(tables.entries, found, strict=True):
                holders = {
                    id(t): t for (_, at), t in entry.copies.items() if at == tables.mesh_rank
                }
                for place, parameter in enumerate(holders.values()):
                    own = parts.copy() if parts is not None and place else parts
                    self._set(parameter, own)

    def sums(self) -> dict[tuple[str, int], SparseGradientParts | None]:
        """Return the sums of tied tables by name and mesh rank, as the owner orders them.

        None in processes without the owner. No gradient changes.
        """
        found: dict[tuple[str, int], SparseGradientParts | None] = {}
        for names, tables in self._group_tied_tables():
            here = [self._pending_by_stage(entry, tables.mesh_rank) for entry in tables.entries]
            if here[0]:
                parts = {stage: [own[stage] for own in here] for stage in here[0]}
                totals = collect_rows_at_owner(tables, parts)
                found.update(((n, tables.mesh_rank), t) for n, t in zip(names, totals, strict=True))
        return found

    def _group_tied_tables(self) -> Iterator[tuple[list[str], TiedTables]]:
        """Yield groups of tied tables with the same stages, for each mesh rank.

        Each group has at most a bucket's bytes of whole tables, which limits the rows in memory.
        All ranks form the same groups.
        """
        groups: dict[tuple[int, tuple[int, ...]], list[list[str]]] = {}
        room: dict[tuple[int, tuple[int, ...]], int] = {}
        for name, entry in self.entries.items():
            if len(entry.stages) > 1:
                key, size = (entry.spec.owner, entry.stages), 4 * prod(entry.pieces.shape)
                if size > room.get(key, 0):
                    groups.setdefault(key, []).append([])
                    room[key] = reduce_scatter.BUCKET
                groups[key][-1].append(name)
                room[key] -= size
        for names in chain.from_iterable(groups.values()):
            for mesh_rank in self._state.mesh_ranks:
                yield (
                    names,
                    TiedTables(self._state, [self.entries[n] for n in names], mesh_rank.index),
                )

    def _pending_by_stage(
        self, entry: StateEntry, mesh_rank: int
    ) -> dict[int, SparseGradientParts | None]:
        """Return the gradients in this process by stage; a tensor shared by stages counts once."""
        holders = {stage: t for (stage, at), t in entry.copies.items() if at == mesh_rank}
        first: dict[int, int] = {}
        for stage in sorted(holders, key=lambda s: (s != entry.spec.owner, s)):
            first.setdefault(id(holders[stage]), stage)
        return {s: self.pending(t) if first[id(t)] == s else None for s, t in holders.items()}

    def shard(self, place: Place) -> None:
        """ZeRO: restrict each gradient to this mesh rank's range, without communication."""
        for name, entry in self.entries.items():
            for (_, mesh_rank), parameter in entry.copies.items():
                owned, (start, stop) = place(name, entry, mesh_rank, parameter)
                if owned is not parameter and parameter.grad is not None:
                    # uncoalesced rows would be summed in another order
                    whole = parameter.grad.coalesce()
                    owned.grad = _range(SparseGradientParts.of([whole]), parameter, start, stop)
                    parameter.grad = None

    def _copies(self) -> Iterator[tuple[StateEntry, torch.Tensor]]:
        for entry in self.entries.values():
            for parameter in entry.copies.values():
                yield entry, parameter

    def _axes(self, entry: StateEntry) -> tuple[str, ...]:
        if self._meshes is None:
            return ()
        mesh = self._meshes.mesh
        return tuple(axis for axis in entry.partial if mesh.shape[mesh.index(axis)] > 1)

    def pending(self, parameter: torch.Tensor) -> SparseGradientParts | None:
        """Return the gradients of a parameter since the last update."""
        if id(parameter) in self._reduced:
            return self._reduced[id(parameter)]
        return self._capture.pending(parameter)

    def _set(self, parameter: torch.Tensor, parts: SparseGradientParts | None) -> None:
        self.drop(parameter)
        parameter.grad = None if parts is None else parts.gradient(parameter)


def _range(
    parts: SparseGradientParts, parameter: torch.Tensor, start: int, stop: int
) -> torch.Tensor:
    """Return a range of the flat gradient, as a sparse gradient of that range."""
    width = parameter[0].numel() if len(parameter) else 1
    candidate_rows = (parts.ids >= start // width) & (parts.ids * width < stop)
    ids, values = parts.ids[candidate_rows], parts.values[candidate_rows]
    places = (ids.unsqueeze(1) * width + torch.arange(width, device=ids.device)).reshape(-1)
    inside = (places >= start) & (places < stop)
    return torch.sparse_coo_tensor(
        (places[inside] - start).unsqueeze(0), values.reshape(-1)[inside], (stop - start,),
        check_invariants=False,
    )  # fmt: skip


def check_optimizer_support(
    optimizer: torch.optim.Optimizer, state: ModelState, rows: SparseGradients
) -> None:
    """Raise FXP109 if a parameter's optimizer does not support its gradients.

    rows: parameters with sparse gradients. Classes of others are not checked.
    """
    shown = replaced_names(state.aliases)
    names = {id(p): name for name, p in state.parameters()}
    for one in optimizer.each if isinstance(optimizer, MultiOptimizer) else [optimizer]:
        mine = [names[id(p)] for g in one.param_groups for p in g["params"] if id(p) in names]
        check_gradient_layouts(one, mine, rows.entries, shown)
