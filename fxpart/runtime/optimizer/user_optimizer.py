"""The user's optimizer instance: groups, parameters and state by name."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from fxpart.compat import (
    optimizer_over,
    step_of,
)
from fxpart.compat.optimizer_parameters import (
    name_optimizer_parameters,
    optimizer_error,
)
from fxpart.runtime.optimizer.optimizer_shards import OptimizerShards
from fxpart.runtime.optimizer.parameter_groups import ParameterGroup
from fxpart.runtime.state.model_state import ModelState
from fxpart.runtime.state.weight_consistency import checksum

# Takes a part of one value of a whole parameter's state; None if it has no parts.
Part = Callable[[torch.Tensor], torch.Tensor | None]
Locate = Callable[[torch.Tensor], tuple[str, Part] | None]


class UserOptimizer:
    """An optimizer instance, and the names of its parameters in the model.

    instance: the user's. names: for each of its groups the names of its parameters, in order.
    Calling it with pairs (name, parameter) creates an optimizer of the same class, groups and state
    over them, as ``named`` indicates.
    """

    named = True

    def __init__(
        self,
        instance: torch.optim.Optimizer,
        model: Mapping[str, torch.Tensor],
        *,
        followed: bool = True,
    ) -> None:
        """Map the instance's parameters to names of the model.

        model: the model's parameters by name, including those of a loss module. followed: whether
        calls of the instance are redirected to the trainer while it is open. Raises FXP115 for an
        instance over other parameters, with a parameter twice, with hooks, or with its own step or
        an inner optimizer, which a copy would not repeat.
        """
        self.instance = instance
        self.followed = followed
        self.kind = type(instance).__name__
        self.names = name_optimizer_parameters(instance, model)
        own = (p for group in instance.param_groups for p in group["params"])
        self._own = dict(zip(chain.from_iterable(self.names), own, strict=True))

    def groups(self, trainable: Iterable[str]) -> tuple[ParameterGroup, ...]:
        """Return its groups with the names of trained parameters, and its current options."""
        wanted = set(trainable)
        return tuple(
            ParameterGroup(
                {k: v for k, v in group.items() if k not in ("params", "param_names")},
                tuple(name for name in names if name in wanted),
            )
            for group, names in zip(self.instance.param_groups, self.names, strict=True)
        )

    def over(self, groups: Sequence[Sequence[tuple[str, torch.Tensor]]]) -> torch.optim.Optimizer:
        """Return a copy without state over other parameters, given by name for each group."""
        own = self._own
        members = [[(own[name], new) for name, new in pairs] for pairs in groups]
        empty = torch.nn.Parameter(torch.empty(0))
        try:
            return optimizer_over(self.instance, members, empty)
        except Exception as cause:  # Attributes of a user's class may raise any exception.
            raise optimizer_error(
                self.kind,
                f"it cannot be copied for each rank: {type(cause).__name__}: {cause}",
                "pass its class, or a function of parameters, instead of the instance",
            ) from cause

    def over_named(self, mine: Sequence[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        """Return a copy without state over those of these parameters that the instance has."""
        wanted: dict[str, list[torch.Tensor]] = {}
        for name, tensor in mine:
            wanted.setdefault(name, []).append(tensor)
        return self.over([
            [(name, new) for name in names for new in wanted.get(name, ())] for names in self.names
        ])  # fmt: skip

    def __call__(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        """Return a copy over these parameters, by name, with the instance's state."""
        mine = list(pairs)
        made = self.over_named(mine)
        places = {id(tensor): (name, _return_whole) for name, tensor in mine}
        self._copy_state(made, lambda p: places.get(id(p)))
        return made

    def fill(
        self,
        state: ModelState,
        shards: OptimizerShards,
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        """Copy the instance's state into the optimizers of this process."""
        places: dict[int, tuple[str, Part]] = {}
        for name, entry in state.entries.items():
            if not entry.trainable:
                continue
            pieces = shards.pieces(name)
            for (_, mesh_rank), tensor in entry.copies.items():

                def part(
                    value: torch.Tensor, mesh_rank: int = mesh_rank, pieces: Any = pieces
                ) -> Any:
                    layout = pieces.of_state(value.shape)
                    return None if layout is None else layout.part(value, mesh_rank)

                places[id(shards.updated(tensor))] = name, part
        for optimizer in optimizers:
            self._copy_state(optimizer, lambda p: places.get(id(p)))

    def describe(self) -> str:
        """Return its state as text for ranks to compare; options are compared separately."""
        made = hashlib.blake2b(digest_size=8)
        own = self._own
        for name in sorted(own):
            for key, value in sorted(self.instance.state.get(own[name], {}).items(), key=_key):
                tensor = isinstance(value, torch.Tensor) and not value.is_sparse
                made.update(f"{name} {key} {checksum(value) if tensor else value!r}".encode())
        return f"of {[len(names) for names in self.names]} state {made.hexdigest()}"

    def number_state(
        self, gathered: Mapping[str, Any], aliases: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return gathered state by the numbers of the instance's parameters.

        aliases: main names of tied parameters, by their other names.
        """
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        for own, names, theirs in zip(
            self.instance.param_groups, self.names, gathered["param_groups"], strict=True
        ):
            group = {
                key: tuple(value) if isinstance(own.get(key), tuple) else value
                for key, value in theirs.items()
                if key not in ("params", "param_names")
            }
            groups.append({**group, "params": list(range(number, number + len(names)))})
            for name in names:
                known = gathered["state"].get(aliases.get(name, name))
                if known is not None:
                    state[number] = known
                number += 1
        return {"state": state, "param_groups": groups}

    # -- internals --------------------------------------------------------------------------------

    def _copy_state(self, optimizer: torch.optim.Optimizer, locate: Locate) -> None:
        own = self._own
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found = locate(parameter)
                if found is None or found[0] not in own:
                    continue
                name, part = found
                kept = self.instance.state.get(own[name])
                if kept:
                    optimizer.state[parameter] = {
                        key: self._convert_value(name, key, value, parameter, part)
                        for key, value in kept.items()
                    }

    def _convert_value(
        self,
        name: str,
        key: Any,
        value: Any,
        parameter: torch.Tensor,
        part: Part,
    ) -> Any:
        """Return one value of a parameter's state for a tensor that is a part of it."""
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        own = self._own[name]
        cut = parameter.shape != own.shape
        dense = value.to_dense() if value.is_sparse and cut else value
        mine = part(dense) if value.dim() else None
        if mine is not None:
            value = mine
        elif cut and value.numel() > 1:
            raise optimizer_error(
                self.kind,
                f"its state {key!r} of {name} has the shape {list(value.shape)}, but the plan "
                "divides the parameter",
                "shard neither this parameter nor the optimizer state, or pass the class",
            )
        made = value.detach().clone()
        if value.dim() and made.dtype == own.dtype:
            made = made.to(parameter.dtype)
        return made.to(parameter.device) if value.device == own.device else made


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its step cannot be called without a closure (LBFGS, SAM)."""
    parameters = list(inspect.signature(step_of(type(optimizer))).parameters.values())[1:]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in variable for p in parameters)


def _return_whole(value: torch.Tensor) -> torch.Tensor:
    return value


def _key(item: tuple[Any, Any]) -> str:
    return str(item[0])
