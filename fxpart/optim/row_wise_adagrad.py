"""Row-wise Adagrad: Adagrad with one sum of squares per row, for embedding tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fxpart.errors import error


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad whose learning rate is the same within each row (index of the first dim).

    With g the gradient of a row w of d elements: s <- s + sum(g^2) / d, and
    w <- w - lr g / (sqrt(s) + eps). The state is one number per row, float32 for smaller dtypes.
    A sparse gradient changes only its rows, to the same bits as the equal dense gradient. Each
    element of a vector is a row. Rows may be sharded, the elements of a row may not.

    initial_accumulator_value: s before the first step. Raises FXP109 for options out of range.
    Source: the kernel rowwise_adagrad of FBGEMM, which torchrec's fused embedding tables use. (The
    unfused class of torchrec averages gradients before it squares them.)

    program.trainer({"tables.*": functools.partial(RowWiseAdagrad, lr=0.05), "*": "adamw"})
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-8,
        *,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        options = {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
        for name, value in options.items():
            if not float(value) >= 0 or (name == "eps" and not float(value)):
                raise error(
                    "FXP109",
                    where=f"RowWiseAdagrad({name}={value!r})",
                    why="the value is out of range",
                    fix=f"use a number {'above' if name == 'eps' else 'of at least'} 0",
                )
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
                if p.is_complex():
                    raise error(
                        "FXP109",
                        where=f"RowWiseAdagrad, a parameter of shape {tuple(p.shape)}",
                        why="it is complex, which this optimizer does not step",
                        fix="use torch.optim.Adagrad for complex parameters",
                    )
                state = self.state[p]
                if "sum" not in state:
                    state["sum"] = _make_sums(p, float(group["initial_accumulator_value"]))
                if p.grad.is_sparse:
                    _update_rows(p, p.grad.coalesce(), state["sum"], group)
                else:
                    _add_update(p, p.grad, state["sum"], group)
        return loss


def _make_sums(parameter: torch.Tensor, value: float) -> torch.Tensor:
    """Return the sums of all rows: the parameter's shape with dims of 1 after the first."""
    half = parameter.dtype in (torch.float16, torch.bfloat16)
    shape = [*parameter.shape[:1], *(1 for _ in parameter.shape[1:])]
    return parameter.new_full(shape, value, dtype=torch.float32 if half else parameter.dtype)


def _update_rows(
    parameter: torch.Tensor, gradient: torch.Tensor, sums: torch.Tensor, group: dict[str, Any]
) -> None:
    """Update the rows of a coalesced sparse gradient."""
    ids = gradient.indices()[0]
    rows, own = parameter.index_select(0, ids), sums.index_select(0, ids)
    _add_update(rows, gradient.values(), own, group)
    parameter.index_copy_(0, ids, rows)
    sums.index_copy_(0, ids, own)


def _add_update(
    rows: torch.Tensor, gradient: torch.Tensor, sums: torch.Tensor, group: dict[str, Any]
) -> None:
    """Update rows and their sums in place. The product is rounded before it is added, so that
    torch's kernels for some and for all rows agree.
    """
    wide = gradient.to(sums.dtype)
    dims = tuple(range(1, rows.dim()))
    squares = wide.square()
    sums.add_(squares.mean(dims, keepdim=True) if dims else squares)
    update = (wide / sums.sqrt().add_(group["eps"])).mul_(-group["lr"])
    rows.add_(update.to(rows.dtype))
