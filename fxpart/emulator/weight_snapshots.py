"""Snapshots of weights after given numbers of updates, without a flush.

At no moment of an asynchronous run have all stages made the same number of updates, and a flush
would change the run. So each stage's weights are copied right after its own update, by a hook of
its optimizer; a snapshot is complete when all stages have made the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fxpart.compat.optimizer_choice import choose
from fxpart.program.spec import ProgramSpec

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
        self._stage_of = {
            id(getattr(modules[stage.index], state.attribute)): stage.index
            for stage in spec.stages
            for state in stage.state
            if state.kind == "parameter" and state.owner == stage.index
        }
        self._trained: set[int] = set()
        self._updates: dict[int, int] = {}
        self._every = 0
        self._parts: dict[int, dict[int, State]] = {}

    def copy_every(self, every: int) -> None:
        """Copy after every so many updates; 0: never."""
        self._every = every

    def wrap_optimizer(self, optimizer: Any) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
        """Return a function that makes the given optimizer and counts its updates."""
        make = choose(optimizer).make

        def made(parameters: Iterable[Any]) -> torch.optim.Optimizer:
            given = make(parameters)
            parameters_ = [p for group in given.param_groups for p in group["params"]]
            stage = next(
                (self._stage_of[id(p)] for p in parameters_ if id(p) in self._stage_of), None
            )
            if stage is not None:
                self._trained.add(stage)
                given.register_step_post_hook(
                    lambda stepped, *_: self._count(stage) if stepped is given else None
                )
            return given

        return made

    def pop_complete(self) -> Iterator[tuple[int, State]]:
        """Yield (updates, state by name) of complete snapshots, each once, in order."""
        for updates in sorted(self._parts):
            if set(self._parts[updates]) != self._trained:
                return
            found: State = {}
            for stage in self._spec.stages:
                part = self._parts[updates].get(stage.index)
                found |= self._copy_stage(stage.index) if part is None else part
            del self._parts[updates]
            found |= {name: tensor.detach().clone() for name, tensor in self._rest.items()}
            found |= {a: found[m] for a, m in self._spec.aliases.items() if m in found}
            yield updates, found

    def _count(self, stage: int) -> None:
        self._updates[stage] = updates = self._updates.get(stage, 0) + 1
        if self._every and updates % self._every == 0:
            self._parts.setdefault(updates, {})[stage] = self._copy_stage(stage)

    def _copy_stage(self, stage: int) -> State:
        module = self._modules[stage]
        return {
            state.name: getattr(module, state.attribute).detach().clone()
            for state in self._spec.stages[stage].state
            if state.owner == stage and state.kind != "constant" and state.persistent
        }
