"""What a model returns, reduced to named tensors; and the loss where the user gave none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from fxpart.errors import error


def named_tensors(output: Any) -> dict[str, torch.Tensor]:
    """Every tensor of ``output`` by name; None, numbers and cache objects are dropped.

    A single tensor is "output"; tuple items are "output_0", ...; dict keys and dataclass fields
    keep their names, and nesting joins with "_".
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _walk(output, ""):
        unique, count = name, 1
        while unique in found:
            unique, count = f"{name}_{count}", count + 1
        found[unique] = tensor
    return found


def own_loss(output: Any) -> torch.Tensor | None:
    """The loss that the output itself carries, ``output.loss`` or ``output["loss"]``, or None."""
    if isinstance(output, fx.Proxy):
        return None  # any attribute of a proxy exists
    if isinstance(output, Mapping):
        loss = output.get("loss")
    else:
        loss = getattr(output, "loss", None)
    if isinstance(loss, fx.Proxy):
        return loss  # type: ignore[return-value]
    return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def mean_square(
    outputs: Mapping[str, torch.Tensor], floating: frozenset[str] | None = None
) -> torch.Tensor:
    """The mean over all floating outputs of each one's mean square: a scalar float tensor.

    floating: which outputs float, where that is known already. It stands in for a loss in
    verification and prediction. FXP106 when nothing floats.
    """
    names = [n for n, t in outputs.items() if floating is None and t.is_floating_point()]
    squares = [outputs[n].float().pow(2).mean() for n in floating or names]
    if not squares:
        raise error(
            "FXP106",
            where="the model's output",
            why="it has no .loss and no floating-point tensor",
            fix="give loss=, a function of the output and the targets",
        )
    total = squares[0]
    for square in squares[1:]:
        total = total + square
    return total / len(squares)


def _walk(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, (torch.Tensor, fx.Proxy)):
        yield name or "output", value  # type: ignore[misc]
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, _join(name, str(key)))
    elif isinstance(value, (tuple, list)):
        fields = getattr(value, "_fields", None)
        for i, item in enumerate(value):
            key = fields[i] if fields else f"{i}" if name else f"output_{i}"
            yield from _walk(item, _join(name, key))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from _walk(getattr(value, part.name), _join(name, part.name))


def _join(prefix: str, key: str) -> str:
    return f"{prefix}_{key}" if prefix else key
