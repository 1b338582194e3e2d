"""Options that are set on a stream's optimizer: each update of each stage has its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import stream_programs
import torch
from hand_stages import batch, language
from ranks import Pool
from runtime_programs import bits
from stream_programs import SGD, make
from torch.optim import lr_scheduler

from fxpart.errors import FxpartError
from fxpart.runtime import Checkpoints, InProcess, Trainer

CUTS = {2: (2, 2), 3: (1, 1, 2), 4: (1, 1, 1, 1)}
STEPS = 9


def stream(stages: int = 4, optimizer: str = "sgd", **options: Any) -> Trainer:
    made = make(
        language(CUTS[stages], tied=stages == 4), InProcess(stages), optimizer,
        **{"weights": "stash", "microbatches": 1, **options},
    )  # fmt: skip
    assert made.is_asynchronous
    return made


def watched(trainer: Trainer, option: str = "lr") -> list[list[Any]]:
    """The option at each update, by stage."""
    found: list[list[Any]] = []
    for each in trainer.optimizers.by_place.values():
        mine: list[Any] = []
        found.append(mine)

        def hook(o: Any, a: Any, k: Any, mine: list[Any] = mine) -> None:
            mine.append(o.param_groups[0][option])

        each.register_step_pre_hook(hook)
    return found


def run(trainer: Trainer, after: Callable[[int], object] = lambda call: None) -> None:
    for call in range(STEPS):
        trainer.step(batch(seed=call))
        after(call)
    trainer.drain()


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda u: 1 / (u + 2)),
    "step": partial(lr_scheduler.StepLR, step_size=2, gamma=0.3),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=STEPS),
    "cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=3 * STEPS),
    "chained": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


def plain_options(schedule: Callable[[Any], Any], option: str) -> list[Any]:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(2))])
    scheduler, found = schedule(optimizer), []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0][option])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_in_a_loop_reaches_every_update(name: str, stages: int) -> None:
    """Update u of each stage has the options of the u-th step of plain PyTorch."""
    for option in ("lr", "momentum"):
        trainer = stream(stages)
        found = watched(trainer, option)
        assert trainer.optimizer is not None
        scheduler = SCHEDULES[name](trainer.optimizer)
        run(trainer, lambda call, scheduler=scheduler: scheduler.step())  # type: ignore[misc]
        assert found == [plain_options(SCHEDULES[name], option)] * stages


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stash", "naive", "pipeoptim", "spectrain-v2", "xpipe", "2bw-ef"])
@pytest.mark.parametrize("name", ["lambda", "cycle"])
def test_a_loop_is_the_scheduler_option(mode: str, name: str) -> None:
    """The same bits, also where weights are predicted: coming rates are those submitted."""
    count = 4 if mode == "2bw-ef" else 1
    own = stream(weights=mode, microbatches=count)
    assert own.optimizer is not None
    scheduler = SCHEDULES[name](own.optimizer)
    run(own, lambda call: scheduler.step())
    given = stream(weights=mode, microbatches=count, scheduler=SCHEDULES[name])
    run(given)
    assert bits(own.state_dict()) == bits(given.state_dict())
    constant = stream(weights=mode, microbatches=count)
    run(constant)
    assert bits(own.state_dict()) != bits(constant.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stash", "spectrain", "lookahead"])
@pytest.mark.parametrize("name", ["lambda", "cycle"])
def test_the_scheduler_of_fit_is_the_scheduler_option(mode: str, name: str, tmp_path: Path) -> None:
    """The same bits, also where predictions know its coming rates and the run was resumed."""
    data = [batch(seed=call) for call in range(STEPS)]
    given = stream(weights=mode, microbatches=1, scheduler=SCHEDULES[name])
    given.fit(data)
    expected = bits(given.state_dict())
    shown: list[tuple[float, ...]] = []
    whole = stream(weights=mode, microbatches=1)
    whole.fit(data, scheduler=SCHEDULES[name], callbacks=[lambda info: shown.append(info.lr)])
    assert bits(whole.state_dict()) == expected
    assert shown == [(rate,) for rate in plain_options(SCHEDULES[name], "lr")]
    for steps in (4, STEPS):
        part = stream(weights=mode, microbatches=1)
        kept = Checkpoints(tmp_path, every=2)
        part.fit(data, scheduler=SCHEDULES[name], steps=steps, checkpoints=kept)
    if mode != "spectrain":  # A save flushes the pipeline, which changes what later forwards miss.
        assert part.updates == STEPS
    assert part.optimizer is not None
    assert part.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]  # type: ignore[union-attr]
    with pytest.raises(FxpartError, match="has a scheduler already"):
        given.fit(data, scheduler=SCHEDULES[name])


class Failing(lr_scheduler.LRScheduler):
    """Raises in its third step, on one rank."""

    fails = True

    def get_lr(self) -> list[float]:
        if self.fails and self.last_epoch == 3:
            raise ValueError("no rate")
        return [group["lr"] for group in self.optimizer.param_groups]


def failed(where: str, every: str) -> list[str]:
    """The codes that this rank's run raises; the scheduler of rank 1 fails."""
    transport = stream_programs.connect(2, timeout=20.0)

    def schedule(optimizer: Any) -> Failing:
        Failing.fails = transport.local[-1] == 1
        return Failing(optimizer)

    hand = language(CUTS[2], tied=False)
    given = {"scheduler": schedule}
    trainer = make(
        hand, transport, weights="stash", microbatches=1, **(given if where == "trainer" else {})
    )
    data = [batch(seed=call) for call in range(2 if every == "epoch" else STEPS)]
    run = {**given, "scheduler_every": every} if where == "fit" else {}
    try:
        trainer.fit(data, epochs=6, **run)
    except FxpartError as failure:
        return [problem.code for problem in failure.problems]
    return []


