"""Calls that a gradient of forward needs as operations: their numbers are those of the ops."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import grad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxpart
from fxpart.capture.differentiable_calls import _attend, call_differentiable
from fxpart.rng import microbatch_key
from fxpart.verification.single_process import keyed_random

ATEN = torch.ops.aten
REDUCTIONS = (0, 1, 2)


def assert_same(op: Any, *args: Any) -> None:
    found = call_differentiable(op, args, {})
    assert torch.allclose(found, op(*args), rtol=1e-6, atol=1e-7, equal_nan=True), (op, args)


@pytest.mark.parametrize("shape", [(5,), (6, 5), (3, 5, 4), (2, 5, 3, 4)])
def test_cross_entropy(shape: tuple[int, ...]) -> None:
    """Weights, labels that are not counted, label smoothing, probabilities."""
    torch.manual_seed(0)
    dim = min(len(shape) - 1, 1)
    scores, chances = torch.randn(shape).double(), torch.rand(shape).double()
    labels = torch.randint(5, shape[:dim] + shape[dim + 1 :])
    if dim:
        labels.view(-1)[0] = -100
    for weight, reduction in product((None, torch.rand(5).double()), REDUCTIONS):
        for smoothing in (0.0, 0.2):
            for target in (labels, chances):
                settings = (weight, reduction, -100, smoothing)
                assert_same(ATEN.cross_entropy_loss.default, scores, target, *settings)
        likely = scores.log_softmax(dim)
        assert_same(ATEN.nll_loss_nd.default, likely, labels, weight, reduction, -100)


def test_other_losses_and_activations() -> None:
    torch.manual_seed(0)
    found, wanted = 2 * torch.randn(5, 4), 2 * torch.randn(5, 4)
    for reduction in REDUCTIONS:
        for op in (ATEN.mse_loss.default, ATEN.l1_loss.default):
            assert_same(op, found, wanted, reduction)
        for width in (1.0, 0.5):
            assert_same(ATEN.smooth_l1_loss.default, found, wanted, reduction, width)
            assert_same(ATEN.huber_loss.default, found, wanted, reduction, width)
        assert_same(ATEN.smooth_l1_loss.default, found, wanted, reduction, 0.0)
    for op in (ATEN.hardshrink.default, ATEN.softshrink.default):
        assert_same(op, found, 0.5)


@pytest.mark.parametrize("logical", [True, False])
def test_attention_with_rows_without_keys(logical: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 5, 8).double().requires_grad_() for _ in range(3))
    mask = torch.rand(5, 5) > 0.4
    mask[2] = False
    given = mask if logical else torch.randn(5, 5).double().masked_fill(~mask, -torch.inf)
    found = _attend(query, key, value, given, 0.0, False, 0.3, False)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = F.scaled_dot_product_attention(query, key, value, given, scale=0.3)
    weights = torch.randn_like(found)
    assert torch.allclose(found, wanted) and not found[..., 2, :].any()
    for mine, own in zip(
        grad((found * weights).sum(), (query, key, value)),
        grad((wanted * weights).sum(), (query, key, value)),
        strict=True,
    ):
        assert torch.allclose(mine, own)


class Dropping(nn.Module):
    """A gradient penalty through dropout of values and of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.middle, self.outer = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        hidden = self.dropout(torch.tanh(self.inner(x)))
        heads = hidden.unflatten(1, (2, 4, 2)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2)
        hidden = self.dropout(F.gelu(self.middle(hidden + mixed.transpose(1, 2).flatten(1))))
        energy = self.outer(hidden)
        (slope,) = grad(energy.sum(), x, create_graph=True)
        return (energy.squeeze(-1) - y).square().mean() + slope.square().sum(-1).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("microbatches", "given"), [(2, {"stages": 2}), (1, {"mesh": "dp=2", "stages": 1})]
)
def test_dropout_draws_what_the_module_draws(microbatches: int, given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, data = Dropping().double(), (torch.randn(8, 6).double(), torch.randn(8).double())
    twin = deepcopy(model)
    program = fxpart.compile(
        model, "local:2", example_inputs=data, microbatches=microbatches, constraints=given
    )
    trained = program.trainer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    trained.step(data)
    parts = zip(*(tensor.chunk(microbatches) for tensor in data), strict=True)
    for index, (x, y) in enumerate(parts):
        with keyed_random(microbatch_key(0, 0, index)), sdpa_kernel(SDPBackend.MATH):
            (twin(x.clone(), y) / microbatches).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for name, tensor in trained.state_dict().items():
        assert torch.allclose(tensor, twin.state_dict()[name], rtol=1e-12), name
