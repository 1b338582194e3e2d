"""Whatever the user gives becomes one real torch optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxpart
from fxpart.errors import FxpartError
from fxpart.runtime.optimizer.factory import make_optimizer, use_fused_kernels


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]


def instance() -> torch.optim.Optimizer:
    made = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.5, betas=(0.8, 0.9))
    made.param_groups[0]["lr"] = 0.25  # what a scheduler did counts
    return made


@pytest.mark.parametrize(
    ("given", "kind", "lr"),
    [
        (torch.optim.AdamW, torch.optim.AdamW, 1e-3),
        ("adamw", torch.optim.AdamW, 1e-3),
        ("SGD", torch.optim.SGD, 1e-3),
        (partial(torch.optim.SGD, lr=0.1), torch.optim.SGD, 0.1),
        (lambda p: torch.optim.Adam(p, lr=0.2), torch.optim.Adam, 0.2),
        (instance(), torch.optim.AdamW, 0.25),
    ],
)
def test_all_forms(given: Any, kind: type, lr: float) -> None:
    mine = parameters()
    made = make_optimizer(given, mine)
    assert type(made) is kind
    assert made.param_groups[0]["params"] == mine
    assert made.param_groups[0]["lr"] == lr


def test_an_instance_keeps_its_options() -> None:
    assert make_optimizer(instance(), parameters()).param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    "given", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=1.0), instance()]
)
def test_a_rank_without_parameters(given: Any) -> None:
    made = make_optimizer(given, [])
    made.step()
    torch.optim.lr_scheduler.StepLR(made, 1)
    assert not made.state


@pytest.mark.parametrize("given", [7, lambda p: None, "sgdd", nn.Linear])
def test_anything_else_is_refused(given: Any) -> None:
    with pytest.raises((FxpartError, TypeError)) as caught:
        make_optimizer(given, parameters())
    if given is not nn.Linear:
        assert isinstance(caught.value, FxpartError) and caught.value.code == "FXP109"


def test_a_function_that_ignores_its_argument_is_refused() -> None:
    """It would update the user's module, which the trainer does not train."""
    other = parameters()
    with pytest.raises(FxpartError, match="use the function's argument") as caught:
        make_optimizer(lambda mine: torch.optim.SGD(other, lr=0.1), parameters())
    assert caught.value.code == "FXP115"


@pytest.mark.slow
def test_a_function_that_selects_otherwise_on_a_rank_is_refused() -> None:
    """By position in a list of replicas, or by the elements of a shard; dims are those of all."""
    program = fxpart.compile(
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), "local:2",
        example_inputs=(torch.randn(8, 4), torch.randn(8, 2)), loss=nn.functional.mse_loss,
        microbatches=1, constraints={"mesh": "dp=2", "zero": 3, "stages": 1}, check="off",
    )  # fmt: skip
    sgd = partial(torch.optim.SGD, lr=0.1)
    program.trainer(lambda mine: sgd([p for p in mine if p.dim() > 1])).close()
    for select in (
        lambda mine: sgd(mine[:3]),
        lambda mine: sgd([p for p in mine if p.numel() > 10]),
    ):
        with pytest.raises(FxpartError, match="differently among a rank's parts") as caught:
            program.trainer(select)
        assert caught.value.code == "FXP115"


def test_an_instance_with_several_groups_is_refused() -> None:
    first, second = parameters()
    given = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 1.0}], lr=0.1)
    with pytest.raises(FxpartError, match="2 parameter groups"):
        make_optimizer(given, parameters())


@pytest.mark.parametrize(
    ("device", "kind", "options", "fused"),
    [
        ("cuda", torch.optim.AdamW, {}, True),
        ("cuda", torch.optim.Adam, {}, True),
        ("cuda", torch.optim.AdamW, {"foreach": False}, None),
        ("cuda", torch.optim.AdamW, {"differentiable": True}, None),
        ("cuda", torch.optim.SGD, {}, None),
        ("cpu", torch.optim.AdamW, {}, None),
    ],
)
def test_adam_is_fused_on_gpus_if_nothing_was_selected(
    device: str, kind: Any, options: dict[str, Any], fused: bool | None
) -> None:
    with FakeTensorMode():
        optimizer = kind([nn.Parameter(torch.empty(3, device=device))], lr=0.1, **options)
        use_fused_kernels(optimizer)
    assert optimizer.param_groups[0]["fused"] is fused
