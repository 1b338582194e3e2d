"""The user's model and loss as one module: tensors in, loss and named outputs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from fxpart.capture.call_arguments import CallArguments
from fxpart.capture.flat_batch import unflatten_batch
from fxpart.capture.model_outputs import (
    Form,
    form_of,
    mean_square,
    named_tensors,
    own_loss,
    scalar_outputs,
)
from fxpart.errors import error

LOSS_KEYS = {"given": "loss/given", "output": "loss/output", "mean-square": "loss/mean-square"}

Loss = Callable[..., Any]


class ModelWithLoss(nn.Module):
    """Model and loss in one: ``forward(tensors) -> {"loss/KIND": loss, name: output, ...}``.

    The model is attribute ``model`` and a loss module is ``loss``, so their parameters have known
    prefixes. floating: names of the floating-point outputs once known, for tracing on proxies.
    autocast: the dtype of ``torch.autocast`` around model and loss; None for no autocast. scalars:
    the outputs that may be the loss, recorded by a run with gradients. loss_name: the one used as
    the loss. assigned: registered buffers (module path and name) to which forward assigns new
    tensors; with ``states_kept``, each new value is copied into the registered tensor at the end,
    so that a tracer records it as a write to state.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        call: CallArguments,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Store the model unchanged."""
        super().__init__()
        self.model = model
        self.loss = loss
        self.call = call
        self.floating: frozenset[str] | None = None
        self.form: Form | None = None
        self.noting = False
        self.scalars: dict[str, str] = {}
        self.loss_name: str | None = None
        self.autocast = autocast
        self.kind = autocast_device(model)
        self.assigned: frozenset[tuple[str, str]] = frozenset()
        self.states_kept = False

    def forward(self, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        """Run the model, then its loss; raise FXP106 if the loss is not a scalar tensor."""
        if self.autocast is None:
            return self._run(batch)
        # torch.export disables the autocast cache during a trace, which regions would record.
        with torch.autocast(self.kind, dtype=self.autocast, cache_enabled=True):
            return self._run(batch)

    def _run(self, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        if self.noting:
            with noted_assignments(self):
                return self._called(batch)
        if not (self.states_kept and self.assigned):
            return self._called(batch)
        slots = [(self.get_submodule(path), name) for path, name in sorted(self.assigned)]
        registered = [module._buffers[name] for module, name in slots]
        # Backward may need the old values after the new ones are copied.
        for (module, name), tensor in zip(slots, registered, strict=True):
            assert tensor is not None, "an assigned buffer has a value before"
            module._buffers[name] = tensor.clone()
        returned = self._called(batch)
        for (module, name), tensor in zip(slots, registered, strict=True):
            value = module._buffers[name]
            assert tensor is not None and value is not None, "checked when it was recorded"
            tensor.copy_(value.detach())
            module._buffers[name] = tensor
        return returned

    def _called(self, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        call = self.call
        args = unflatten_batch(call.args, batch)
        kwargs = unflatten_batch(call.kwargs, batch)
        output = self.model(*args, **kwargs)
        outputs = named_tensors(output)
        if self.noting:
            self.form = form_of(output)
        if self.loss is not None:
            targets = unflatten_batch(call.targets, batch)
            named = unflatten_batch(call.named_targets, batch)
            value = self.loss(output, *targets, **named)
            kind = "given"
        else:
            value = own_loss(output)
            if value is None and self.noting and torch.is_grad_enabled():
                self.scalars = scalar_outputs(output)
            if value is None and self.loss_name is not None:
                value = outputs.get(self.loss_name)
            kind = "mean-square" if value is None else "output"
            if value is None:
                value = mean_square(outputs, self.floating)
            else:
                outputs = {k: t for k, t in outputs.items() if t is not value}
        return {LOSS_KEYS[kind]: _scalar(value), **outputs}


@contextmanager
def noted_assignments(whole: ModelWithLoss) -> Iterator[None]:
    """Record registered buffers to which the code assigns tensors of the same shape and dtype.

    The registered tensors are restored.
    """
    before = [
        (path, name, module, tensor)
        for path, module in whole.named_modules()
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]
    try:
        yield
    finally:
        for path, name, module, tensor in before:
            value = module._buffers.get(name)
            if value is not tensor and value is not None:
                same = (value.shape, value.dtype) == (tensor.shape, tensor.dtype)
                whole.assigned |= {(path, name)} if same else set()
                module._buffers[name] = tensor


def autocast_device(model: nn.Module) -> str:
    """Return the device type for ``torch.autocast``: that of the model's state."""
    tensor = next((t for t in (*model.parameters(), *model.buffers())), None)
    return "cpu" if tensor is None or tensor.device.type == "meta" else tensor.device.type


def _scalar(value: Any) -> torch.Tensor:
    if isinstance(value, fx.Proxy):
        return value.reshape(())  # type: ignore[return-value]
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.reshape(())
    shown = (
        f"a tensor of shape {list(value.shape)}"
        if isinstance(value, torch.Tensor)
        else (f"an object of type {type(value).__name__}")
    )
    raise error(
        "FXP106",
        where="loss",
        why=f"it returned {shown} instead of a scalar",
        fix="return the mean over the batch as a scalar tensor",
    )
