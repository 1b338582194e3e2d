"""The user's model and loss as one module: tensors in, loss and named outputs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from fxpart.capture.batch import put_together
from fxpart.capture.calling import Call
from fxpart.capture.outputs import (
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


class Whole(nn.Module):
    """Model and loss in one: ``forward(tensors) -> {"loss/KIND": loss, name: output, ...}``.

    The model sits at attribute ``model``, a loss module at ``loss``, so that the names of their
    parameters are known by prefix. floating: names of the floating outputs once they are known,
    for tracing on proxies, which cannot tell. autocast: the dtype of ``torch.autocast`` around
    model and loss; None for no autocast. scalars: the outputs that may be the loss, once a run
    with gradients has noted them. loss_name: the one of these that is taken as the loss.
    """

    def __init__(
        self, model: nn.Module, loss: Loss | None, call: Call, autocast: torch.dtype | None = None
    ) -> None:
        """Keep the model as it is; nothing of it is changed."""
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

    def forward(self, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        """Run the model, then its loss; FXP106 when the loss is no scalar tensor."""
        if self.autocast is None:
            return self._run(batch)
        # torch.export switches the cache off around a trace, which regions would then say too.
        with torch.autocast(self.kind, dtype=self.autocast, cache_enabled=True):
            return self._run(batch)

    def _run(self, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        call = self.call
        args = put_together(call.args, batch)
        kwargs = put_together(call.kwargs, batch)
        output = self.model(*args, **kwargs)
        outputs = named_tensors(output)
        if self.noting:
            self.form = form_of(output)
        if self.loss is not None:
            targets = put_together(call.targets, batch)
            named = put_together(call.named_targets, batch)
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


def autocast_device(model: nn.Module) -> str:
    """The type of device whose rules ``torch.autocast`` follows: that of the model's state."""
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
        why=f"it returned {shown}, not one number",
        fix="return the mean over the batch as a scalar tensor",
    )
