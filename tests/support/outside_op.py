"""An op of another library, as torch.library makes it: a product followed by a square."""

from __future__ import annotations

from typing import Any

import torch
from fxpart.passes.rules.schema_call import SchemaCall
from fxpart.passes.rules.sharding_rule import ShardingRule


@torch.library.custom_op("fxpart_outside::squared_product", mutates_args=())
def squared_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return (x ** 2) @ w."""
    return x.square() @ w


@squared_product.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, towards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, w = ctx.saved_tensors
    return 2 * x * (towards @ w.T), x.square().T @ towards


squared_product.register_autograd(_backward, setup_context=_keep)

OP, NOTATION = "fxpart_outside::squared_product", "b i, i o -> b o"


def make_rule(call: SchemaCall) -> ShardingRule:
    """Return the same rule as the notation, from a call."""
    return call.rule({"x": ("b", "i"), "w": ("i", "o")}, [("b", "o")])


class Net(torch.nn.Module):
    """A layer, the op with a weight of its own, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.weight = torch.nn.Parameter(torch.randn(8, 12) / 4)
        self.last = torch.nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer of the op's result."""
        return self.last(torch.ops.fxpart_outside.squared_product(self.first(x), self.weight))


def make() -> Any:
    """Return the workload for the command line, with the rule registered."""
    import fxpart

    fxpart.register_op_rule(OP, NOTATION)
    torch.manual_seed(0)
    return fxpart.Workload(
        Net(), (torch.randn(8, 8), torch.randn(8, 4)), loss=torch.nn.functional.mse_loss
    )
