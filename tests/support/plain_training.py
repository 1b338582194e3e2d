"""Training by fxpart beside plain PyTorch in one process, for tests of single constructs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import fxpart

ONE = {"mesh": "none", "stages": 1}
TWO = {"mesh": "none", "stages": 2}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of tests that do not care."""
    return torch.optim.SGD(parameters, lr=0.1)


def difference(
    build: Callable[[], nn.Module],
    batches: Sequence[tuple[torch.Tensor, ...]],
    *,
    loss: Callable[..., Any] | None = None,
    constraints: Mapping[str, Any] = ONE,
    devices: int = 1,
    microbatches: int = 1,
    annotations: Mapping[str, str] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    clip_norm: float | None = None,
) -> float:
    """The largest difference of a weight or buffer after training on the batches."""
    loss = nn.MSELoss() if loss is None else loss
    torch.manual_seed(0)
    model = build()
    plain = copy.deepcopy(model)
    fxpart.annotate(model, annotations or {})
    program = fxpart.compile(
        model, f"local:{devices}", example_inputs=batches[0], loss=loss,
        microbatches=microbatches, constraints=dict(constraints),
    )  # fmt: skip
    trainer = program.trainer(optimizer, clip_norm=clip_norm)
    stepper = optimizer(plain.parameters())
    for *inputs, target in batches:
        trainer.step((*inputs, target))
        stepper.zero_grad()
        loss(plain(*inputs), target).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
        stepper.step()
    state = trainer.state_dict()
    expected = plain.state_dict()
    assert set(state) == {name.replace("_orig_mod.", "") for name in expected}
    return max(
        float((1 * state[name.replace("_orig_mod.", "")] - 1 * value).abs().max())
        for name, value in expected.items()
    )


def batches_of(
    inputs: Sequence[int], targets: Sequence[int], count: int = 3
) -> list[tuple[torch.Tensor, ...]]:
    """Normal numbers, the same in every call."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(*inputs, generator=generator), torch.randn(*targets, generator=generator))
        for _ in range(count)
    ]
