"""Linear products in 8 bits: which ones, their numbers, their price, and what is refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from fxpart.costmodels.roofline import Roofline
from torch import nn

import fxpart
from fxpart.cluster.model import Cluster
from fxpart.codegen.stage_loader import load_stage
from fxpart.compiler import float8_linear as products
from fxpart.costs import OpSpec, TensorSpec
from fxpart.errors import FxpartError

LINEAR = torch.ops.fxpart.float8_linear.default
WIDE = [[32, 64], [64, 32]]


def batch(width: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(8, width, generator=generator), torch.randn(8, 5, generator=generator)


def compiled(sizes: Any, cluster: str = "2xh100", **options: Any) -> fxpart.Program:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inner, outer in [*sizes, [sizes[-1][1], 5]]:
        layers += [nn.Linear(inner, outer), nn.Tanh()]
    constraints = {"mesh": "none", "stages": 1, **options.pop("constraints", {})}
    return fxpart.compile(
        nn.Sequential(*layers), cluster, example_inputs=batch(sizes[0][0]), precision="fp8",
        loss=nn.functional.mse_loss, microbatches=2, constraints=constraints, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_layers_whose_sizes_are_multiples_of_16() -> None:
    """The module has 8-bit products, 8-bit operands are never stored, and the plan says fp8."""
    program = compiled([*WIDE, [32, 40], [40, 64]])
    assert program.plan.precision == "fp8"
    (source,) = program.sources
    assert source.count(" = fxpart_float8_linear(") == 2
    assert source.count(" = aten_linear(") == 3  # 40, 40 and 5 are no multiples
    assert "import fxpart.compiler.float8_linear" in source
    assert fxpart.Plan.loads(program.plan.dumps()) == program.plan


@pytest.mark.slow
def test_a_stage_computes_what_the_definition_says() -> None:
    program = compiled(WIDE)
    module = load_stage(program.sources[0], program.spec.stages[0])
    state = program.captured.state
    names = {s.name: s.attribute for s in program.spec.stages[0].state}
    for name, attribute in names.items():
        setattr(module, attribute, nn.Parameter(state[name].detach().clone()))
    x, y = batch()
    (loss,) = module(0, x, y)
    values = x.bfloat16()
    for at in (0, 2):
        w, b = (state[f"{at}.{kind}"].bfloat16() for kind in ("weight", "bias"))
        whole = rounded(values.double()) @ rounded(w.double()).t()
        values = torch.tanh(whole.bfloat16() + b)
    w, b = (state[f"4.{kind}"].bfloat16() for kind in ("weight", "bias"))
    output = torch.tanh(nn.functional.linear(values, w, b))
    wanted = nn.functional.mse_loss(output.float(), y)
    torch.testing.assert_close(loss, wanted, rtol=2e-3, atol=1e-3)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """E4M3 by its definition: three bits after the first, exponents from -6, at most 448."""
    scale = 2.0 ** torch.floor(torch.log2(448 / x.abs().amax(-1, keepdim=True)))
    scaled = x * scale
    steps = 2.0 ** (torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6))) - 3)
    return torch.round(scaled / steps) * steps / scale


def test_values_are_those_of_the_definition() -> None:
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(0))
    found = products.round_to_float8(x, -1)
    torch.testing.assert_close(found.double(), rounded(x.double()), rtol=0, atol=0)
    assert float((found - x).abs().max() / x.abs().max()) <= 2**-4


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return made.requires_grad_()


def test_rows_are_independent_and_gradients_of_weights_are_wide() -> None:
    x, w, b = drawn(6, 32), drawn(16, 32, seed=1), drawn(16, seed=2)
    out = LINEAR(x, w, b)
    for row in range(6):
        assert torch.equal(LINEAR(x[row : row + 1], w, b), out[row : row + 1])
    grad = drawn(6, 16, seed=3).detach()
    out.backward(grad)
    torch.testing.assert_close(w.grad, (grad.t() @ x).detach())
    torch.testing.assert_close(b.grad, grad.sum(0))
    near = grad @ w
    assert 0 < float((x.grad - near).norm() / near.norm()) < 0.06
    assert LINEAR(x.unsqueeze(1), w).shape == (6, 1, 16)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_like_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = drawn(6, 32), drawn(16, 32, seed=1)
    grad = drawn(6, 16, seed=3).detach()
    real = LINEAR(x, w), *torch.autograd.grad(LINEAR(x, w), (x, w), grad)
    monkeypatch.setattr(products, "_has_torchao", lambda: False)
    emulated = LINEAR(x, w), *torch.autograd.grad(LINEAR(x, w), (x, w), grad)
    for one, other in zip(real, emulated, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_a_product_costs_what_the_rates_of_the_device_say() -> None:
    device = Cluster.parse("1xh100").devices[0]
    shapes = (4096, 4096), (4096, 4096)
    tensors = tuple(TensorSpec(shape, "bfloat16") for shape in shapes)

    def seconds(key: str, backward: bool) -> float:
        op = OpSpec(key, tensors, tensors[:1], gradients=2)
        return Roofline().op(op, device, backward).seconds

    forward = seconds("fxpart.float8_linear", False) / seconds("linear", False)
    backward = seconds("fxpart.float8_linear", True) / seconds("linear", True)
    assert forward < backward < 1  # the weight's gradient is in bfloat16
    assert forward < 0.75


def refused(code: str, *words: str, **options: Any) -> None:
    with pytest.raises(FxpartError) as found:
        compiled(options.pop("sizes", WIDE), **options).trainer(torch.optim.SGD)
    assert {p.code for p in found.value.problems} == {code}
    assert all(word in str(found.value) for word in words)


@pytest.mark.slow
def test_devices_without_such_products_are_refused() -> None:
    refused("FXP109", "cpu", "float8", cluster="local:2")
    refused("FXP109", "a100", "float8", cluster="2xa100")


@pytest.mark.slow
def test_a_model_without_such_sizes_is_refused() -> None:
    refused("FXP109", "multiples of 16", "(24, 24)", sizes=[[24, 24]])


@pytest.mark.slow
def test_training_without_torchao_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_has_torchao", lambda: False)
    refused("FXP601", "torchao")
