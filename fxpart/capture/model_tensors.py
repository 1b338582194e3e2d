"""Parameters and buffers of a model by original name, with ties found by storage."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpart.compat import graph_name, storage_identity


@dataclass(frozen=True)
class ModelTensors:
    """A model's tensors. ``tensors``: main name -> tensor, parameters first, in the model's order.

    aliases: every other name of a storage -> its main name (also names that a GraphModule cannot
    store -> the replacement). persistent: main names of buffers saved with the model.
    """

    tensors: dict[str, torch.Tensor]
    parameters: tuple[str, ...]
    persistent: frozenset[str]
    aliases: dict[str, str]

    def main(self, name: str) -> str:
        """Return the main name of any original name."""
        return self.aliases.get(name, name)


def state_of(model: nn.Module, loss: object = None, prefix: str = "loss") -> ModelTensors:
    """Collect the tensors of ``model``, and of ``loss`` under ``prefix`` if it is a module."""
    tensors: dict[str, torch.Tensor] = {}
    parameters: list[str] = []
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    saved: set[str] = set()
    for module, start in ((model, ""), (loss, f"{prefix}.")):
        if not isinstance(module, nn.Module):
            continue
        saved |= {start + name for name in module.state_dict(keep_vars=True)}
        named: list[tuple[str, torch.Tensor, bool]] = [
            (n, p, True) for n, p in module.named_parameters(remove_duplicate=False)
        ]
        named += [(n, b, False) for n, b in module.named_buffers(remove_duplicate=False)]
        for name, tensor, is_parameter in named:
            key = storage_identity(tensor)
            if key in seen and tensor.numel():
                aliases[start + name] = seen[key]
                continue
            main = graph_name(start + name)
            if main != start + name:
                aliases[start + name] = main
            seen[key] = main
            tensors[main] = tensor
            if is_parameter:
                parameters.append(main)
    names = {aliases.get(name, name) for name in saved} - set(parameters)
    return ModelTensors(tensors, tuple(parameters), frozenset(names & set(tensors)), aliases)


Slots = dict[str, tuple[MutableMapping[str, Any], str]]


def slots_of(
    state: ModelTensors, model: nn.Module, loss: object = None, prefix: str = "loss"
) -> Slots:
    """Return where the modules store each tensor of a state: a dict of a module, and the key.

    The slot also shows a parameter that was replaced later.
    """
    found: Slots = {}
    for module, start in ((model, ""), (loss, f"{prefix}.")):
        if not isinstance(module, nn.Module):
            continue
        for path, part in module.named_modules():
            for place in (part._parameters, part._buffers):
                for key in place:
                    name = state.main(start + (f"{path}.{key}" if path else key))
                    if name in state.tensors:
                        found.setdefault(name, (place, key))
    return found


def loss_prefix(model: nn.Module) -> str:
    """Return the prefix for the loss module's state: "loss", longer if the model has a "loss"."""
    prefix = "loss"
    while hasattr(model, prefix):
        prefix += "_"
    return prefix
