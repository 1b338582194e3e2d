"""Parameters and buffers by original name: local tensors, and specs of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import nn

from fxpart.compat import replaced_names
from fxpart.errors import FxpartError, Problem
from fxpart.program.spec import StateSpec
from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.mesh.mesh_ranks import MeshRank, Ranks
from fxpart.runtime.state.dtensor_state import has_dtensors, take_local_part
from fxpart.runtime.state.shard_layout import ShardLayout
from fxpart.runtime.transport.interface import STATE, Transport

Place = tuple[int, int]  # stage, mesh rank


@dataclass(frozen=True)
class StateEntry:
    """One named tensor of the model.

    spec: its kind and owner; the shape is that of one mesh rank. stages: all stages that have it.
    copies: this process's tensors, by stage and mesh rank. pieces: the part of each mesh rank.
    partial: the axes over which its gradient must still be reduced after the backward passes.
    """

    spec: StateSpec
    stages: tuple[int, ...]
    copies: dict[Place, torch.Tensor]
    pieces: ShardLayout
    partial: tuple[str, ...] = ()

    @property
    def trainable(self) -> bool:
        """Whether it is a parameter that gets a gradient."""
        return self.spec.kind == "parameter" and self.spec.requires_grad

    def first(self) -> torch.Tensor | None:
        """Return the owner's tensor of the lowest local mesh rank, else any local one, or None.

        All local tensors are equal if the entry is not sharded.
        """
        places = sorted(self.copies, key=lambda place: (place[0] != self.spec.owner, place[1]))
        return self.copies[places[0]] if places else None

    def owned(self) -> dict[int, torch.Tensor]:
        """Return the owner's tensors in this process, by mesh rank."""
        return {
            mesh_rank: t
            for (stage, mesh_rank), t in self.copies.items()
            if stage == self.spec.owner
        }


