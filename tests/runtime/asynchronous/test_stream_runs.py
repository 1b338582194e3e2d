"""Streams that do not drain: every mode, counters, drains, warm-up, guard, other batches."""

from __future__ import annotations

from typing import Any

import hand_lanes
import hand_stages
import pytest
import torch
from hand_stages import batch, language
from runtime_programs import bits
from stream_programs import losses_of, make

from fxpart.errors import FxpartError
from fxpart.runtime import InProcess, Trainer
from fxpart.runtime.asynchronous.stage_report import describe_inaccurate_predictions
from fxpart.schedule.weight_modes import MODES

CUTS = {2: (2, 2), 3: (1, 1, 2), 4: (1, 1, 1, 1)}


def stream(stages: int = 4, optimizer: str = "sgd", **options: Any) -> Trainer:
    hand = language(CUTS[stages], tied=stages == 4)
    made = make(hand, InProcess(stages), optimizer, **{"weights": "stash", **options})
    assert made.is_asynchronous
    return made


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_reads_what_its_schedule_says(mode: str, stages: int) -> None:
    """Counters are compared with the schedule at every action; here they are looked at."""
    many = MODES[mode].base == "delayed"
    optimizer = "nadam" if mode == "nadam-stash" else "adamw"
    made = stream(stages, optimizer, weights=mode, microbatches=stages if many else 1)
    losses = [made.step(batch(seed=seed)) for seed in range(7)]
    lag = made.lag
    assert [loss is None for loss in losses] == [True] * lag + [False] * (7 - lag)
    if not MODES[mode].flush:
        for stage, found in made.pipeline.counters.items():
            ahead = stages - stage
            assert found.forwards == 7 * made.microbatches
            assert found.backwards == found.forwards - ahead + 1
            assert found.updates == found.backwards // made.microbatches
            assert max(u.backward - u.forward for u in found.recent) == made.staleness[stage]
    assert len(made.drain()) == lag
    assert made.updates == 7


def test_staleness_of_a_chain() -> None:
    """K - 1 - k with one microbatch to an update, by what the stages themselves have counted."""
    made = stream(microbatches=1)
    for seed in range(8):
        made.step(batch(seed=seed))
    last = {k: counters.recent[-1] for k, counters in made.pipeline.counters.items()}
    found = {k: update.backward - update.forward for k, update in last.items()}
    assert found == {0: 3, 1: 2, 2: 1, 3: 0}
    assert made.staleness == (3, 2, 1, 0)


def test_it_differs_from_synchronous_training_and_comes_close() -> None:
    """Same batches: other numbers, and the loss falls as well."""
    steps = [batch(seed=seed % 4) for seed in range(40)]
    falls = {}
    for mode in ("flush", "stash"):
        trainer = stream(optimizer="sgd", weights=mode, microbatches=1)
        losses = losses_of(trainer, steps)
        falls[mode] = [torch.frombuffer(bytearray(x), dtype=torch.float32).item() for x in losses]
    assert falls["flush"] != falls["stash"]
    assert all(sum(f[-4:]) / 4 < sum(f[:4]) / 4 for f in falls.values())


@pytest.mark.parametrize("mode", ["stash", "spectrain", "naive"])
def test_a_drained_stream_goes_on(mode: str) -> None:
    """A drain in the middle is no part of the numbers of what came before it."""
    whole, parted = stream(weights=mode), stream(weights=mode)
    first = [batch(seed=seed) for seed in range(5)]
    a = losses_of(whole, first)
    b = losses_of(parted, first)
    assert a == b and bits(whole.state_dict()) == bits(parted.state_dict())
    more = losses_of(parted, first)
    assert len(more) == 5
    assert parted.updates == 10


def test_evaluation_in_a_stream_drains_it() -> None:
    hand = language((1, 1, 1, 1))
    trainer = make(
        hand,
        InProcess(4),
        weights="spectrain",
        evaluation=lambda: (hand.spec(), dict(enumerate(hand.stages))),
    )
    assert trainer.is_asynchronous
    for seed in range(5):
        trainer.step(batch(seed=seed))
    assert trainer.in_flight
    for stage in hand.stages:
        stage.eval()
    found = trainer.eval_step(batch())
    assert not trainer.in_flight and trainer.updates == 5
    again = make(
        language((1, 1, 1, 1)),
        InProcess(4),
        weights="spectrain",
    )
    again.load_state_dict(trainer.state_dict())
    whole = hand_stages.Whole(language((1, 1, 1, 1)), hand_stages.ADAMW)
    with torch.no_grad():
        for name, value in trainer.state_dict().items():
            if name in whole.named:
                whole.named[name].copy_(value)
        for stage in whole.stages:
            stage.eval()
            for attribute, name in stage.names.items():
                if name not in whole.named:
                    getattr(stage, attribute).copy_(trainer.state_dict()[name])
        expected = whole.run(batch(), 0)["loss"]
    torch.testing.assert_close(found, expected)


def test_a_smaller_batch_in_the_middle() -> None:
    """It is drained before and behind; every batch is one update."""
    trainer = stream(weights="stash", microbatches=4)
    steps = [batch(8, 5, 0), batch(8, 5, 1), batch(3, 5, 2), batch(8, 5, 3), batch(8, 4, 4)]
    assert len(losses_of(trainer, steps)) == 5
    assert trainer.updates == 5


