"""What a stream cannot honor is refused or warned of with a code; what it can, holds."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from hand_stages import batch, language
from runtime_programs import bits
from stream_programs import make

from fxpart.errors import FxpartError
from fxpart.runtime import InProcess, Trainer
from fxpart.runtime.trainer_options import TrainerOptions
from fxpart.schedule.weight_modes import MODES

CUTS = {1: (4,), 2: (2, 2), 3: (1, 1, 2), 4: (1, 1, 1, 1)}
FLYING = [name for name, mode in MODES.items() if not mode.flush]


def stream(stages: int = 4, given: Any = None, **options: Any) -> Trainer:
    hand = language(CUTS[stages], tied=stages == 4)
    more = {"weights": "stash", "microbatches": 1, **options}
    if given is None:
        made = make(hand, InProcess(stages), "sgd", **more)
        assert made.is_asynchronous
        return made
    return Trainer(
        hand.spec(), dict(enumerate(hand.stages)), ranks=range(stages), transport=InProcess(stages),
        optimizer=given, **more,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("mode", FLYING)
def test_recomputed_activations_change_no_bit(mode: str, recompute: str) -> None:
    """With ties, dropout and batch statistics, whatever weights a backward reads."""
    states = []
    for how in ("none", recompute):
        count = 4 if MODES[mode].base == "delayed" else 1
        trainer = stream(weights=mode, microbatches=count, recompute=how)
        for seed in range(9):
            trainer.step(batch(seed=seed))
        states.append(bits(trainer.state_dict()))
    assert states[0] == states[1]


def rates_of_first(trainer: Trainer) -> list[float]:
    found: list[float] = []
    assert trainer.optimizer is not None
    trainer.optimizer.register_step_pre_hook(lambda o, a, k: found.append(o.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize(
    ("count", "run"),
    [(12, {}), (12, {"steps": 10}), (4, {"epochs": 3}), (5, {"epochs": 9, "steps": 7})],
)
def test_a_run_gives_pipemare_its_length(count: int, run: dict[str, Any]) -> None:
    """The discount goes away by the last update of the run."""
    trainer = stream(weights="pipemare")
    rates = rates_of_first(trainer)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        done = trainer.fit([batch(seed=s) for s in range(count)], **run)
    assert not [w for w in found if "FXP" in str(w.message)]
    assert rates[0] == pytest.approx(0.1 / 3) and rates == sorted(rates)
    total = done.steps
    assert rates[-1] == pytest.approx(0.1 / 3 ** (1 - (total - 1) / total))


def test_a_second_run_and_a_known_length() -> None:
    trainer = stream(weights="pipemare", total_updates=3)
    rates = rates_of_first(trainer)
    trainer.fit([batch(seed=s) for s in range(5)])
    assert rates[3:] == [0.1, 0.1]
    other = stream(weights="pipemare")
    rates = rates_of_first(other)
    for _ in range(2):
        other.fit([batch(seed=s) for s in range(4)])
    assert rates[4] >= rates[3] and rates[-1] == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize("how", ["loop", "generator", "function"])
def test_a_run_of_unknown_length_warns_once(how: str) -> None:
    trainer = stream(weights="pipemare")
    batches = [batch(seed=s) for s in range(3)]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if how == "loop":
            for each in batches:
                trainer.step(each)
        else:
            trainer.fit(iter(batches) if how == "generator" else lambda: iter(batches))
    assert len([w for w in found if "FXP109" in str(w.message)]) == 1


@pytest.mark.parametrize("stages", [1, 2])
def test_without_a_discount_nothing_is_said(stages: int) -> None:
    """Staleness 1 divides the rate by 1."""
    trainer = stream(stages, weights="pipemare")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.step(batch())


def test_an_optimizer_whose_step_needs_the_loss() -> None:
    with pytest.raises(FxpartError) as raised:
        stream(4, torch.optim.LBFGS)
    assert raised.value.code == "FXP115"


@pytest.mark.parametrize(
    "options",
    [
        {"warm_up": "x"}, {"warm_up": 1.5}, {"watch": None}, {"total_updates": -1},
        {"total_updates": "all"}, {"guard": "yes"}, {"clip": "global"}, {"scheduler": 3},
        {"weights": ["stash"]}, {"recompute": "half"},
    ],
)  # fmt: skip
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(FxpartError) as raised:
        stream(**options)
    assert raised.value.code == "FXP109"


def test_weights_are_read_and_written_between_streams_only() -> None:
    trainer = stream()
    for seed in range(4):
        trainer.step(batch(seed=seed))
    assert trainer.optimizer is not None
    (group,) = trainer.optimizer.param_groups
    for read in (lambda: group["params"], lambda: list(group.get("params"))):
        with pytest.raises(FxpartError) as raised:
            read()
        assert raised.value.code == "FXP115"
    trainer.drain()
    with torch.no_grad():
        for p in group["params"]:
            p.data.mul_(0.0)
    state = trainer.state_dict()
    trained = {n for n, e in trainer.parts.state.entries.items() if e.trainable}
    assert all(not state[name].any() for name in trained)
    for hand in trainer.parts.mesh_ranks[
        0
    ].modules.values():  # holders of shared parameters have them too
        assert not any(p.any() for p in hand.parameters())
    for seed in range(3):
        trainer.step(batch(seed=seed))
    assert len(trainer.drain()) == 3


@pytest.mark.parametrize("rows", [(8, 1), (8, 3, 8), (1, 1), (5, 8, 2, 8)])
def test_smaller_batches_are_updates_like_others(rows: tuple[int, ...]) -> None:
    """A batch of another size ends the stream; one of fewer rows has fewer microbatches."""
    trainer = stream(2, microbatches=2, weights="stash")
    for seed, count in enumerate(rows):
        trainer.step(batch(count, seed=seed))
    trainer.drain()
    assert trainer.updates == len(rows)
    flushed = stream(2, microbatches=2, weights="stash")
    for seed, count in enumerate(rows):
        flushed.step(batch(count, seed=seed))
        if seed + 1 < len(rows) and rows[seed + 1] != count:
            flushed.drain()
    assert bits(flushed.state_dict()) == bits(trainer.state_dict())


def test_gradients_are_not_accumulated() -> None:
    trainer = stream()
    for call in (
        lambda: trainer.step(batch(), accumulate=True),
        lambda: trainer.fit([batch()], accumulate=2),
        trainer.gradients,
    ):
        with pytest.raises(FxpartError) as raised:
            call()
        assert raised.value.code == "FXP109"


@pytest.mark.slow
def test_own_optimizers_of_a_pipeline_are_predicted() -> None:
    """A subclass and a partial of it as their base; one with another step otherwise."""

    class Renamed(torch.optim.SGD):
        pass

    class Halved(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None if p.grad is None else p.grad / 2
            return super().step(closure)

    def run(kind: Any, mode: str) -> Any:
        trainer = stream(2, partial(kind, lr=0.05), weights=mode)
        for seed in range(8):
            trainer.step(batch(seed=seed))
        return bits(trainer.state_dict())

    for mode in ("spectrain", "pipeoptim", "spectrain-v2"):
        assert run(Renamed, mode) == run(torch.optim.SGD, mode)
    assert run(Halved, "pipeoptim") != run(Halved, "naive")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"clip_norm": "1"}, "it is not a number"),
        ({"ema": "x"}, "it is not a number"),
        ({"gather_ahead": True}, "it is not a number"),
        ({"patience": "long", "routing": "queue"}, "it is not a number"),
        ({"routing": "any"}, "routing='any' is unknown"),
        ({"staleness": 2}, "does not support staleness="),
        ({"guard": False}, "does not support guard="),
        ({"weights": "stash", "staleness": 1}, "does not support staleness="),
        ({"routing": "queue", "watch": 2}, "does not support watch="),
        ({"routing": "queue", "staleness": -1}, "integers of at least 0"),
    ],
)
def test_options_of_another_kind_or_type(given: dict[str, Any], why: str) -> None:
    with pytest.raises(FxpartError, match=why) as caught:
        TrainerOptions.of({"microbatches": 2, **given})
    assert caught.value.code == "FXP109"


def test_kinds_differ_in_what_ranks_compare() -> None:
    texts = {
        TrainerOptions.of({"microbatches": 2, **given}).describe()
        for given in ({}, {"weights": "flush"}, {"weights": "stash"}, {"routing": "queue"})
    }
    assert len(texts) == 4


def test_nonfinite_gradients_that_nobody_skips() -> None:
    trainer = stream(guard=False)
    with pytest.raises(FxpartError, match="no stage skips non-finite gradients"):
        trainer.fit([batch()], nonfinite="skip")
