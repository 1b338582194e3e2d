"""The emulator beside its modes: runs, evaluations, schedulers, deep pipelines, and their ends."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import fields
from functools import cache, partial
from typing import Any

import asynchronous_models as models
import asynchronous_reference as reference
import hand_optimizers as hand
import pytest
import torch
from torch import nn
from torch.nn import functional

from fxpart.emulator import Emulator
from fxpart.errors import FxpartError
from fxpart.runtime.trainer_options import ASYNCHRONOUS_OPTIONS, TrainerOptions
from fxpart.schedule.versions import WeightVersionCounters, count_chain_warmup
from fxpart.schedule.weight_copies import count_weight_copies
from fxpart.schedule.weight_modes import MODES, SPECTRAIN

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
BATCHES = models.mlp_batches(12, 4)


@cache
def made(stages: int = 4, blocks: int = 4, kind: str = "plain") -> tuple[Emulator, nn.Module]:
    """An emulator and its module, compiled once."""
    torch.manual_seed(0)
    module = models.mlp(blocks)
    if kind == "dropout":
        module = nn.Sequential(
            *(m for layer in module.children() for m in (layer, nn.Dropout(0.1)))
        )
    elif kind == "norm":
        module = nn.Sequential(nn.BatchNorm1d(6), *module.children())
    emulator = Emulator(
        module, stages=stages, loss=functional.cross_entropy, example_inputs=BATCHES[0]
    )
    return emulator, module


def stage_of(emulator: Emulator) -> dict[str, int]:
    """The stage of each parameter."""
    stages = emulator.program.spec.stages
    return {s.name: g.index for g in stages for s in g.state if s.kind == "parameter"}


def by_hand(
    emulator: Emulator, module: nn.Module, mode: str, steps: int, optimizer: hand.Hand
) -> reference.Reference:
    """The reference after so many updates."""
    weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    run = reference.Reference(
        models.HandMlp(list(weights)), stage_of(emulator), emulator.stages, 1, mode, optimizer
    )
    run.train(weights, BATCHES[:steps])
    return run


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A rate that is 10 % less after each update."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["spectrain", "stash", "xpipe", "lookahead"])
def test_predictions_look_through_the_rates_to_come(mode: str) -> None:
    emulator, module = made()
    run = emulator.run(BATCHES, weights=mode, optimizer=SGD, steps=10, scheduler=falling)
    known = by_hand(emulator, module, mode, 10, hand.HandSgd(lambda u: 0.05 * 0.9**u))
    for stage in known.kept:
        for name, weight in stage.versions[-1].weights.items():
            torch.testing.assert_close(run.state_dict[name], weight, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "stash", "spectrain", "naive"])
def test_evaluations_see_each_stage_after_as_many_updates_and_change_nothing(mode: str) -> None:
    emulator, module = made()
    seen: list[dict[str, torch.Tensor]] = []

    def value(state: dict[str, torch.Tensor]) -> float:
        seen.append({name: tensor.clone() for name, tensor in state.items()})
        return float(len(seen))

    run = emulator.run(BATCHES, weights=mode, optimizer=SGD, steps=11, evaluate=value, every=3)
    plain = emulator.run(BATCHES, weights=mode, optimizer=SGD, steps=11)
    assert run.losses == plain.losses
    assert run.evaluations == ((3, 1.0), (6, 2.0), (9, 3.0), (11, 4.0))
    name = "flush" if mode == "sync" else mode
    known = by_hand(emulator, module, name, 11, hand.HandSgd(lambda _: 0.05))
    for (updates, _), state in zip(run.evaluations, seen, strict=True):
        for stage in known.kept:
            for parameter, weight in stage.versions[updates].weights.items():
                assert torch.equal(state[parameter], weight), (updates, parameter)
        module.load_state_dict(state)  # whole, and by the module's own names
    module.load_state_dict(dict(emulator.run(BATCHES, steps=1).state_dict))
    made.cache_clear()


@pytest.mark.slow
def test_sync_is_training_in_one_process_and_runs_begin_anew() -> None:
    emulator, module = made()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    runs = [emulator.run(BATCHES, weights=w, optimizer=SGD, steps=8) for w in ("sync", "flush")]
    emulator.run(BATCHES, weights="naive", optimizer=SGD, steps=8)
    runs.append(emulator.run(BATCHES, weights="sync", optimizer=SGD, steps=8))
    assert [run.weights for run in runs] == ["sync", "flush", "sync"]
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())
    optimizer = SGD(module.parameters())
    for step, (x, y) in enumerate(BATCHES[:8]):
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        assert all(run.losses[step] == pytest.approx(loss.item(), rel=1e-6) for run in runs)
    assert runs[0].losses == runs[1].losses == runs[2].losses
    assert runs[0].staleness == (0, 0, 0, 0)
    made.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 7, 32])
def test_deep_pipelines(stages: int) -> None:
    emulator, module = made(stages, 31)
    assert emulator.program.plan.world == stages
    steps = 10
    run = emulator.run(BATCHES, weights="pipeoptim", optimizer=SGD, steps=steps)
    known = by_hand(emulator, module, "pipeoptim", steps, hand.HandSgd(lambda _: 0.05))
    for stage in known.kept:
        assert stage.names, "every stage has weights"
        for name, weight in stage.versions[-1].weights.items():
            assert torch.equal(run.state_dict[name], weight)
    assert run.staleness == tuple(stages - 1 - k for k in range(stages))


@pytest.mark.slow
def test_stages_are_even_and_too_many_are_refused() -> None:
    emulator, _ = made(4, 31)
    sizes = [len(stage.state) for stage in emulator.program.spec.stages]
    assert max(sizes) - min(sizes) <= 2 * 2
    for stages, code, words in ((6, "FXP201", "at most 5"), (33, "FXP109", "1 to 32")):
        with pytest.raises(FxpartError, match=words) as refused:
            Emulator(
                models.mlp(4), stages=stages, loss=functional.cross_entropy,
                example_inputs=BATCHES[0],
            )  # fmt: skip
        assert refused.value.code == code


@pytest.mark.slow
def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(FxpartError, match="FXP106"):
        Emulator(models.mlp(3), stages=2, example_inputs=BATCHES[0][:1])


@pytest.mark.slow
@pytest.mark.parametrize("mode", [m for m in MODES if MODES[m].base != "delayed"])
def test_copies_of_weights_are_those_of_the_schedule(mode: str) -> None:
    emulator, _ = made()
    run = emulator.run(BATCHES, weights=mode, optimizer=SGD, steps=10)
    versions = WeightVersionCounters(count_chain_warmup(4), 1)
    known = [count_weight_copies(MODES[mode], versions, stage) for stage in range(4)]
    if not MODES[mode].flush:
        assert run.copies == tuple(each.kept + each.transient for each in known)
    else:
        assert max(run.copies) == (2 if MODES[mode].predicts else 1)


@pytest.mark.slow
def test_rho_compares_a_prediction_with_none() -> None:
    emulator, _ = made()
    watched = emulator.run(BATCHES, optimizer=SGD, steps=10, watch=1)
    plain = emulator.run(BATCHES, optimizer=SGD, steps=10)
    assert watched.losses == plain.losses
    assert all(rho is not None and rho > 0 for rho in watched.rho[:3])
    assert watched.rho[3] is None, "the last stage misses no update"
    assert plain.rho == (None,) * 4


@pytest.mark.slow
def test_a_run_that_diverges_ends_and_says_where() -> None:
    emulator, _ = made()

    def bad() -> list[Any]:
        x, y = BATCHES[4]
        return [*BATCHES[:4], (x * math.inf, y), *BATCHES[5:]]

    run = emulator.run(bad, weights="stash", optimizer=SGD, steps=12)
    assert run.diverged == 5 == len(run.losses)
    assert math.isinf(run.final())
    assert run.to_dict()["final_loss"] is None
    json.dumps(run.to_dict(), allow_nan=False)


@pytest.mark.slow
def test_dropout_draws_by_the_seed_and_batch_statistics_are_kept() -> None:
    emulator, _ = made(3, 4, "dropout")
    runs = [emulator.run(BATCHES, optimizer=SGD, steps=6, seed=seed) for seed in (1, 1, 2)]
    assert runs[0].losses == runs[1].losses != runs[2].losses
    emulator, module = made(3, 4, "norm")
    run = emulator.run(BATCHES, weights="spectrain", optimizer=SGD, steps=6)
    assert run.state_dict["0.num_batches_tracked"] == 6
    module.load_state_dict(dict(run.state_dict))


def test_batches_are_gone_through_again_and_an_iterator_once() -> None:
    emulator, _ = made()
    few = BATCHES[:3]
    lengths = [
        len(emulator.run(given, optimizer=SGD, steps=steps).losses)
        for given, steps in ((few, 7), (lambda: iter(few), 7), (iter(few), 7), (few, None))
    ]
    assert lengths == [7, 7, 3, 3]
    with pytest.raises(FxpartError, match="no batches"):
        emulator.run([], steps=2)
    with pytest.raises(FxpartError, match="steps"):
        emulator.run(few, steps=0)


def test_evaluations_of_a_run_as_long_as_its_batches() -> None:
    emulator, _ = made()
    run = emulator.run(BATCHES[:6], optimizer=SGD, steps=None, evaluate=lambda state: 0.0, every=3)
    assert run.evaluations == ((3, 0.0), (6, 0.0))


def test_other_first_weights_and_progress() -> None:
    emulator, _ = made()
    torch.manual_seed(9)
    other = models.mlp(4)
    told: list[tuple[int, float]] = []
    run = emulator.run(
        BATCHES, weights="sync", optimizer=SGD, steps=3, initial=other.state_dict(),
        progress=lambda update, loss: told.append((update, loss)),
    )  # fmt: skip
    x, y = BATCHES[0]
    assert run.losses[0] == pytest.approx(functional.cross_entropy(other(x), y).item(), rel=1e-6)
    assert told == list(enumerate(run.losses, 1))


@pytest.mark.slow
def test_defaults_are_the_trainers() -> None:
    """The mode, what an asynchronous trainer takes, and the optimizer that a mode prescribes."""
    given = inspect.signature(Emulator.run).parameters
    assert given["weights"].default == SPECTRAIN
    for option in fields(TrainerOptions):
        if option.name in given and option.name in ASYNCHRONOUS_OPTIONS:
            assert given[option.name].default == option.default, option.name
    emulator, _ = made(2)
    nadam = partial(torch.optim.NAdam, betas=(0.99, 0.999))
    for mode, optimizer in (("nadam-stash", nadam), ("stash", torch.optim.AdamW)):
        expected = emulator.run(BATCHES, mode, optimizer, 6, guard=True).state_dict
        found = emulator.run(BATCHES, mode, steps=6).state_dict
        trainer = emulator.program.trainer(weight_mode=mode)
        for each in BATCHES[:6]:
            trainer.step(each)
        trained = trainer.state_dict()
        trainer.close()
        assert all(
            torch.equal(found[n], w) and torch.equal(trained[n], w) for n, w in expected.items()
        )