class ModelState:
    """All named tensors of a program, in the model's order if the program has it."""

    def __init__(
        self,
        mesh_ranks: Sequence[MeshRank],
        ranks: Ranks,
        transport: Transport,
        devices: Mapping[int, torch.device],
    ) -> None:
        """mesh_ranks: this process's mesh ranks. ranks: of each stage and mesh rank."""
        spec = mesh_ranks[0].spec
        self.mesh_ranks = tuple(mesh_ranks)
        self.ranks = ranks
        self.transport = transport
        self.device = devices[transport.local[0]]
        self.aliases = spec.aliases
        self.entries: dict[str, StateEntry] = {}
        found: dict[str, list[tuple[int, StateSpec]]] = {name: [] for name in spec.parameters}
        for stage in spec.stages:
            for state in stage.state:
                found.setdefault(state.name, []).append((stage.index, state))
        for name, stage_items in found.items():
            if stage_items:
                self.entries[name] = self._entry(name, stage_items)

    def _entry(self, name: str, stage_items: list[tuple[int, StateSpec]]) -> StateEntry:
        copies = {
            (index, mesh_rank.index): _tensor(mesh_rank.modules[index], state.attribute)
            for mesh_rank in self.mesh_ranks
            for index, state in stage_items
            if index in mesh_rank.modules
        }
        first, sharding = stage_items[0][1], self.mesh_ranks[0].spec.sharding
        pieces = ShardLayout.of(sharding, name, first.shape)
        tensor_sharding = None if sharding is None else sharding.state.get(name)
        stages = tuple(index for index, _ in stage_items)
        return StateEntry(
            first,
            stages,
            copies,
            pieces,
            () if tensor_sharding is None else tensor_sharding.partial,
        )

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return this process's trainable parameters by name, each object once.

        A tied parameter may have several objects.
        """
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for name, entry in self.entries.items():
            for tensor in entry.copies.values():
                if entry.trainable and isinstance(tensor, nn.Parameter):
                    found.setdefault(id(tensor), (name, tensor))
        return list(found.values())

    def trainable(self) -> dict[str, tuple[int, ...]]:
        """Return the whole shape of every trainable parameter of the model, by name."""
        return {n: tuple(e.pieces.shape) for n, e in self.entries.items() if e.trainable}

    def make_whole_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield a whole meta parameter for every trainable one of the model, by name."""
        for name, shape in self.trainable().items():
            dtype = torch_dtype(self.entries[name].spec.dtype)
            yield name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))

    def rank(self, stage: int, mesh_rank: int) -> int:
        """Return the rank of a stage's mesh rank."""
        return self.ranks[stage][mesh_rank]

    def saved(self) -> Iterator[tuple[str, StateEntry]]:
        """Yield the entries of a state dict: parameters and persistent buffers."""
        for name, entry in self.entries.items():
            kind = entry.spec.kind
            if kind == "parameter" or (kind == "buffer" and entry.spec.persistent):
                yield name, entry

    def gather(
        self,
        wanted: Mapping[str, Mapping[int, torch.Tensor]],
        *,
        first_only: bool = False,
        flat: Mapping[str, str] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return copies of whole tensors on every process, or only on rank 0 (else empty).

        wanted: names in the same order on every process, with the parts of the owner's mesh ranks
        in this process. flat: names whose parts are also sharded along this axis, as flat tensors.
        """
        result: dict[str, torch.Tensor] = {}
        keep = not first_only or 0 in self.transport.local
        for name, own in wanted.items():
            entry = self.entries[name]
            dtype = torch_dtype(entry.spec.dtype)
            axis = (flat or {}).get(name, "")
            pieces = shard_along_axis(entry.pieces, axis)
            whole = None
            for mesh_rank in pieces.sources:
                root = self.rank(entry.spec.owner, mesh_rank)
                part = self._transfer(
                    root, own.get(mesh_rank), pieces.local_shape(mesh_rank), dtype, first_only
                )
                if part is None or not keep:
                    continue
                if len(pieces.sources) == 1:
                    whole = part
                else:
                    if whole is None:
                        whole = torch.empty(entry.pieces.shape, dtype=dtype, device=self.device)
                    pieces.put(whole, mesh_rank, part.to(self.device))
            if whole is not None:
                result[name] = whole
        return result

    def _transfer(
        self,
        root: int,
        own: torch.Tensor | None,
        shape: Sequence[int],
        dtype: torch.dtype,
        first_only: bool,
    ) -> torch.Tensor | None:
        """Return a copy of a tensor of rank ``root``, on every rank or on rank 0."""
        local = self.transport.local
        if root in local:
            assert own is not None, "the owner has its tensor"
            tensor = own.detach().clone().contiguous()
        else:
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if not first_only:
            return self.transport.broadcast(tensor, root)
        if 0 in local:
            return tensor if root in local else self._receive(root, tensor)
        if root in local:
            self.transport.wait(self.transport.send(root, 0, STATE, tensor))
        return None

    def load(self, given: Mapping[str, torch.Tensor], *, strict: bool) -> int:
        """Copy tensors into all local copies; return how many; first FXP110 with all problems."""
        wanted = {
            name: given[known]
            for name, _ in self.saved()
            if (known := self._find_given_name(name, given)) is not None
        }
        problems: list[Problem] = []
        shown = replaced_names(self.aliases)
        if strict:
            here = has_dtensors(given)
            names = {name for name, entry in self.saved() if entry.copies or not here}
            problems += [
                _make_problem(shown.get(name, name), "the state dict does not have it")
                for name in sorted(names - set(wanted))
            ]
            extra = set(given) - names - set(self.aliases)
            problems += [
                _make_problem(name, "the model has no such tensor") for name in sorted(extra)
            ]
        for name, tensor in wanted.items():
            shape = self.entries[name].pieces.shape
            if tuple(tensor.shape) != shape:
                why = f"its shape is {tuple(tensor.shape)}, not {shape}"
                problems.append(_make_problem(shown.get(name, name), why))
        if problems:
            raise FxpartError(problems)
        with torch.no_grad():
            for name, tensor in wanted.items():
                entry = self.entries[name]
                for (stage, mesh_rank), copy in entry.copies.items():
                    copy.copy_(take_local_part(tensor, entry.pieces, mesh_rank, self.ranks[stage]))
        return len(wanted)

    def _find_given_name(self, name: str, given: Mapping[str, torch.Tensor]) -> str | None:
        """Return the name, or its alias, under which the given state has a tensor."""
        if name in given:
            return name
        return next((a for a, main in self.aliases.items() if main == name and a in given), None)

    def find_unused(
        self, unused: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], *, strict: bool
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tensors of state that no stage has, each with the given one."""
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        problems: list[Problem] = []
        for name, tensor in unused.items():
            known = self._find_given_name(name, given)
            if known is None:
                if strict:
                    problems.append(_make_problem(name, "the state dict does not have it"))
            elif given[known].shape != tensor.shape:
                why = f"its shape is {tuple(given[known].shape)}, not {tuple(tensor.shape)}"
                problems.append(_make_problem(known, why))
            else:
                found.append((tensor, given[known]))
        if problems:
            raise FxpartError(problems)
        return found

    def _receive(self, root: int, like: torch.Tensor) -> torch.Tensor:
        handle = self.transport.post(root, 0, STATE, like.shape, like.dtype, like.device)
        return self.transport.wait(handle)


def shard_along_axis(pieces: ShardLayout, axis: str) -> ShardLayout:
    """Return the layout with parts also sharded along an axis, as flat tensors; "": unchanged."""
    return ShardLayout(pieces.shape, pieces.placements, pieces.mesh, axis) if axis else pieces


def _tensor(module: nn.Module, attribute: str) -> torch.Tensor:
    tensor = attrgetter(attribute)(module)
    assert isinstance(tensor, torch.Tensor), "the state of a stage consists of tensors"
    return tensor


def _make_problem(name: str, why: str) -> Problem:
    return Problem("FXP110", name, why, "pass the state dict of the same model, or strict=False")
