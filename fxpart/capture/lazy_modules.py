"""Lazy modules (``nn.LazyLinear``), whose parameters get their shape from the first batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fxpart.capture.call_arguments import CallArguments
from fxpart.capture.context_managers import training_mode
from fxpart.capture.failure_causes import summarize_exception
from fxpart.capture.flat_batch import FlatBatch, unflatten_batch
from fxpart.errors import error


def initialize_lazy(model: nn.Module, call: CallArguments, parts: FlatBatch) -> None:
    """Run a model with lazy modules once on the example, as PyTorch requires before training.

    The run has no gradients and is in evaluation mode, so it draws random numbers only for the new
    parameters and changes no running statistics. Raise FXP108 if the model cannot run.
    """
    names = _uninitialized(model)
    if not names:
        return
    tensors = tuple(t.detach().clone() for t in parts.tensors)
    failure = ""
    try:
        with torch.no_grad(), training_mode(model, False):
            model(*unflatten_batch(call.args, tensors), **unflatten_batch(call.kwargs, tensors))
    except Exception as raised:  # the user's module may raise anything
        failure = f"; the model fails on the example inputs: {summarize_exception(raised)}"
    names = _uninitialized(model)
    if names:
        raise error(
            "FXP108",
            where=", ".join(names[:3]),
            why=f"parameters of lazy modules have no shape before the first forward{failure}",
            fix="call the model once on a batch before compile()",
        )


def _uninitialized(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers without a shape."""
    kinds = (UninitializedParameter, UninitializedBuffer)
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in named if isinstance(tensor, kinds)]
