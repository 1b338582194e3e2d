"""DTensors in models and batches: whole tensors in their place, placements as annotations."""

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
    """The model with whole parameters and buffers, and what its DTensors said as annotations.

    The model itself if it holds no DTensor; otherwise a copy that shares all other tensors. Whole
    tensors are gathered over the DTensors' device mesh, so every process of it must call this.
    FXP111, FXP112 for placements that cannot be annotations.
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
    """Tuples, lists and dicts with whole tensors in place of DTensors; all else as it is."""
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
    """``input:NAME`` entries of a batch's DTensors. paths: per input where it lies in the batch."""
    return annotations_of_inputs(list(paths), [_at(batch, path) for path in paths.values()])


def _at(batch: Any, path: Sequence[str | int]) -> Any:
    """A leaf of nested tuples, lists and dicts; None where there are others on the way."""
    held: Any = batch
    for step in path:
        if type(held) not in (dict, tuple, list):
            return None
        held = held[step]
    return held


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor put together, a parameter if it was one; other tensors themselves."""
    if not isinstance(tensor, distributed.DTensor):
        return tensor
    found: torch.Tensor = tensor.full_tensor().detach()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(found, requires_grad=tensor.requires_grad)
    return found
