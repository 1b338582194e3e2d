"""DTensors in models and batches: gather whole tensors, convert placements to annotations."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import tensor as distributed

from fxpart.annotations.model import ATTRIBUTE, annotations_of, annotations_of_inputs

Model = TypeVar("Model", bound=nn.Module)


def gather_model_dtensors(model: Model) -> Model:
    """Return the model with whole tensors, and its DTensors' placements as annotations.

    A model without DTensors is returned unchanged; otherwise the result is a copy that shares all
    other tensors. Gathering uses the DTensors' device mesh, so every process of it must call this.
    Raise FXP111 or FXP112 for placements that cannot be annotations.
    """
    if not isinstance(model, nn.Module):
        return model
    held: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    if not any(isinstance(t, distributed.DTensor) for t in held):
        return model
    said = annotations_of(model)
    memo: dict[int, Any] = {id(t): _whole(t) for t in held}
    found = copy.deepcopy(model, memo)
    setattr(found, ATTRIBUTE, said)
    return found


def gather_batch_dtensors(batch: Any) -> Any:
    """Return tuples, lists and dicts with DTensors gathered; everything else unchanged."""
    if isinstance(batch, distributed.DTensor):
        return batch.full_tensor()
    if isinstance(batch, dict):
        return {key: gather_batch_dtensors(value) for key, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(gather_batch_dtensors(value) for value in batch)
    return batch


def annotations_of_batch(
    paths: Mapping[str, Sequence[str | int]], batch: Mapping[Any, Any] | Sequence[Any]
) -> dict[str, str]:
    """Return ``input:NAME`` entries of a batch's DTensors. paths: location of each input."""
    return annotations_of_inputs(list(paths), [_at(batch, path) for path in paths.values()])


def _at(batch: Any, path: Sequence[str | int]) -> Any:
    """Return a leaf of nested tuples, lists and dicts; None for other containers."""
    held: Any = batch
    for step in path:
        if type(held) not in (dict, tuple, list):
            return None
        held = held[step]
    return held


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a DTensor, as a Parameter if it was one; return other tensors unchanged."""
    if not isinstance(tensor, distributed.DTensor):
        return tensor
    found: torch.Tensor = tensor.full_tensor().detach()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(found, requires_grad=tensor.requires_grad)
    return found
