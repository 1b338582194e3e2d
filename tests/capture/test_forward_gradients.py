"""Gradients that forward computes are operations of the graph, with their own gradients."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import grad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fxpart.capture import capture
from fxpart.errors import FxpartError


class Equation(nn.Module):
    """The residual of a differential equation, with second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1)
        )
        self.rate = nn.Parameter(torch.tensor(0.1))

    def forward(self, time: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        time, place = time.clone().requires_grad_(), place.clone().requires_grad_()
        value = self.net(torch.cat([time, place], 1))
        ones = torch.ones_like(value)
        of_time, of_place = grad(value, (time, place), (ones,), create_graph=True)
        (twice,) = grad(of_place, place, grad_outputs=ones, create_graph=True)
        return (of_time + value * of_place - self.rate * twice).square().mean()


class Forces(nn.Module):
    """The gradient of an energy by positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 8), nn.Linear(8, 1, bias=False)

    def forward(self, places: torch.Tensor, forces: torch.Tensor) -> torch.Tensor:
        places = places.requires_grad_()
        distances = (places.unsqueeze(2) - places.unsqueeze(1)).square().sum(-1).add(0.1).sqrt()
        energy = self.outer(F.softplus(self.inner(distances))).sum()
        return F.mse_loss(-grad(energy, places, create_graph=True)[0], forces)


class Both(nn.Module):
    """By an input, and by a value that depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(7, 1, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        hidden = torch.tanh(self.inner(x))
        value = self.outer(torch.cat([x, hidden], 1)).sin()
        of_x, of_hidden = grad(value.sum(), (x, hidden), create_graph=True)
        return (of_x - y).square().mean() + of_hidden.square().mean()


class InnerStep(nn.Module):
    """A step on a weight inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def loss(weight: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(self.outer(torch.tanh(F.linear(x, weight, self.inner.bias))), y)

        weight = self.inner.weight
        return loss(weight - 0.1 * grad(loss(weight), weight, create_graph=True)[0])


class Weighed(nn.Module):
    """Rows count by a gradient that has no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        error = (self.layer(x).sin().squeeze(-1) - y.sum(-1)).square()
        (gradient,) = grad(error.sum(), x, retain_graph=True)
        return (error * gradient.norm(dim=-1)).mean()


class Layers(nn.Module):
    """Layers whose backwards are fused, write through views, or update statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.LayerNorm(8),
            nn.LeakyReLU(0.2, inplace=True), nn.Softmax(-1), nn.Linear(8, 6),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        hidden = self.net(x)
        parts = F.pad(hidden, (1, 1)).unflatten(1, (4, 2))
        parts = F.scaled_dot_product_attention(parts, parts, parts).flatten(1)
        spectrum = torch.fft.rfft(parts).abs().sum(1)
        loss = F.mse_loss(hidden[:, :3], y) + F.cross_entropy(hidden, y.argmax(1))
        (slope,) = grad(spectrum.sum() + loss, x, create_graph=True)
        return loss + slope.square().mean()


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (Layers, (6, 3)),
        (Equation, (6, 1)),
        (Forces, (4, 3, 3)),
        (InnerStep, (6, 3)),
        (Both, (6, 3)),
        (Weighed, (6, 3)),
    ],
)
def test_they_have_gradients(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, batch = kind(), (torch.randn(shape), torch.randn(shape))
    twin = deepcopy(model)
    captured = capture(model, batch)
    assert captured.method == "export" and captured.symbolic
    other = tuple(torch.cat([t, t + 0.1]) for t in batch)
    for given in (batch, other):
        loss = captured.graph(*given)[0]
        with sdpa_kernel(SDPBackend.MATH):
            own = twin(*(t.clone() for t in given))
        assert all(map(torch.equal, model.buffers(), twin.buffers()))
        assert torch.allclose(loss, own, rtol=1e-6)
        pairs = [
            torch.autograd.grad(loss, [*model.parameters()]),
            torch.autograd.grad(own, [*twin.parameters()]),
        ]
        for found, wanted in zip(*pairs, strict=True):
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6 * float(wanted.abs().max()))
        assert any(gradient.any() for gradient in pairs[1])


class Changed(nn.Module):
    def __init__(self, change: Any, **options: Any) -> None:
        super().__init__()
        self.layer, self.change, self.options = nn.Linear(3, 1), change, options

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = x.requires_grad_(), y.requires_grad_()
        value = self.change(self.layer(x).tanh())
        found = grad(
            value.sum(), [x, y][: len(self.options) + 1], create_graph=True, **self.options
        )
        return value.mean() + found[0].square().mean()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Changed(nn.AlphaDropout(0.5)), "random|bernoulli"),
        (Changed(lambda x: (2 * x).view(-1).add_(1)), "in place"),
        (Changed(nn.Identity(), allow_unused=True), "does not depend on one of the inputs"),
    ],
)
def test_what_has_no_operations_is_refused(model: nn.Module, why: str) -> None:
    with pytest.raises(FxpartError, match=why) as caught:
        capture(model, (torch.randn(4, 3), torch.randn(4, 3)))
    problem = caught.value.problems[0]
    assert problem.code == "FXP108" and "test_forward_gradients.py" in problem.where


def test_gradients_under_autocast_are_refused() -> None:
    torch.manual_seed(0)
    batch = (torch.randn(6, 3), torch.randn(6, 3))
    with pytest.raises(FxpartError, match="inside of a torch.autocast") as caught:
        capture(InnerStep(), batch, precision="bf16")
    assert caught.value.code == "FXP108"


class Backward(InnerStep):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        self.inner(x).sum().backward()
        return F.mse_loss(self.outer(torch.tanh(self.inner(x + x.grad))), y)


class Batched(InnerStep):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, given = x.requires_grad_(), torch.eye(8)
        found = grad(
            self.inner(x).tanh().sum(0), x, given, create_graph=True, is_grads_batched=True
        )
        return F.mse_loss(self.outer(torch.tanh(self.inner(x))), y) + found[0].square().mean()


@pytest.mark.parametrize(
    ("kind", "where"), [(Backward, "backward() in forward"), (Batched, "is_grads_batched")]
)
def test_other_backwards_are_refused(kind: type[nn.Module], where: str) -> None:
    """No other tracer records their values as constants."""
    with pytest.raises(FxpartError) as caught:
        capture(kind(), (torch.randn(6, 3), torch.randn(6, 3)))
    assert caught.value.code == "FXP108" and where in caught.value.problems[0].where