@pytest.mark.slow
@pytest.mark.parametrize(("where", "every"), [("trainer", ""), ("fit", "step"), ("fit", "epoch")])
def test_a_scheduler_that_fails_on_one_rank_stops_all(where: str, every: str, pool: Pool) -> None:
    assert pool.run(failed, where, every) == [["FXP507"]] * 2


def test_fit_after_own_calls_and_two_schedulers() -> None:
    """Losses of minibatches that were in flight are not the run's; schedulers are not mixed."""
    made = partial(lr_scheduler.ExponentialLR, gamma=0.5)
    trainer = stream(microbatches=1, scheduler=made)
    for call in range(3):
        trainer.submit(batch(seed=call))
    found: list[int] = []
    trainer.fit(
        [batch(seed=call) for call in range(3, 6)], callbacks=[lambda i: found.append(i.step)]
    )
    assert found == [1, 2, 3] and trainer.updates == 6
    for every in ("step", "epoch"):
        with pytest.raises(FxpartError, match="has a scheduler already"):
            trainer.fit([batch()], scheduler=made, scheduler_every=every)


def test_schedulers_of_epochs_and_of_evaluations() -> None:
    """fit steps them itself, between two calls."""
    trainer = stream(microbatches=1)
    rates = watched(trainer)
    data = [batch(seed=call) for call in range(3)]
    made = partial(lr_scheduler.ExponentialLR, gamma=0.5)
    trainer.fit(data, epochs=3, scheduler=made, scheduler_every="epoch")
    assert rates == [[0.1 * 0.5**epoch for epoch in range(3) for _ in data]] * 4


@pytest.mark.parametrize("mode", ["lookahead", "spectrain"])
def test_predictions_beyond_what_is_submitted_follow_the_scheduler(mode: str) -> None:
    """A schedule that is known is looked through; of one in a loop the newest rates are taken."""
    states = []
    for given in (True, False):
        trainer = stream(weights=mode, **({"scheduler": SCHEDULES["cycle"]} if given else {}))
        assert trainer.optimizer is not None
        scheduler = None if given else SCHEDULES["cycle"](trainer.optimizer)
        rates = watched(trainer)
        run(trainer, lambda call, s=scheduler: s and s.step())  # type: ignore[misc]
        assert rates == [plain_options(SCHEDULES["cycle"], "lr")] * 4
        states.append(trainer.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], atol=0.05, rtol=0.05)


def test_options_set_by_hand_and_a_plateau() -> None:
    trainer = stream(optimizer="adamw")
    rates, betas = watched(trainer), watched(trainer, "betas")
    assert trainer.optimizer is not None
    group = trainer.optimizer.param_groups[0]
    plateau = lr_scheduler.ReduceLROnPlateau(trainer.optimizer, factor=0.5, patience=0)

    def after(call: int) -> None:
        if call == 2:
            group["betas"] = (0.5, 0.9)
        if call >= 4:
            plateau.step(1.0)

    first, before = group["lr"], group["betas"]
    run(trainer, after)
    halves = [0, 0, 0, 0, 0, 0, 1, 2, 3]
    assert rates == [[first * 0.5**n for n in halves]] * 4
    assert betas == [[before] * 3 + [(0.5, 0.9)] * 6] * 4


def test_a_rate_of_zero_in_the_middle_stops_every_stage() -> None:
    """The minibatches that were submitted before are applied; no later one is."""
    trainer, other = stream(), stream()
    for call in range(4):
        trainer.step(batch(seed=call))
        other.step(batch(seed=call))
    other.drain()
    assert trainer.optimizer is not None
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    for call in range(4, 8):
        trainer.step(batch(seed=call))
    after, before = trainer.state_dict(), other.state_dict()
    assert all(torch.equal(after[n], before[n]) for n in before if "norm" not in n)


