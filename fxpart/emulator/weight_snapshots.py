"""Weights after so many updates, stage by stage, taken while the pipeline runs on.

No moment of an asynchronous run has the weights of all stages after the same number of updates, and
draining would change the run. So each stage's are copied right after that update of its own, by a
hook on its optimizer; once all stages have made it, the model is whole.
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
    """Copies of the stages' state after chosen updates."""

    def __init__(
        self,
        spec: ProgramSpec,
        modules: Mapping[int, nn.Module],
        rest: Mapping[str, torch.Tensor],
    ) -> None:
        """modules: by stage. rest: state that no stage holds, by name."""
        self._spec, self._modules, self._rest = spec, modules, dict(rest)
        self._stage_of = {
            id(getattr(modules[stage.index], state.attribute)): stage.index
            for stage in spec.stages
            for state in stage.state
            if state.kind == "parameter" and state.owner == stage.index
        }
        self._trained: set[int] = set()
        self._made: dict[int, int] = {}
        self._every = 0
        self._parts: dict[int, dict[int, State]] = {}

    def after(self, every: int) -> None:
        """Copy after every so many updates; 0: never."""
        self._every = every

    def watching(self, optimizer: Any) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
        """What makes the same optimizer as was given, and has its updates counted."""
        make = choose(optimizer).make

        def made(parameters: Iterable[Any]) -> torch.optim.Optimizer:
            given = make(parameters)
            held = [p for group in given.param_groups for p in group["params"]]
            stage = next((self._stage_of[id(p)] for p in held if id(p) in self._stage_of), None)
            if stage is not None:
                self._trained.add(stage)
                given.register_step_post_hook(
                    lambda stepped, *_: self._count(stage) if stepped is given else None
                )
            return given

        return made

    def taken(self) -> Iterator[tuple[int, State]]:
        """(updates, state by name) of those that are whole by now, each once, in their order."""
        for updates in sorted(self._parts):
            if set(self._parts[updates]) != self._trained:
                return
            found: State = {}
            for stage in self._spec.stages:
                part = self._parts[updates].get(stage.index)
                found |= self._copied(stage.index) if part is None else part
            del self._parts[updates]
            found |= {name: tensor.detach().clone() for name, tensor in self._rest.items()}
            found |= {a: found[m] for a, m in self._spec.aliases.items() if m in found}
            yield updates, found

    def _count(self, stage: int) -> None:
        self._made[stage] = updates = self._made.get(stage, 0) + 1
        if self._every and updates % self._every == 0:
            self._parts.setdefault(updates, {})[stage] = self._copied(stage)

    def _copied(self, stage: int) -> State:
        module = self._modules[stage]
        return {
            state.name: getattr(module, state.attribute).detach().clone()
            for state in self._spec.stages[stage].state
            if state.owner == stage and state.kind != "constant" and state.persistent
        }
