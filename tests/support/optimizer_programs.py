"""What ranks run with optimizers that a user gives; each returns what every rank has to find."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from hand_update_rules import Estimated, GlobalNorm
from optimizer_models import batches, difference, perceptron, program, step
from torch import nn
from torch.optim import lr_scheduler as rates

from fxpart.errors import FxpartError


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Adam with a group for the head; the norm is in neither."""
    head = {"params": model[3].parameters(), "lr": 0.02}
    return torch.optim.Adam([{"params": model[0].parameters()}, head], lr=0.01)


def instance(layout: str) -> float:
    """An instance that has stepped, with a schedule in an own loop; the difference."""
    model, plain = perceptron(), perceptron()
    mine, reference = two_groups(model), two_groups(plain)
    given = batches(6)
    for batch in given[:2]:
        step(model, mine, batch)
        step(plain, reference, batch)
    schedulers = [rates.ReduceLROnPlateau(o, patience=0, threshold=9.0) for o in (mine, reference)]
    trainer = program(model, layout, mine).trainer()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for batch in given[2:]:
            mine.zero_grad()
            loss = trainer.backward(batch)
            mine.step()
            schedulers[0].step(loss)
            schedulers[1].step(step(plain, reference, batch))
    found = difference(trainer.state_dict(), plain)
    trainer.close()
    return found


def whole_update(layout: str, kind: str) -> Any:
    """An optimizer over all parameters: the difference, or the code of the refusal."""
    make = {"norm": GlobalNorm, "estimate": Estimated}[kind]
    model, plain = perceptron(), perceptron()
    reference = make(plain.parameters())
    try:
        trainer = program(model, layout).trainer(make)
    except FxpartError as failure:
        return failure.code
    for batch in batches(4):
        trainer.step(batch)
        step(plain, reference, batch)
    return difference(trainer.state_dict(), plain)


def clamped(layout: str) -> float:
    """Weights are clamped after each step, through .data."""
    model, plain = perceptron(), perceptron()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    trainer = program(model, layout).trainer(partial(torch.optim.SGD, lr=0.1))
    for batch in batches(4):
        trainer.step(batch)
        step(plain, reference, batch)
        for each in (trainer.optimizer, reference):
            for group in each.param_groups:
                for p in group["params"]:
                    p.data.clamp_(-0.1, 0.1)
    return difference(trainer.state_dict(), plain)


def apart(what: str) -> str:
    """Rank 1 does something that rank 0 does not; the code that each hears by the next step."""
    model = perceptron()
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    other = dist.get_rank() == 1
    if other and what == "options at first":
        mine.param_groups[0]["lr"] = 0.2
    try:
        trainer = program(model, "replicas").trainer(mine)
        trainer.step(batches(1)[0])
        if other and what == "options":
            mine.param_groups[0]["lr"] = 0.2
        if other and what == "shown options":
            trainer.optimizer.param_groups[0]["momentum"] = 0.5
        if other and what == "frozen":
            model[0].requires_grad_(False)
        if other and what == "written":
            model[0].weight.data.zero_()
        trainer.step(batches(1)[0])
    except FxpartError as failure:
        return failure.code
    return "trained"


def state_apart() -> str:
    """Rank 1's instance has made a step that rank 0's has not, with equal weights."""
    model = perceptron()
    mine = torch.optim.Adam(model.parameters(), lr=0.0)
    for _ in range(1 + dist.get_rank()):
        step(model, mine, batches(1)[0])
    mine.zero_grad()
    try:
        program(model, "stages", mine).trainer()
    except FxpartError as failure:
        return failure.code
    return "trained"


def matrices(parameters: Any) -> torch.optim.Optimizer:
    """Muon of the matrices; a rank with norms alone has none."""
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.01)


def muon_of_some() -> list[float]:
    """Trains on three stages, of which one may have no matrix; losses, equal on all ranks."""
    import fxpart

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4, bias=False)
    )
    trainer = fxpart.compile(
        model, "local:3", example_inputs=batches(1)[0], loss=nn.MSELoss(), microbatches=1,
        constraints={"mesh": "none", "stages": 3, "granularity": "op"},
    ).trainer(matrices)  # fmt: skip
    return [float(trainer.step(batch)) for batch in batches(3)]


def raises_on_one() -> str:
    """A function of parameters raises on the rank that has the norm."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        if any(p.numel() == 8 * 6 for p in parameters):
            raise RuntimeError("not this one")
        return torch.optim.SGD(parameters, lr=0.1)

    try:
        program(perceptron(), "stages").trainer(make)
    except FxpartError as failure:
        return f"{failure.code} {'not this one' in str(failure)}"
    return "trained"
