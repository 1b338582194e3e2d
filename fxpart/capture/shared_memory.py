"""Refuse tensors of a model that change with each other because they share memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import fx, nn

from fxpart.capture.captured_model import CapturedModel
from fxpart.compat import storage_address
from fxpart.compiler.effects import state_written
from fxpart.errors import FxpartError, Problem

_CONSTANT = "; {} is a value that forward reads from .data or a plain attribute"


def refuse_shared_memory(
    model: nn.Module, loss: object, captured: CapturedModel, graph: fx.Graph
) -> None:
    """Raise FXP113 for two tensors of which one is trained or written in the other's memory.

    Ranks store each tensor by itself, so that the other would keep its old values. One object under
    several names is no problem: it is one tensor. Tensors side by side in one storage are none,
    either, such as weights that a recurrent layer has packed. graph: prepared, without regions.
    """
    objects = {id(tensor): (name, tensor) for name, tensor in captured.state.items()}
    for start, module in (("", model), ("loss.", loss)):
        for name, tensor in _list_tensors(module):
            objects.setdefault(id(tensor), (start + name, tensor))  # Another object in its memory.
    registered = {id(t) for module in (model, loss) for _, t in _list_tensors(module)}
    constants = {name for key, (name, _) in objects.items() if key not in registered}
    found = dict(objects.values())
    changed = set(chain.from_iterable(state_written(graph).values()))
    changed |= {n for n, t in found.items() if isinstance(t, nn.Parameter) and t.requires_grad}
    problems = [
        Problem(
            "FXP113",
            f"{first}, {second}",
            "they are two tensors in the same memory, so that a change of one changes the other"
            + "".join(map(_CONSTANT.format, sorted({first, second} & constants))),
            "use one Parameter or buffer for both, or compute one from the other in forward",
        )
        for first, second in _list_overlaps(found)
        if first in changed or second in changed
    ]
    if problems:
        raise FxpartError(problems)


def _list_tensors(module: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer."""
    if isinstance(module, nn.Module):
        yield from module.named_parameters()
        yield from module.named_buffers()


def _list_overlaps(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Yield each pair of names whose tensors have an element in common."""
    by_storage: dict[object, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.layout == torch.strided and tensor.numel():
            length = sum((s - 1) * d for s, d in zip(tensor.shape, tensor.stride(), strict=True))
            first = int(tensor.storage_offset()) * tensor.element_size()
            last = first + int(length + 1) * tensor.element_size()
            by_storage.setdefault(storage_address(tensor), []).append((first, last, name))
    for group in by_storage.values():
        group.sort()
        for index, (_, last, name) in enumerate(group):
            for start, _, other in group[index + 1 :]:
                if start >= last:
                    break
                if _have_common_elements(tensors[name], tensors[other]):
                    yield name, other


def _have_common_elements(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether tensors of one storage overlap, if they differ in dtype by their range."""
    if first.dtype != second.dtype:
        return True
    size = first.untyped_storage().nbytes() // first.element_size()
    marks = torch.zeros(size, dtype=torch.bool)
    marks.as_strided(first.shape, first.stride(), first.storage_offset()).fill_(True)
    return bool(marks.as_strided(second.shape, second.stride(), second.storage_offset()).any())
