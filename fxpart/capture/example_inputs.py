"""Infer example inputs from the model itself.

Sources are Lightning's ``example_input_array``, transformers' ``dummy_inputs`` and timm's
``pretrained_cfg``; these libraries are not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fxpart.capture.dummy_inputs import transformers_batch
from fxpart.errors import FxpartError, error

DEFAULT_BATCH = 8


def infer_examples(model: nn.Module, batch_size: int | None) -> Any:
    """Return a batch (tuple or dict) with ``batch_size`` rows, 8 by default, on the model's device.

    The values come from a separate random generator. Raise FXP102 if the model does not describe
    its inputs.
    """
    rows = batch_size or DEFAULT_BATCH
    array = getattr(model, "example_input_array", None)
    if isinstance(array, Mapping):
        return dict(array)
    if array is not None:
        return array if isinstance(array, (tuple, list)) else (array,)
    if hasattr(model, "dummy_inputs") and hasattr(model, "config"):
        return transformers_batch(model, rows)
    size = _image_size(model)
    if size is not None:
        generator = torch.Generator().manual_seed(0)
        return (torch.randn(rows, *size, generator=generator).to(device_of(model)),)
    raise no_examples(model)


def no_examples(model: nn.Module) -> FxpartError:
    """Return FXP102: this model's inputs must be given."""
    return error(
        "FXP102",
        where=type(model).__name__,
        why="it has no example_input_array (Lightning), dummy_inputs (transformers) or "
        "pretrained_cfg with input_size (timm) to infer inputs from",
        fix="pass example_inputs: a tuple of tensors or a dict of keyword arguments, with the loss "
        "targets",
    )


def device_of(model: nn.Module) -> torch.device:
    """Return the device for the model's inputs: its first parameter's, CPU for meta tensors."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _image_size(model: nn.Module) -> tuple[int, ...] | None:
    """Return timm's (channels, height, width), from ``pretrained_cfg`` or ``default_cfg``."""
    for name in ("pretrained_cfg", "default_cfg"):
        settings = getattr(model, name, None)
        size = (
            settings.get("input_size")
            if isinstance(settings, Mapping)
            else getattr(settings, "input_size", None)
        )
        if isinstance(size, (tuple, list)) and len(size) == 3:
            return tuple(int(s) for s in size)
    return None
