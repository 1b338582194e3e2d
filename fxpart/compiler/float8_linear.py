"""Linear products in 8-bit floating point, computed by torchao.

Both operands are rounded to 8 bits after a scaling of each row by its largest absolute value, so
the rows of a batch do not depend on each other; the hardware accumulates products in float32. The
gradient of the input is such a product, too. That of the weight is computed in bfloat16, since it
is a sum over rows. This is torchao's recipe "rowwise_with_gw_hp" for training.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import fx

from fxpart.cluster.model import Cluster
from fxpart.compiler.graph_edit import fork
from fxpart.errors import error

MULTIPLE = 16  # of the sizes that the hardware's products need
KEY = "fxpart_float8"  # of a graph whose linear products are to be computed in 8 bits
RATE = "float8"  # of devices
_WHERE = "precision='fp8'"


@torch.library.custom_op("fxpart::float8_linear", mutates_args=())
def float8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``x @ weight.t() + bias``: [..., k], [n, k] and [n] give [..., n]."""
    found = _multiply(x.reshape(-1, x.shape[-1]), weight.t(), "output")
    found = found.view(*x.shape[:-1], weight.shape[0])
    return found if bias is None else found + bias


@float8_linear.register_fake
def _float8_linear_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return x.new_empty([*x.shape[:-1], weight.shape[0]])


@torch.library.custom_op("fxpart::float8_linear_backward", mutates_args=())
def float8_linear_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and weight."""
    rows = grad.reshape(-1, grad.shape[-1])
    of_x = _multiply(rows, weight, "gradient")
    return of_x.view(x.shape), rows.t() @ x.reshape(-1, x.shape[-1])


@float8_linear_backward.register_fake
def _float8_linear_backward_fake(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[:2])
    ctx.has_bias = inputs[2] is not None


def _differentiate(
    ctx: Any, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    of_x, of_weight = float8_linear_backward(grad, *ctx.saved_tensors)
    return of_x, of_weight, grad.flatten(0, -2).sum(0) if ctx.has_bias else None


float8_linear.register_autograd(_differentiate, setup_context=_keep)


def check_float8_devices(cluster: Cluster) -> None:
    """Raise FXP109 with the devices of a cluster that have no products in 8 bits."""
    without = sorted({d.model for d in cluster.devices if RATE not in d.flops})
    if without:
        raise error(
            "FXP109", where=_WHERE,
            why=f"{', '.join(without)} has no peak FLOP/s for {RATE}: it has no such products, or "
            "its data do not state them",
            fix='use precision="bf16", or state the rate in the cluster file',
        )  # fmt: skip


def check_float8_package() -> None:
    """Raise FXP601 if torchao is missing, whose kernels compute the products."""
    if not _has_torchao():
        raise error(
            "FXP601", where=_WHERE, why="torchao is not installed, whose kernels compute in 8 bits",
            fix='pip install torchao, or use precision="bf16"',
        )  # fmt: skip


def without_float8(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with products in the precision of their operands."""
    if not graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.fxpart.float8_linear.default
    ):
        return graph_module
    made = fork(graph_module)
    for node in made.graph.find_nodes(
        op="call_function", target=torch.ops.fxpart.float8_linear.default
    ):
        node.target = torch.ops.aten.linear.default
    made.recompile()
    return made


def _has_torchao() -> bool:
    return importlib.util.find_spec("torchao") is not None


def round_to_float8(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Return the values of x, in float32, that 8 bits hold after scaling.

    The scale is the largest power of two with which no value overflows: one for each index but
    those of ``dim``, or one for all (None).
    """
    largest = torch.finfo(torch.float8_e4m3fn).max
    size = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(largest / size.double().clamp(min=1e-12)))).float()
    scaled = (x.float() * scale).clamp(-largest, largest)
    return scaled.to(torch.float8_e4m3fn).float() / scale


def _multiply(rows: torch.Tensor, matrix: torch.Tensor, kind: str) -> torch.Tensor:
    """Return a product of operands in 8 bits. kind: "output", or "gradient" of the input.

    Each row of ``rows`` has a scale; each column of the matrix for the output, else the matrix.
    Without torchao, CPUs compute it in float32, for checks.
    """
    columns = 0 if kind == "output" else None
    if rows.device.type == "cpu" and not _has_torchao():
        return (round_to_float8(rows, -1) @ round_to_float8(matrix, columns)).to(rows.dtype)
    check_float8_package()
    cast, products, roles, granularity = _torchao()
    by_row, by_matrix = granularity.AXISWISE, granularity.AXISWISE
    if columns is None:
        by_matrix = granularity.TENSORWISE
    left = cast(
        rows, torch.float8_e4m3fn, products, gemm_input_role=roles[kind],
        scaling_granularity=by_row, axiswise_dim=-1, round_scales_to_power_of_2=True,
    )  # fmt: skip
    right = cast(
        matrix, torch.float8_e4m3fn, products,
        gemm_input_role=roles["weight"], scaling_granularity=by_matrix, axiswise_dim=columns,
        round_scales_to_power_of_2=True,
    )  # fmt: skip
    return torch.mm(left, right)


@cache
def _torchao() -> tuple[Any, Any, dict[str, Any], Any]:
    """Return torchao's cast to 8 bits, the configuration of products, and its enumerations."""
    from torchao.float8.config import Float8LinearConfig, ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import (
        GemmInputRole,
        LinearMMConfig,
        ScaledMMConfig,
    )

    config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    gemms = (
        config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight,
    )  # fmt: skip
    products = LinearMMConfig(
        *(ScaledMMConfig(config.emulate, gemm.use_fast_accum, False, False) for gemm in gemms)
    )
    roles = {
        "output": GemmInputRole.INPUT, "gradient": GemmInputRole.GRAD_OUTPUT,
        "weight": GemmInputRole.WEIGHT,
    }  # fmt: skip
    return hp_tensor_to_float8_dynamic, products, roles, ScalingGranularity
