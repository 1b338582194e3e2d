"""Tensors that forward or loss write without data: a capture leaves them as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart.capture.context_managers import preserve_tensors

BATCH = torch.ones(4, 3) * torch.arange(1, 5).reshape(4, 1) / 4, torch.zeros(4, 2)


class Counted(nn.Module):
    """A loss that depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return (out - target).square().mean() * self.n


class Averaged(nn.Module):
    """A running number, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(3, 5))

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.5)
        return (out - target).square().mean() * self.mean.mean()


class Inside(nn.Module):
    """The counter is in a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Counted()

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.inner(out, target) + 1.0  # type: ignore[no-any-return]


class Decayed(nn.Module):
    """Its parameter is written in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.w.mul_(0.9)
        return ((out - target).square() * self.w.detach()).mean()


class Plain:
    """No module."""

    def __init__(self) -> None:
        self.n = torch.zeros(())


class Held(nn.Module):
    """The counter is in a plain object."""

    def __init__(self) -> None:
        super().__init__()
        self.state = Plain()

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.state.n += 1
        return (out - target).square().mean() * self.state.n


def enclosed(module: nn.Module) -> Callable[..., torch.Tensor]:
    """A function around a module."""
    return lambda out, target: module(out, target)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all tests."""
    return torch.optim.SGD(parameters, lr=0.1)


def values(module: nn.Module) -> list[torch.Tensor]:
    """All tensors of a module, and of the plain object in it."""
    plain = getattr(module, "state", None)
    extra = [plain.n] if isinstance(plain, Plain) else []
    return [t.detach().clone() for t in (*module.parameters(), *module.buffers(), *extra)]


@pytest.mark.slow
@pytest.mark.parametrize("check", ["auto", "off"])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("kind", [Counted, Averaged, Inside, Decayed, Held])
def test_compile_leaves_them(kind: type[nn.Module], around: bool, check: str) -> None:
    torch.manual_seed(0)
    model, loss = nn.Linear(3, 2), kind()
    before = values(loss)
    plain_model, plain_loss = copy.deepcopy(model), copy.deepcopy(loss)
    refused = False
    try:
        program = fxpart.compile(
            model, "local:1", example_inputs=BATCH, loss=enclosed(loss) if around else loss,
            microbatches=1, check=check,
        )  # fmt: skip
    except fxpart.FxpartError:
        refused = True
    assert all(torch.equal(a, b) for a, b in zip(before, values(loss), strict=True))
    assert refused <= (around or kind in (Held, Decayed))
    if refused:
        return
    trainer, optimizer = program.trainer(sgd), sgd(plain_model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        wanted = plain_loss(plain_model(BATCH[0]), BATCH[1])
        wanted.backward()
        optimizer.step()
        assert float(trainer.step(BATCH)) == pytest.approx(float(wanted), rel=1e-6)


class Shrinking(nn.Module):
    """A model whose forward writes its own parameter."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(size, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.w.mul_(0.9)
        return x @ self.w.clone()


@pytest.mark.slow
def test_parameters_of_the_model_are_as_they_were() -> None:
    model = Shrinking()
    try:
        fxpart.compile(model, "local:1", example_inputs=(BATCH[0],), microbatches=1, check="off")
    except fxpart.FxpartError:
        pass
    assert torch.equal(model.w, torch.ones(3, 2))


def test_models_too_large_to_copy_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpart.capture.context_managers.REAL_LIMIT", 4)
    model = Shrinking()
    with pytest.raises(fxpart.FxpartError, match="too large to restore"), preserve_tensors(model):
        model(BATCH[0])
    with preserve_tensors(model):
        model.w.sum()


def test_a_tensor_of_another_shape_is_put_back() -> None:
    loss = Counted()
    with preserve_tensors(enclosed(loss)):
        loss.n.data = torch.ones(4)
    assert torch.equal(loss.n, torch.zeros(()))


def test_a_written_input_is_warned_of() -> None:
    """The batch of the user stays as it was; plain PyTorch would change it."""

    class Halved(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(0.5))

    x, y = BATCH[0].clone(), BATCH[1]
    with pytest.warns(UserWarning, match="FXP113: forward writes x in place"):
        fxpart.compile(
            Halved(3, 2), "local:1", example_inputs=(x, y), loss=nn.functional.mse_loss, check="off"
        )
    assert torch.equal(x, BATCH[0])
