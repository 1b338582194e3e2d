"""Constant tensors of a program, copied again when the model changes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fxpart.compat import storage_identity
from fxpart.program.spec import StageSpec
from fxpart.runtime.mesh.mesh_ranks import MeshRank
from fxpart.runtime.state.shard_layout import make_state_slicer

Part = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass
class ModuleConstants:
    """The copies that stage modules have of the model's constants and buffers.

    entries: copy, its source, the source's name, and the function that selects a rank's part.
    unused: state that no stage trains, by name: evaluation copies it, and checkpoints load it.
    """

    unused: Mapping[str, torch.Tensor] = field(default_factory=dict)
    entries: list[tuple[torch.Tensor, torch.Tensor, str, Part | None]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        mesh_ranks: Sequence[MeshRank],
        state: Mapping[str, torch.Tensor],
        unused: Mapping[str, torch.Tensor],
    ) -> ModuleConstants:
        """Register the copies in the stage modules of these mesh ranks."""
        found = cls(unused)
        found.extend(mesh_ranks, state)
        return found

    def extend(self, mesh_ranks: Sequence[MeshRank], state: Mapping[str, torch.Tensor]) -> None:
        """Register the copies in the stage modules of further mesh ranks."""
        for mesh_rank in mesh_ranks:
            part = make_state_slicer(mesh_rank.spec, mesh_rank.index)
            for stage, module in mesh_rank.modules.items():
                self.add(module, mesh_rank.spec.stages[stage], state, part)

    def add(
        self,
        module: nn.Module,
        stage: StageSpec,
        state: Mapping[str, torch.Tensor],
        part: Part | None,
    ) -> None:
        """Register the copies in a stage module. state: the model's tensors by name."""
        for item in stage.state:
            if item.kind != "parameter" and item.name in state:
                copy = getattr(module, item.attribute)
                self.entries.append((copy, state[item.name], item.name, part))
            if item.name in self.unused:
                copy = getattr(module, item.attribute)
                self.entries.append((copy, self.unused[item.name], item.name, part))

    def reload(self) -> None:
        """Copy the unused state again, after a checkpoint was loaded."""
        self.update([*self.unused.values()])

    def update(self, changed: Sequence[torch.Tensor]) -> bool:
        """Copy the changed tensors; return whether all of them are constants of the program."""
        ids = {storage_identity(t) for t in changed}
        found = set()
        with torch.no_grad():
            for copy, tensor, name, part in self.entries:
                key = storage_identity(tensor)
                if key in ids:
                    found.add(key)
                    copy.copy_(tensor if part is None else part(name, tensor))
        return not ids - found
