"""Flatten the user's batch object to tensors and constants, and rebuild it.

A batch is a tuple (positional inputs), a dict (keyword inputs), or ``(*inputs, {keyword: input})``.
Containers may nest; a leaf is a tensor or a constant (None, bool, int, float, str).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fxpart.errors import FxpartError, Problem, error
from fxpart.program.spec import ConstantSpec

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class BatchSlot:
    """Placeholder for tensor number ``index`` in a flattened batch."""

    index: int


@dataclass(frozen=True)
class FlatBatch:
    """A flattened batch: ``tree`` has a :class:`BatchSlot` in place of each of ``tensors``.

    paths: the keys to each tensor. constants: the other leaves.
    """

    tree: Any
    tensors: tuple[torch.Tensor, ...]
    paths: tuple[Path, ...]
    constants: tuple[ConstantSpec, ...]


def assemble(inputs: Any, kwargs: Mapping[str, Any] | None) -> tuple[Any, ...] | dict[str, Any]:
    """Return the batch object of example inputs: a tuple, a dict, or ``(*inputs, {kwargs})``.

    A single tensor counts as a tuple of one.
    """
    if isinstance(inputs, Mapping):
        if kwargs:
            raise error(
                "FXP109",
                where="example_kwargs",
                why="example_inputs is already a dict of keyword arguments",
                fix="pass positional inputs as a tuple, or all inputs in one dict",
            )
        return {str(k): v for k, v in inputs.items()}
    if inputs is None:
        return dict(kwargs or {})
    positional = (inputs,) if not isinstance(inputs, (tuple, list)) else tuple(inputs)
    return (*positional, dict(kwargs)) if kwargs else positional


def flatten_batch(batch: Any) -> FlatBatch:
    """Flatten ``batch`` depth first in container order; raise FXP109 with every invalid leaf."""
    tensors: list[torch.Tensor] = []
    paths: list[Path] = []
    constants: list[ConstantSpec] = []
    problems: list[Problem] = []

    def walk(value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            paths.append(path)
            return BatchSlot(len(tensors) - 1)
        if value is None or isinstance(value, (bool, int, float, str)):
            constants.append(ConstantSpec(path=path, value=value))
            return value
        if isinstance(value, Mapping):
            return {k: walk(v, (*path, k)) for k, v in value.items()}
        if isinstance(value, (tuple, list)):
            return _like(value, [walk(v, (*path, i)) for i, v in enumerate(value)])
        problems.append(
            Problem(
                "FXP109",
                f"batch{show_path(path)}",
                f"an input of type {type(value).__name__} cannot be captured",
                "pass tensors, numbers, strings, None, and tuples, lists or dicts of these",
            )
        )
        return None

    tree = walk(batch, ())
    if problems:
        raise FxpartError(problems)
    return FlatBatch(tree, tuple(tensors), tuple(paths), tuple(constants))


def distinct(parts: FlatBatch) -> FlatBatch:
    """Copy each tensor that appears more than once (``labels=input_ids``).

    Tracers identify inputs by tensor identity and would merge the two.
    """
    seen: set[int] = set()
    tensors = []
    for tensor in parts.tensors:
        tensors.append(tensor.clone() if id(tensor) in seen else tensor)
        seen.add(id(tensor))
    return replace(parts, tensors=tuple(tensors))


def on_device_of(model: nn.Module, parts: FlatBatch) -> FlatBatch:
    """Return the batch with its tensors on the model's device, if it has exactly one."""
    state = (*model.parameters(), *model.buffers())
    devices = {t.device for t in state if t.device.type != "meta"}
    if len(devices) != 1:
        return parts
    (device,) = devices
    moved = (t if t.device.type == "meta" else t.to(device) for t in parts.tensors)
    return replace(parts, tensors=tuple(moved))


def unflatten_batch(tree: Any, tensors: Sequence[Any]) -> Any:
    """Invert :func:`flatten_batch` for one (sub)tree."""
    if isinstance(tree, BatchSlot):
        return tensors[tree.index]
    if isinstance(tree, dict):
        return {k: unflatten_batch(v, tensors) for k, v in tree.items()}
    if isinstance(tree, (tuple, list)):
        return _like(tree, [unflatten_batch(v, tensors) for v in tree])
    return tree


def look_up(batch: Any, path: Path) -> Any:
    """Return the leaf of ``batch`` at ``path``; a single tensor counts as a tuple of one."""
    value: Any = (batch,) if isinstance(batch, torch.Tensor) else batch
    for key in path:
        value = value[key]
    return value


def show_path(path: Path) -> str:
    """Return a path as a Python index expression: ``[2]['mask']``."""
    return "".join(f"[{key!r}]" for key in path)


def _like(container: Any, items: list[Any]) -> Any:
    """Return a container of the same kind (list, tuple or named tuple) with other items."""
    if isinstance(container, list):
        return items
    if hasattr(container, "_fields"):
        return type(container)(*items)
    return tuple(items)