@pytest.mark.filterwarnings("ignore:gradients of the minibatch")
def test_gradients_that_are_not_finite() -> None:
    """The update counts and changes nothing, and the pipeline drains from then on."""
    hand = language((1, 1, 1, 1))
    trainer = make(hand, InProcess(4), weights="stash", microbatches=1)
    assert trainer.is_asynchronous
    reported: list[str] = []
    trainer.pipeline.listeners.append(reported.append)
    inner, count = hand.stages[1].forward, 0

    def forward(key: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal count
        count += 1
        return tuple(o * (float("nan") if count == 3 else 1.0) for o in inner(key, *inputs))

    hand.stages[1].forward = forward  # type: ignore[method-assign]
    losses = losses_of(trainer, [batch(seed=seed) for seed in range(12)])
    assert len(losses) == 12
    assert trainer.pipeline.always_flush and trainer.lag == 0 and len(reported) == 1
    assert trainer.updates == 12
    assert all(torch.isfinite(p).all() for stage in hand.stages for p in stage.parameters())
    reports = trainer.report()
    assert [r.updates for r in reports] == [12] * 4
    assert [r.skipped for r in reports] == [1, 1, 1, 0]  # the last has borrowed weights only


def test_without_a_guard_it_goes_on() -> None:
    hand = language((2, 2), tied=False)
    trainer = make(hand, InProcess(2), weights="stash", guard=False)
    with torch.no_grad():
        next(hand.stages[0].parameters()).fill_(float("nan"))
    assert len(losses_of(trainer, [batch(seed=s) for s in range(4)])) == 4
    assert not trainer.pipeline.always_flush  # type: ignore[union-attr]


@pytest.mark.parametrize("clip", ["stage", "delayed"])
def test_clipping_bounds_each_stage(clip: str) -> None:
    """With SGD without momentum no step is longer than lr times the bound of the stage."""
    hand = language((1, 1, 1, 1), tied=False)
    trainer = Trainer(
        hand.spec(), dict(enumerate(hand.stages)), ranks=range(4), transport=InProcess(4),
        microbatches=1, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), weights="stash",
        clip_norm=0.01, clip=clip,
    )  # fmt: skip
    sizes = [sum(p.numel() for p in stage.parameters()) for stage in hand.stages]
    for seed in range(10):
        before = [[p.detach().clone() for p in s.parameters()] for s in hand.stages]
        trainer.step(batch(seed=seed))
        for old, stage, size in zip(before, hand.stages, sizes, strict=True):
            moved = [(p - o).flatten() for p, o in zip(stage.parameters(), old, strict=True)]
            bound = 0.01 * (size / sum(sizes)) ** 0.5
            norm = torch.cat(moved).norm().item()
            if clip == "stage":
                assert norm <= bound * 1.01
            else:  # by the norm of an earlier minibatch, which is about as large
                assert norm <= 0.05
    assert trainer.last_grad_norm is not None and trainer.last_grad_norm > 0.01


def test_schedulers_follow_their_own_updates() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    trainer = stream(scheduler=schedule, microbatches=1)
    for seed in range(6):
        trainer.step(batch(seed=seed))
    rates = [each.param_groups[0]["lr"] for each in trainer.optimizers.by_place.values()]
    assert rates == [0.1 * 0.5**n for n in (3, 4, 5, 6)]


def test_lanes_have_one_version() -> None:
    """Two mesh ranks, two stages, no drain: copies of a parameter stay equal in every bit."""
    made = hand_lanes.data_parallel(
        lambda: language((1, 1, 1, 1), dropout=0.0), 2, 0, weights="spectrain", microbatches=2
    )
    assert len(losses_of(made, [batch(seed=s) for s in range(6)])) == 6
    for name, entry in made.parts.state.entries.items():
        if entry.trainable:
            found = {t.detach().numpy().tobytes() for t in entry.owned().values()}
            assert len(found) == 1, name
    made.close()


def test_what_a_stream_refuses() -> None:
    trainer = stream()
    refused: list[Any] = [
        lambda: trainer.step(batch(), accumulate=True), trainer.gradients, trainer.record,
        lambda: trainer.fit([batch()], accumulate=2),
        lambda: trainer.fit([batch()], nonfinite="stop"),
        lambda: stream(clip="global"), lambda: stream(warm_up=-1), lambda: stream(weights="none"),
        lambda: stream(weights="naive", compile_stages=True),
    ]  # fmt: skip
    for call in refused:
        with pytest.raises(FxpartError, match="FXP109"):
            call()
    hand = language((1, 1, 1, 1))
    with pytest.raises(FxpartError, match="several stages per rank"):
        Trainer(
            hand.spec(), dict(enumerate(hand.stages)), ranks=[0, 1, 0, 1], transport=InProcess(2),
            microbatches=1, optimizer=hand_stages.ADAMW, weights="stash",
        )  # fmt: skip


def test_closing_finishes_what_is_in_flight() -> None:
    made = stream(microbatches=1)
    for seed in range(5):
        made.step(batch(seed=seed))
    assert made.updates < 5 and made.in_flight
    made.close()
    assert made.updates == 5 and not made.in_flight


def test_predictions_that_look_too_far_are_named() -> None:
    assert describe_inaccurate_predictions([None, 0.9, 0.999]) == ""
    assert "to the stale ones on stage 1:" in describe_inaccurate_predictions([None, 1.0, 0.9])
    assert "on stage 1 (1.20), 3 (2.00):" in describe_inaccurate_predictions([0.2, 1.2, None, 2.0])
