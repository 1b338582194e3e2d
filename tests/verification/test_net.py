"""The net by itself: with a mechanism switched off, the comparison finds what it did.

What capture does is compared when the model is compiled (FXP113); what a plan does, by verify.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fxpart.passes.objective import MicrobatchRewrite
from torch import nn
from torch.nn import functional as F

import fxpart
from fxpart.capture import request as capture_request
from fxpart.errors import FxpartError

pytestmark = pytest.mark.slow

Switch = Callable[[pytest.MonkeyPatch], None]


class Mean(nn.Module):
    """Assigns a new tensor to a registered buffer in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return hidden - self.mean


class Halved(torch.autograd.Function):
    """The identity with half the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 0.5


class OwnGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Halved.apply(self.inner(x))  # type: ignore[no-any-return]


def without_assigned_buffers(patch: pytest.MonkeyPatch) -> None:
    run = capture_request.trace_request
    patch.setattr(
        "fxpart.capture.api.trace_request",
        lambda request: run(replace(request, assigned=frozenset())),
    )


def without_own_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fxpart.capture.api.find_custom_backwards", lambda *_: [])


CAPTURED: dict[str, tuple[type[nn.Module], Switch]] = {
    "assigned buffers": (Mean, without_assigned_buffers),
    "gradients of its own": (OwnGradient, without_own_gradients),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_capture_without_it_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, switch = CAPTURED[name]
    switch(monkeypatch)
    torch.manual_seed(0)
    with pytest.raises(FxpartError, match="FXP1"):
        fxpart.compile(
            kind(), "local:1", example_inputs=(torch.randn(4, 6), torch.randn(4, 6)),
            loss=F.mse_loss, microbatches=1,
        )  # fmt: skip


# -- what a plan does ---------------------------------------------------------------------------


def without_totals(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "fxpart.codegen.mesh_programs.microbatch_graph.divide",
        lambda graph, *_, **__: MicrobatchRewrite(graph, None),
    )


def without_couplings(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fxpart.api.program.couplings", lambda *_: ())
    patch.setattr("fxpart.planner.prepared_model.couplings", lambda *_: ())


def tokens(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, labels, ignore_index=0)


def layers(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *more, nn.Tanh(), nn.Linear(8, 5))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """The first microbatch of four has no label that counts."""
    made = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=made), torch.tensor([0, 0, 0, 1, 2, 3, 4, 1])


def verified(
    model: nn.Module, batch: tuple[torch.Tensor, ...], loss: Any, microbatches: int, **options: Any
) -> fxpart.Verification:
    program = fxpart.compile(
        model, "local:2", example_inputs=batch, loss=loss, microbatches=microbatches,
        constraints={"mesh": "none", "stages": 2},
    )  # fmt: skip
    return program.verify(2, **options)


def test_verify_fails_without_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verified(layers(), rows(), tokens, 4).passed
    without_totals(monkeypatch)
    assert not verified(layers(), rows(), tokens, 4).passed


def test_verify_fails_without_couplings(monkeypatch: pytest.MonkeyPatch) -> None:
    without_couplings(monkeypatch)
    assert not verified(layers(nn.BatchNorm1d(8)), rows(), F.cross_entropy, 4).passed
