"""Which ops of a graph are alike: one target, equal arguments, equal shapes in place of tensors."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from fxpart.compiler.tensor_sizes import expression
from fxpart.passes.rules import origin


class OpSignatures:
    """A signature for each op of one graph; alike ops have equal ones."""

    def __init__(self) -> None:
        """Nothing is read before it is asked for."""
        self._tensors: dict[int, tuple[torch.Tensor, Hashable]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[fx.Node, int] = {}

    def __call__(self, node: fx.Node) -> int:
        """A number, equal for ops that are alike."""
        if node not in self._known:
            key = (
                node.target,
                self._of(node.args),
                self._of(tuple(node.kwargs.items())),
                self._of(node.meta.get("val")),
                origin(node),
            )
            self._known[node] = self._numbers.setdefault(key, len(self._numbers))
        return self._known[node]

    def _of(self, value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return "node", self._of(value.meta.get("val"))
        if isinstance(value, torch.Tensor):
            return self._shape(value)
        if isinstance(value, (list, tuple)):
            return tuple(map(self._of, value))
        if isinstance(value, dict):
            return tuple((k, self._of(v)) for k, v in value.items())
        if isinstance(value, torch.SymInt):
            return "symbol", expression(value)
        if isinstance(value, (bool, int, float, str, type(None))):
            return type(value).__name__, value
        return type(value).__name__, str(value)

    def _shape(self, tensor: torch.Tensor) -> Hashable:
        """Shape and dtype; reading those of a fake tensor takes a while, so each is read once."""
        if id(tensor) not in self._tensors:
            sizes = tuple(s if isinstance(s, int) else expression(s) for s in tensor.shape)
            self._tensors[id(tensor)] = (tensor, (tensor.dtype, sizes))
        return self._tensors[id(tensor)][1]
