"""Tensors that a program has as constants, copied anew when their owner writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fxpart.compat import storage_identity
from fxpart.program.shard_layout import make_state_slicer
from fxpart.program.spec import StageSpec
from fxpart.runtime.mesh.mesh_ranks import MeshRank

Part = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass
class ModuleConstants:
    """The copies that stage modules have of the model's own constants and buffers.

    entries: copy, the model's tensor, its name, and what takes a rank's part out of it.
    """

    entries: list[tuple[torch.Tensor, torch.Tensor, str, Part | None]] = field(default_factory=list)

    @classmethod
    def of(cls, lanes: Sequence[MeshRank], state: Mapping[str, torch.Tensor]) -> ModuleConstants:
        """Those of the stage modules of these mesh ranks."""
        found = cls()
        found.extend(lanes, state)
        return found

    def extend(self, lanes: Sequence[MeshRank], state: Mapping[str, torch.Tensor]) -> None:
        """Note the copies of the stage modules of these mesh ranks too."""
        for lane in lanes:
            part = make_state_slicer(lane.spec, lane.index)
            for stage, module in lane.modules.items():
                self.add(module, lane.spec.stages[stage], state, part)

    def add(
        self,
        module: nn.Module,
        stage: StageSpec,
        state: Mapping[str, torch.Tensor],
        part: Part | None,
    ) -> None:
        """Note the copies of a stage module. state: the model's tensors by name."""
        for item in stage.state:
            if item.kind != "parameter" and item.name in state:
                copy = getattr(module, item.attribute)
                self.entries.append((copy, state[item.name], item.name, part))

    def update(self, changed: Sequence[torch.Tensor]) -> bool:
        """Copy the tensors that changed; whether every one of them is a constant of a program."""
        ids = {storage_identity(t) for t in changed}
        found = set()
        with torch.no_grad():
            for copy, tensor, name, part in self.entries:
                key = storage_identity(tensor)
                if key in ids:
                    found.add(key)
                    copy.copy_(tensor if part is None else part(name, tensor))
        return not ids - found
