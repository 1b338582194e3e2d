"""Parameters and buffers of the local stages by their original names, and those of other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import nn

from fxpart.errors import FxpartError, Problem
from fxpart.program import ProgramSpec, StateSpec
from fxpart.runtime.links import torch_dtype
from fxpart.runtime.transport import STATE, Transport


@dataclass(frozen=True)
class Entry:
    """One named tensor of the model: what it is, who owns it, and the copies of this process."""

    spec: StateSpec
    stages: tuple[int, ...]
    copies: dict[int, torch.Tensor]

    @property
    def trainable(self) -> bool:
        """Whether it is a parameter that gets a gradient."""
        return self.spec.kind == "parameter" and self.spec.requires_grad


class ModelState:
    """All named tensors of a program, in the model's own order as far as the program tells it."""

    def __init__(
        self,
        spec: ProgramSpec,
        modules: Mapping[int, nn.Module],
        ranks: Sequence[int],
        transport: Transport,
        devices: Mapping[int, torch.device],
    ) -> None:
        """modules: the stage modules of this process. ranks: the rank of each stage."""
        self.ranks = tuple(ranks)
        self.transport = transport
        self._device = devices[transport.local[0]]
        self.aliases = spec.aliases
        self.entries: dict[str, Entry] = {}
        found: dict[str, list[tuple[int, StateSpec]]] = {name: [] for name in spec.parameters}
        for stage in spec.stages:
            for state in stage.state:
                found.setdefault(state.name, []).append((stage.index, state))
        for name, holders in found.items():
            if holders:
                stages = tuple(index for index, _ in holders)
                copies = {
                    index: _tensor(modules[index], state.attribute)
                    for index, state in holders
                    if index in modules
                }
                first = holders[0][1]
                self.entries[name] = Entry(first, stages, copies)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This process's trainable parameters by name, each object once; a tie may have several."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for name, entry in self.entries.items():
            for tensor in entry.copies.values():
                if entry.trainable and isinstance(tensor, nn.Parameter):
                    found.setdefault(id(tensor), (name, tensor))
        return list(found.values())

    def owner_rank(self, entry: Entry) -> int:
        """The rank of the stage that owns an entry."""
        return self.ranks[entry.spec.owner]

    def saved(self) -> Iterator[tuple[str, Entry]]:
        """Entries that a state dict holds: parameters and persistent buffers."""
        for name, entry in self.entries.items():
            kind = entry.spec.kind
            if kind == "parameter" or (kind == "buffer" and entry.spec.persistent):
                yield name, entry

    def gather(
        self, wanted: Mapping[str, torch.Tensor | None], *, first_only: bool
    ) -> dict[str, torch.Tensor]:
        """Copies of the owners' tensors on every process, or on rank 0 only (elsewhere empty).

        wanted: names in the same order on every process, with the tensor where this process's
        stage owns it.
        """
        result: dict[str, torch.Tensor] = {}
        for name, own in wanted.items():
            entry = self.entries[name]
            root = self.owner_rank(entry)
            local = self.transport.local
            if root in local:
                assert own is not None, "the owner has its tensor"
                tensor = own.detach().clone().contiguous()
            else:
                tensor = torch.empty(
                    entry.spec.shape, dtype=torch_dtype(entry.spec.dtype), device=self._device
                )
            if not first_only:
                result[name] = self.transport.broadcast(tensor, root)
            elif 0 in local:
                result[name] = tensor if root in local else self._receive(root, tensor)
            elif root in local:
                self.transport.wait(self.transport.send(root, 0, STATE, tensor))
        return result

    def gather_gradients(self) -> dict[str, torch.Tensor]:
        """Copies of the owners' gradients by name on every process, where there are any."""
        own: dict[str, torch.Tensor | None] = {}
        for name, entry in self.entries.items():
            if entry.trainable:
                held = entry.copies.get(entry.spec.owner)
                gradient = None if held is None else held.grad
                sparse = gradient is not None and gradient.is_sparse
                own[name] = gradient.to_dense() if sparse and gradient is not None else gradient
        message = bytes(gradient is not None for gradient in own.values())
        rows = self.transport.exchange_bytes(message)
        present = [any(column) for column in zip(*rows, strict=True)]
        wanted = {n: g for (n, g), some in zip(own.items(), present, strict=True) if some}
        return self.gather(wanted, first_only=False)

    def load(self, given: Mapping[str, torch.Tensor], *, strict: bool) -> int:
        """Copy tensors into every local copy, return how many; FXP110, with all faults, before."""
        wanted = {
            name: given[known]
            for name, _ in self.saved()
            if (known := self._known_as(name, given)) is not None
        }
        problems: list[Problem] = []
        if strict:
            names = {name for name, _ in self.saved()}
            problems += [
                _fault(name, "the state dict does not hold it")
                for name in sorted(names - set(wanted))
            ]
            extra = set(given) - names - set(self.aliases)
            problems += [_fault(name, "the model has no such tensor") for name in sorted(extra)]
        for name, tensor in wanted.items():
            shape = self.entries[name].spec.shape
            if tuple(tensor.shape) != shape:
                problems.append(_fault(name, f"its shape is {tuple(tensor.shape)}, not {shape}"))
        if problems:
            raise FxpartError(problems)
        with torch.no_grad():
            for name, tensor in wanted.items():
                for copy in self.entries[name].copies.values():
                    copy.copy_(tensor)
        return len(wanted)

    def _known_as(self, name: str, given: Mapping[str, torch.Tensor]) -> str | None:
        """The name, or an alias of it, under which the given state holds a tensor."""
        if name in given:
            return name
        return next((a for a, main in self.aliases.items() if main == name and a in given), None)

    def _receive(self, root: int, like: torch.Tensor) -> torch.Tensor:
        handle = self.transport.post(root, 0, STATE, like.shape, like.dtype, like.device)
        return self.transport.wait(handle)


def _tensor(module: nn.Module, attribute: str) -> torch.Tensor:
    tensor = attrgetter(attribute)(module)
    assert isinstance(tensor, torch.Tensor), "stage state is tensors"
    return tensor


def _fault(name: str, why: str) -> Problem:
    return Problem("FXP110", name, why, "give the state dict of the same model, or strict=False")
