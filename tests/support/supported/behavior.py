"""One construct of a training script, run by fxpart and by plain PyTorch in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import fxpart

Optimizer = Callable[[Any], torch.optim.Optimizer]

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"constraints": {"mesh": "none", "stages": 1}, "microbatches": 1},
    "microbatches": {"constraints": {"mesh": "none", "stages": 1}, "microbatches": 4},
    "pipeline": {"constraints": {"mesh": "none", "stages": 2}, "microbatches": 2},
    "replicas": {"constraints": {"mesh": "dp=2", "stages": 1}, "microbatches": 1},
    "tensor": {"constraints": {"mesh": "tp=2", "stages": 1}, "microbatches": 1},
}
RIGHT = "right"
TOLERANCE = 2e-5  # of weights after a few steps of float32, largest absolute difference


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of programs that do not care."""
    return torch.optim.SGD(parameters, lr=0.1)


@dataclass(frozen=True)
class Script:
    """A training script: what plain PyTorch trains, and what fxpart is given.

    optimizer: a factory over parameters. instance: makes an optimizer of the model instead, which
    compile() is given as it is. scheduler: makes a scheduler of that instance, which the loop steps
    after each batch. options: of compile(). ignored: names of state that is not compared.
    """

    model: nn.Module
    batches: Sequence[tuple[torch.Tensor, ...]]
    loss: Callable[..., Any] | None = None
    optimizer: Optimizer = sgd
    instance: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = TOLERANCE
    ignored: tuple[str, ...] = ()


Build = Callable[[], Script]


@dataclass(frozen=True)
class Behavior:
    """A construct, and what fxpart does with it in each layout.

    outcome: per layout "right", or the code of the refusal. reason: why it is refused, or how it is
    supported, as the page prints it.
    """

    area: str
    construct: str
    build: Build
    outcome: Mapping[str, str]
    reason: str = ""

    @property
    def name(self) -> str:
        """The name of the function that builds the script."""
        return self.build.__name__


BEHAVIORS: list[Behavior] = []


def behavior(
    area: str, construct: str, *layouts: str, reason: str = "", refused: str = "", **codes: str
) -> Callable[[Build], Build]:
    """Add the decorated function to the table.

    layouts: those that are run, all of them right, or all refused with the code ``refused``. codes:
    layouts with another outcome (``one_rank="FXP113"``).
    """
    outcome = dict.fromkeys(layouts or ("one rank", "pipeline"), refused or RIGHT)
    outcome |= {name.replace("_", " "): code for name, code in codes.items()}
    assert set(outcome) <= set(LAYOUTS), construct

    def add(build: Build) -> Build:
        BEHAVIORS.append(Behavior(area, construct, build, outcome, reason))
        return build

    return add


def advance(scheduler: Any, loss: torch.Tensor) -> None:
    """Step a scheduler after an update, one that watches a metric with the loss."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(float(loss))
    elif scheduler is not None:
        scheduler.step()


def plain(script: Script) -> dict[str, torch.Tensor]:
    """The state after plain PyTorch has trained on every batch, the loss's under "loss."."""
    whole = nn.ModuleDict({"model": script.model})
    if isinstance(script.loss, nn.Module):
        whole["loss"] = script.loss
    twin = copy.deepcopy(whole)
    loss = twin["loss"] if "loss" in twin else script.loss
    make = script.instance
    optimizer = make(twin["model"]) if make else script.optimizer(twin.parameters())
    scheduler = script.scheduler(optimizer) if script.scheduler else None
    for batch in script.batches:
        optimizer.zero_grad()
        if loss is None:
            output = twin["model"](*batch)
            value = output["loss"] if isinstance(output, dict) else output
        else:
            value = loss(twin["model"](*batch[:-1]), batch[-1])
        value.backward()
        optimizer.step()
        advance(scheduler, value)
    state = {k.removeprefix("_orig_mod."): v for k, v in twin["model"].state_dict().items()}
    if isinstance(loss, nn.Module):
        state |= {f"loss.{name}": value for name, value in loss.state_dict().items()}
    return state


def trained(script: Script, layout: str) -> dict[str, torch.Tensor]:
    """The state after fxpart has trained on every batch, in one process."""
    given = LAYOUTS[layout]
    model = script.model
    instance = script.instance(model) if script.instance else None
    scheduler = script.scheduler(instance) if script.scheduler and instance else None
    constraints = {**given["constraints"], **script.options.get("constraints", {})}
    program = fxpart.compile(
        model,
        f"local:{2 if layout in ('pipeline', 'replicas', 'tensor') else 1}",
        example_inputs=script.batches[0],
        loss=script.loss,
        optimizer=instance,
        **{**given, **script.options, "constraints": constraints},
    )
    trainer = program.trainer(None if script.instance else script.optimizer)
    try:
        for batch in script.batches:
            advance(scheduler, trainer.step(batch))
        return trainer.state_dict()
    finally:
        trainer.close()


def outcome_of(script: Script, layout: str) -> str:
    """ "right", the code of a refusal, or what is wrong."""
    wanted = plain(script)
    try:
        found = trained(script, layout)
    except fxpart.FxpartError as refusal:
        return refusal.code
    if set(found) != set(wanted):
        return f"names differ: {sorted(set(found) ^ set(wanted))}"
    for name, value in wanted.items():
        if name in script.ignored:
            continue
        difference = (found[name].double() - value.double()).abs().max().item()
        if not difference <= script.tolerance:
            return f"{name} differs by {difference:.1g}"
    return RIGHT
