"""Base of optimizers that step matrices as wholes, and all other parameters by AdamW."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fxpart.errors import error

Group = dict[str, Any]
State = dict[str, Any]


class MatrixOptimizer(torch.optim.Optimizer):
    """Steps parameters with two dims by :meth:`step_matrix`, and the others as torch.optim.AdamW.

    Options of each group: lr; betas and eps of AdamW; weight_decay, decoupled from the gradient, of
    all parameters; other_lr, the learning rate of the parameters that are not matrices, as a
    fraction of lr. Gradients must be dense and real. Raises FXP109 for options out of range.
    """

    def __init__(self, params: Iterable[Any], options: Group) -> None:
        for name in ("lr", "eps", "weight_decay", "other_lr"):
            if not float(options[name]) >= 0:
                self._reject(name, options[name], "use a number of at least 0")
        if not all(0 <= beta < 1 for beta in options["betas"]):
            self._reject("betas", options["betas"], "use two numbers in [0, 1)")
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter with a gradient; return the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse or p.is_complex():
                    raise error(
                        "FXP109",
                        where=f"{type(self).__name__}, a parameter of shape {tuple(p.shape)}",
                        why="its gradient is sparse or complex, which this optimizer does not step",
                        fix='use optimizer={"tables.*": torch.optim.SparseAdam, "*": ...}',
                    )
                state = self.state[p]
                state.setdefault("step", torch.zeros((), dtype=torch.float32))
                state["step"] += 1
                if p.ndim == 2:
                    self.step_matrix(p, p.grad, state, group)
                else:
                    step_adamw(p, p.grad, state, group)
        return loss

    def set_delays(self, stage: int, delays: Sequence[int]) -> None:
        """Note the updates that each stage of an asynchronous pipeline misses.

        stage: whose parameters these are. Most optimizers do not depend on it.
        """

    @abstractmethod
    def step_matrix(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: State, group: Group
    ) -> None:
        """Update a matrix in place. state: its own, with "step" counted from 1."""

    def _reject(self, option: str, value: Any, fix: str) -> None:
        raise error(
            "FXP109",
            where=f"{type(self).__name__}({option}={value!r})",
            why="the value is out of range",
            fix=fix,
        )


def step_adamw(weight: torch.Tensor, gradient: torch.Tensor, state: State, group: Group) -> None:
    """Update a parameter as torch.optim.AdamW with the learning rate lr * other_lr."""
    if "exp_avg" not in state:
        state["exp_avg"] = torch.zeros_like(weight)
        state["exp_avg_sq"] = torch.zeros_like(weight)
    lr, (beta1, beta2), step = float(group["lr"] * group["other_lr"]), group["betas"], state["step"]
    first, second = state["exp_avg"], state["exp_avg_sq"]
    weight.mul_(1 - lr * group["weight_decay"])
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    if weight.is_meta:
        return  # the count is not known, and there is nothing to compute
    count = float(step)
    root = second.sqrt().div_((1 - beta2**count) ** 0.5).add_(group["eps"])
    weight.addcdiv_(first, root, value=-lr / (1 - beta1**count))
