"""The emulator's losses and weights are the reference's, for every mode: bit for bit."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import asynchronous_models as models
import asynchronous_reference as reference
import hand_optimizers as hand
import pytest
import torch
from torch.nn import functional

from fxpart.emulator import EmulationResult, Emulator
from fxpart.errors import FxpartError
from fxpart.schedule.weight_modes import MODES

pytestmark = pytest.mark.slow

RATE = 0.05
STEPS = 9  # more than twice the deepest pipeline
ROWS = 4

OPTIMIZERS: dict[str, tuple[hand.Hand, Any]] = {
    "sgd": (hand.HandSgd(lambda _: RATE), partial(torch.optim.SGD, lr=RATE, momentum=0.9)),
    "adamw": (hand.HandAdamW(lambda _: RATE), partial(torch.optim.AdamW, lr=RATE)),
    "nadam": (
        hand.HandNAdam(lambda _: RATE),
        partial(torch.optim.NAdam, lr=RATE, betas=(0.99, 0.999)),
    ),
}
PLAIN = tuple(name for name in MODES if name not in ("2bw", "2bw-ef", "nadam-stash"))


@cache
def built(model: str, stages: int) -> tuple[Emulator, Any, list[Any], dict[str, torch.Tensor]]:
    """An emulator, the model's hand-written passes, batches and first weights."""
    torch.manual_seed(0)
    if model == "mlp":
        module = models.mlp(4)
        batches: list[Any] = models.mlp_batches(STEPS, ROWS)
        passes: Any = models.HandMlp([n for n, _ in module.named_parameters()])
        loss: Any = functional.cross_entropy
    else:
        module, batches = models.Gpt(3), models.gpt_batches(STEPS, ROWS)
        passes, loss = models.HandGpt(3), models.gpt_loss
    emulator = Emulator(module, stages=stages, microbatches=2, loss=loss, example_inputs=batches[0])
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return emulator, passes, batches, weights


def stage_of(emulator: Emulator) -> dict[str, int]:
    """The stage of each parameter."""
    return {
        state.name: stage.index
        for stage in emulator.program.spec.stages
        for state in stage.state
        if state.kind == "parameter" and state.owner == stage.index
    }


def by_both(
    model: str, stages: int, a: int, mode: str, optimizer: str, **options: Any
) -> tuple[EmulationResult, list[torch.Tensor], dict[str, torch.Tensor]]:
    """What the emulator gives, and the reference's losses and weights."""
    emulator, passes, batches, weights = built(model, stages)
    by_hand, make = OPTIMIZERS[optimizer]
    run = emulator.run(
        batches, weights=mode, optimizer=make, steps=STEPS, microbatches=a, **options
    )
    known = reference.Reference(
        passes, stage_of(emulator), stages, a, mode, by_hand,
        total=STEPS if mode == "pipemare" else None,
    ).train(weights, batches)  # fmt: skip
    return run, *known


def compare(
    run: EmulationResult, losses: list[torch.Tensor], weights: dict[str, torch.Tensor]
) -> None:
    """Every bit of each loss and weight."""
    assert [torch.tensor(loss) for loss in run.losses] == losses
    assert set(run.state_dict) == set(weights)
    wrong = {
        name: (run.state_dict[name] - weight).abs().max().item()
        for name, weight in weights.items()
        if not torch.equal(run.state_dict[name], weight)
    }
    assert not wrong


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("mode", PLAIN)
def test_mlp(mode: str, stages: int, a: int, optimizer: str) -> None:
    compare(*by_both("mlp", stages, a, mode, optimizer))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("stages", "a"), [(2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("mode", PLAIN)
def test_gpt(mode: str, stages: int, a: int, optimizer: str) -> None:
    compare(*by_both("gpt", stages, a, mode, optimizer))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("model", ["mlp", "gpt"])
@pytest.mark.parametrize("mode", ["2bw", "2bw-ef"])
def test_double_buffer_with_as_many_microbatches_as_stages(
    mode: str, model: str, stages: int, optimizer: str
) -> None:
    compare(*by_both(model, stages, stages, mode, optimizer))


@pytest.mark.parametrize(("stages", "a"), [(2, 1), (3, 1), (3, 2), (4, 1), (4, 2)])
def test_double_buffer_with_fewer_is_refused(stages: int, a: int) -> None:
    emulator, _, batches, _ = built("mlp", stages)
    with pytest.raises(FxpartError, match="FXP109"):
        emulator.run(batches, weights="2bw", microbatches=a, steps=2)


@pytest.mark.parametrize(("stages", "a"), [(2, 1), (2, 2), (3, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_nadam_with_stashing(model: str, stages: int, a: int) -> None:
    compare(*by_both(model, stages, a, "nadam-stash", "nadam"))


def test_modes_differ_from_one_another() -> None:
    """Else the comparisons above would say little: at four stages no two modes train alike."""
    modes = [mode for mode in PLAIN if mode != "xpipe"]  # with a = 1 it is SpecTrain v2
    ends = [by_both("mlp", 4, 1, mode, "sgd")[0].losses[-1] for mode in modes]
    assert len(set(ends)) == len(modes)
