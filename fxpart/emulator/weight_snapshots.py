"""Snapshots of weights after given numbers of updates, without a flush.

At no moment of an asynchronous run have all stages made the same number of updates, and a flush
would change the run. So each stage's weights are copied right after its own update; a snapshot is
complete when all stages have made the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import nn

from fxpart.program.spec import ProgramSpec
from fxpart.runtime.weights import StageWeights

State = dict[str, torch.Tensor]


class WeightSnapshots:
    """Copies of the stages' state after selected updates."""

    def __init__(
        self,
        spec: ProgramSpec,
        modules: Mapping[int, nn.Module],
        rest: Mapping[str, torch.Tensor],
    ) -> None:
        """Create without snapshots. modules: by stage. rest: state of no stage, by name."""
        self._spec, self._modules, self._rest = spec, modules, dict(rest)
        self._every = 0
        self._parts: dict[int, dict[int, State]] = {}

    def copy_every(self, every: int) -> None:
        """Copy after every so many updates; 0: never."""
        self._every = every

    def follow(self, weights: Mapping[tuple[int, int], StageWeights]) -> None:
        """Copy after updates of these weights, by stage and mesh rank."""
        for (stage, _), each in weights.items():
            each.listeners.append(partial(self._copy_update, stage))

    def pop_complete(self) -> Iterator[tuple[int, State]]:
        """Yield (updates, state by name) of complete snapshots, each once, in order."""
        for updates in sorted(self._parts):
            if len(self._parts[updates]) != len(self._modules):
                return
            found: State = {}
            for stage in self._spec.stages:
                found |= self._parts[updates][stage.index]
            del self._parts[updates]
            found |= {name: tensor.detach().clone() for name, tensor in self._rest.items()}
            found |= {a: found[m] for a, m in self._spec.aliases.items() if m in found}
            yield updates, found

    def _copy_update(self, stage: int, updates: int) -> None:
        if self._every and updates % self._every == 0:
            self._parts.setdefault(updates, {})[stage] = self._copy_stage(stage)

    def _copy_stage(self, stage: int) -> State:
        module = self._modules[stage]
        return {
            state.name: getattr(module, state.attribute).detach().clone()
            for state in self._spec.stages[stage].state
            if state.owner == stage and state.kind != "constant" and state.persistent
        }
