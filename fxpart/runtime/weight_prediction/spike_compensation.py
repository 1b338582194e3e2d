"""Spike compensation: SGD for delayed gradients (Pipelined Backpropagation at Scale)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fxpart.compat import foreach_add, foreach_add_, foreach_mul_
from fxpart.errors import error


class SpikeCompensatedSGD(torch.optim.Optimizer):
    """SGD with momentum that compensates delayed gradients.

    v <- m v + g; W <- W - lr (a v + b g) with a = m^D and b = (1 - m^D) / (1 - m): a gradient that
    is D steps late also contributes the D steps that it missed, and its later contribution is
    reduced accordingly, so that its total contribution is lr / (1 - m) g as without delay. D = 0 is
    torch.optim.SGD. Source: spike compensation, arXiv 2003.11666.

    params: tensors or groups. lr: learning rate. momentum: m in [0, 1). delay: D, the staleness of
    the gradients in updates, an option of each group. weight_decay: multiple of W added to the
    gradient. maximize: ascend. Gradients must be dense. Raises FXP109 for values out of range.

    program.trainer(functools.partial(SpikeCompensatedSGD, lr=0.1, delay=3), weights="stash")
    """

    elementwise = True  # part of a parameter may be stepped alone

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.9,
        delay: float = 0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        for name, value, valid in (
            ("lr", lr, lr >= 0),
            ("momentum", momentum, 0 <= momentum < 1),
            ("delay", delay, delay >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
        ):
            if not valid:
                raise error(
                    "FXP109",
                    where=f"SpikeCompensatedSGD({name}={value!r})",
                    why="the value is out of range",
                    fix="use lr, delay and weight_decay of at least 0, and momentum in [0, 1)",
                )
        options = {
            "lr": lr,
            "momentum": momentum,
            "delay": delay,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter with a gradient; return the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            stepped = [p for p in group["params"] if p.grad is not None]
            self._step(stepped, group)
        return loss

    def _step(self, stepped: list[torch.Tensor], group: dict[str, Any]) -> None:
        m, delay = float(group["momentum"]), float(group["delay"])
        gradients = [p.grad for p in stepped if p.grad is not None]
        if group["maximize"]:
            gradients = [-g for g in gradients]
        if group["weight_decay"]:
            gradients = foreach_add(gradients, stepped, alpha=float(group["weight_decay"]))
        for p in stepped:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in stepped]
        foreach_mul_(buffers, [m] * len(buffers))
        foreach_add_(buffers, gradients)
        lr, of = float(group["lr"]), m**delay
        foreach_add_(stepped, buffers, alpha=-lr * of)
        if delay:
            foreach_add_(stepped, gradients, alpha=-lr * (1 - of) / (1 - m))