def test_a_rate_in_a_tensor() -> None:
    """The stages' optimizers do not share the tensor, and each update has its value."""
    hand, transport = language(CUTS[2], tied=False), InProcess(2)
    optimizer = partial(torch.optim.SGD, lr=torch.tensor(0.1), foreach=False)
    made = Trainer(
        hand.spec(), dict(enumerate(hand.stages)), ranks=range(2), transport=transport,
        weights="stash", microbatches=1, optimizer=optimizer,
    )  # fmt: skip
    found = watched(made)
    assert made.optimizer is not None
    scheduler = lr_scheduler.ExponentialLR(made.optimizer, 0.5)
    run(made, lambda call: scheduler.step())
    expected = [0.1 * 0.5**n for n in range(STEPS)]
    for rates in found:
        assert torch.allclose(torch.stack(rates), torch.tensor(expected))


REFUSED: dict[str, Callable[[Any], object]] = {
    "step": lambda o: o.step(),
    "closure": lambda o: o.step(lambda: torch.zeros(())),
    "state_dict": lambda o: o.state_dict(),
    "load_state_dict": lambda o: o.load_state_dict({}),
    "add_param_group": lambda o: o.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_the_optimizer_cannot_do_is_refused(call: str) -> None:
    trainer = stream()
    with pytest.raises(FxpartError) as raised:
        REFUSED[call](trainer.optimizer)
    assert raised.value.code == "FXP115"


def test_clearing_gradients_between_calls_changes_nothing() -> None:
    a, b = stream(), stream()
    run(a)
    assert b.optimizer is not None
    run(b, lambda call: b.optimizer.zero_grad())  # type: ignore[union-attr]
    assert bits(a.state_dict()) == bits(b.state_dict())
    assert set(b.optimizer.state) == {p for o in b.optimizers.by_place.values() for p in o.state}


def test_step_hooks_look_and_do_not_touch() -> None:
    trainer, calls = stream(), []
    assert trainer.optimizer is not None
    trainer.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    handle = trainer.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    run(trainer)
    assert calls == ["before", "after"] * STEPS
    handle.remove()

    def halve(optimizer: Any, *_: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.mul_(0.5)

    trainer.optimizer.register_step_pre_hook(halve)
    with pytest.raises(FxpartError) as raised:
        run(trainer)
    assert raised.value.code == "FXP115"


def test_a_scheduler_that_needs_a_loss_is_refused() -> None:
    with pytest.raises(FxpartError) as raised:
        stream(scheduler=lr_scheduler.ReduceLROnPlateau)
    assert raised.value.code == "FXP115"
    with pytest.raises(FxpartError) as raised:
        stream(scheduler=lambda optimizer: optimizer.no_such_name)
    assert raised.value.code == "FXP507"


def test_steps_of_a_run_have_the_rates_of_their_updates() -> None:
    found: list[Any] = []
    trainer = stream(scheduler=SCHEDULES["step"])
    trainer.fit([batch(seed=s) for s in range(STEPS)], callbacks=[lambda i: found.append(i.lr)])
    assert [lr for (lr,) in found] == plain_options(SCHEDULES["step"], "lr")


def differing(here: bool) -> dict[str, Any]:
    """The rate is changed on rank 0 alone."""
    transport = InProcess(2) if here else stream_programs.connect(2)
    hand = language(CUTS[2], tied=False)
    trainer = make(hand, transport, weights="stash", microbatches=1)
    assert trainer.optimizer is not None
    for call in range(12):
        try:
            trainer.step(batch(seed=call))
        except FxpartError as failure:
            return {"call": call, "code": failure.code}
        if call == 3 and transport.local[0] == 0:
            trainer.optimizer.param_groups[0]["lr"] = 0.01
    return {}


@pytest.mark.slow
def test_other_options_on_another_rank_are_refused(pool: Pool) -> None:
    found = pool.run(differing, False, ranks=2)
    assert found[0] == found[1] == {"call": 4 + 2, "code": "FXP115"}


def looped(here: bool) -> Any:
    """Bits of training with a scheduler in a loop."""
    transport = InProcess(4) if here else stream_programs.connect(4)
    trainer = make(language(CUTS[4], tied=True), transport, weights="spectrain", microbatches=2)
    assert trainer.optimizer is not None
    scheduler = SCHEDULES["cycle"](trainer.optimizer)
    for call in range(7):
        trainer.step(batch(seed=call))
        scheduler.step()
    return bits(trainer.state_dict())


@pytest.mark.slow
def test_a_loop_on_ranks_has_the_bits_of_one_process(pool: Pool) -> None:
    assert pool.run(looped, False, ranks=4) == [looped(True)] * 4
