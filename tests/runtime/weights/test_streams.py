"""Whole streams: the bits of a hand-written pipeline that keeps every version of its weights."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from asynchronous_models import HandMlp, mlp, mlp_batches
from asynchronous_reference import Reference
from hand_optimizers import HandAdamW, HandNAdam, HandSgd
from stage_streams import Chain
from torch import nn
from torch.nn import functional

from fxpart.schedule.weight_modes import MODES

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0)
NADAM = partial(torch.optim.NAdam, lr=0.01, betas=(0.99, 0.999))
HANDS: dict[str, tuple[Any, Any]] = {
    "sgd": (SGD, HandSgd(lambda step: 0.05)),
    "adamw": (ADAMW, HandAdamW(lambda step: 0.01, decay=0.0)),
    "nadam": (NADAM, HandNAdam(lambda step: 0.01)),
}
CASES = [
    (mode, stages, a, "nadam" if mode == "nadam-stash" else which)
    for mode in MODES
    for stages, a, which in (
        (1, 2, "sgd"), (2, 1, "adamw"), (4, 1, "sgd"), (4, 4, "adamw"), (3, 5, "sgd"),
    )
    if not (MODES[mode].base == "delayed" and (a < stages or stages == 1))
]  # fmt: skip


def cut(model: nn.Sequential, stages: int) -> tuple[list[nn.Module], dict[str, int]]:
    """The layers of a model over stages, and the stage of each parameter by its name there."""
    layers = list(model.named_children())
    at = [k * len(layers) // stages for k in range(stages + 1)]
    groups = [layers[a:b] for a, b in pairwise(at)]
    of = {
        f"{n}.{p}": k for k, g in enumerate(groups) for n, m in g for p, _ in m.named_parameters()
    }
    return [nn.Sequential(*(m for _, m in group)) for group in groups], of


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "stages", "a", "which"), CASES)
def test_mlp(mode: str, stages: int, a: int, which: str) -> None:
    torch.manual_seed(0)
    model = mlp().double()
    names = [name for name, _ in model.named_parameters()]
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    modules, of = cut(model, stages)  # type: ignore[arg-type]
    batches = [(x.double(), y) for x, y in mlp_batches(7, 2 * a)]
    make, hand = HANDS[which]
    chain = Chain(modules, mode, a, make, functional.cross_entropy, total_updates=20)
    chain.run(batches)
    reference = Reference(HandMlp(names), of, stages, a, mode, hand, 20)
    losses, expected = reference.train(weights, batches)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.data, expected[name], rtol=1e-9, atol=1e-11)
    for n, loss in enumerate(losses):
        found = sum(chain.losses[n * a + j] for j in range(a)) / a
        torch.testing.assert_close(found, loss, rtol=1e-9, atol=1e-11)
