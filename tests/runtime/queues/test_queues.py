"""Copies that take microbatches from queues, in one process: one process's numbers, any death."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from queued_batches import ROWS, adagrad, batch
from queued_programs import alone, model, plan, program, sgd, touched, trainer
from torch import nn

from fxpart.errors import FxpartError

pytestmark = pytest.mark.slow


def steps(made: Any, lose: dict[int, int] | None = None) -> list[float]:
    """All steps; lose: before which of them which copy ends."""
    losses = []
    for step, rows in enumerate(ROWS):
        if lose and step in lose:
            made.pipeline.lose(lose[step])
        loss = made.step(batch(rows, step))
        losses += [] if loss is None else [float(loss)]
    return losses + [float(loss) for loss in made.drain()]


def check(made: Any, losses: list[float]) -> None:
    """The numbers of one process."""
    wanted, state = alone()
    assert losses == pytest.approx(wanted, rel=1e-6)
    found = made.state_dict()
    assert found.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert touched(found) == touched(state)


@pytest.mark.parametrize("counts", [(2, 1), (1, 2), (2, 2), (1, 2, 1)])
def test_the_numbers_of_one_process(counts: tuple[int, ...]) -> None:
    made = trainer(plan(counts))
    check(made, steps(made))
    report = made.report()
    assert [each.staleness for each in report] == [0] * sum(counts)
    taken = sum(each.microbatches for each in report if each.stage < counts[0])
    assert taken == sum(min(4, rows) for rows in ROWS)
    made.close()


@pytest.mark.parametrize(
    ("counts", "lose"),
    [
        ((2, 1), {1: 0}),
        ((2, 1), {3: 1}),
        ((1, 2), {2: 1}),
        ((2, 2), {1: 0, 3: 3}),
        ((3, 1), {1: 1, 2: 0}),
    ],
)
def test_a_copy_that_ends_is_missed_by_nobody(
    counts: tuple[int, ...], lose: dict[int, int]
) -> None:
    """Between two steps; in the midst of one, see below."""
    made = trainer(plan(counts))
    check(made, steps(made, lose))
    assert made.pipeline.lost == tuple(lose.values())
    x, ids, y = batch(10, 9)
    net = model()
    net.load_state_dict(alone()[1])
    wanted = nn.functional.cross_entropy(net(x, ids), y).item()
    assert float(made.eval_step((x, ids, y))) == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(made.predict((x, ids)), net(x, ids), rtol=1e-4, atol=1e-5)
    made.close()


@pytest.mark.parametrize("after", range(1, 16, 2))
@pytest.mark.parametrize("copy", [0, 3])
def test_a_copy_that_ends_in_the_midst(after: int, copy: int) -> None:
    """After so many computations of the second step."""
    made = trainer(plan((2, 2)))
    found = [float(made.step(batch(ROWS[0], 0)))]
    turns = 0
    for worker in made.pipeline._workers.values():

        def turn(worker: Any = worker, own: Any = worker.turn) -> bool:
            nonlocal turns
            turns += 1
            if turns == after:
                made.pipeline.lose(copy)
            return bool(own()) if worker.copy in made.pipeline._workers else False

        worker.turn = turn
    for step, rows in enumerate(ROWS[1:], 1):
        found.append(float(made.step(batch(rows, step))))
    check(made, found)
    assert made.pipeline.lost == (copy,)
    made.close()


@pytest.mark.parametrize("weights", ["stash", "naive", "spectrain-v2", "pipeoptim"])
def test_staleness_keeps_to_its_bound(weights: str) -> None:
    made = trainer(plan((2, 1)), sgd, staleness=2, weight_mode=weights)
    losses = steps(made)
    assert len(losses) == len(ROWS) and made.updates == len(ROWS)
    report = made.report()
    assert 1 <= max(each.staleness for each in report) <= 2
    assert all(each.copies <= 4 for each in report)
    wanted, _ = alone()
    assert losses[0] == pytest.approx(wanted[0], rel=1e-6)
    made.close()


@pytest.mark.parametrize("counts", [(2, 1), (1, 2), (2, 1, 2)])
def test_stale_gradients_are_those_of_the_weights_that_were_read(counts: tuple[int, ...]) -> None:
    """With stash: computed anew with each stage's weights of the version that its forward read."""
    made = trainer(plan(counts), sgd, staleness=2)
    read: dict[tuple[int, int, int], int] = {}  # (group, minibatch, microbatch): version
    for worker in made.pipeline._workers.values():

        def forward(
            number: int, microbatch: int, worker: Any = worker, own: Any = worker._run_forward
        ) -> Any:
            read[worker._group, number, microbatch] = worker.weights.updates
            return own(number, microbatch)

        worker._run_forward = forward
    losses = steps(made)
    found = made.state_dict()
    assert any(version < key[1] for key, version in read.items()), "some are stale"
    firsts = [sum(counts[:g]) for g in range(len(counts))]
    group = {s.name: g for g, k in enumerate(firsts) for s in made.spec.stages[k].state}
    versions = [{n: p.detach().clone() for n, p in model().named_parameters()}]
    for step, rows in enumerate(ROWS):
        new = {name: value.clone() for name, value in versions[-1].items()}
        total = 0.0
        parts = [each.tensor_split(min(4, rows)) for each in batch(rows, step)]
        for m, (x, ids, y) in enumerate(zip(*parts, strict=True)):
            mixed = {
                name: versions[read[group[name], step, m]][name].clone().requires_grad_()
                for name in new
            }
            out = torch.func.functional_call(model(), mixed, (x, ids))
            loss = nn.functional.cross_entropy(out, y) * len(x) / rows
            loss.backward()
            total += loss.item()
            for name, value in mixed.items():
                new[name] -= 0.1 * value.grad.to_dense()  # type: ignore[union-attr]
        versions.append(new)
        assert losses[step] == pytest.approx(total, rel=1e-5)
    for name, value in versions[-1].items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    made.close()


def test_a_step_returns_the_loss_that_all_ranks_know() -> None:
    """Also where this rank has heard of later ones, as it may where others are slow."""
    made = trainer(plan(), staleness=2)
    assert [made.step(batch(12, step)) is None for step in range(3)] == [True, True, False]
    made.pipeline._work_until(2)
    (first, loss), (second, _) = made.pipeline.losses
    assert (first, second) == (1, 2) and made.step(batch(12, 3)) is loss
    assert len(made.drain()) == 2
    made.close()


def test_an_interrupted_step_ends_the_training() -> None:
    made = trainer(plan(), staleness=0)
    made.step(batch(12, 0))
    worker = next(iter(made.pipeline._workers.values()))

    def interrupted() -> bool:
        raise KeyboardInterrupt

    worker.turn = interrupted
    with pytest.raises(KeyboardInterrupt):
        made.step(batch(12, 1))
    with pytest.raises(FxpartError, match="KeyboardInterrupt") as caught:
        made.step(batch(12, 2))
    assert caught.value.code == "FXP504"


def test_the_first_updates_may_miss_none() -> None:
    made = trainer(plan(), staleness=2, warm_up=len(ROWS))
    check(made, steps(made))
    assert max(each.staleness for each in made.report()) == 0
    made.close()


def test_staleness_outlives_a_copy() -> None:
    made = trainer(plan((2, 2)), sgd, staleness=1)
    losses = steps(made, {2: 1, 4: 2})
    assert len(losses) == len(ROWS) and all(0 < loss < 5 for loss in losses)
    assert max(each.staleness for each in made.report()) <= 1
    states = [worker._parameters.all for worker in made.pipeline._workers.values()]
    assert len(states) == 2
    made.close()


def test_copies_hold_the_same_bits() -> None:
    made = trainer(plan((3, 1)), staleness=1)
    steps(made)
    first, *others = (made.pipeline._workers[copy]._parameters.all for copy in range(3))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    made.close()


def test_fit_tells_and_ends() -> None:
    told: list[float] = []
    made = trainer(plan(), staleness=1)
    data = [batch(rows, step) for step, rows in enumerate(ROWS)]
    fitted = made.fit(
        lambda: data, callbacks=[lambda info: told.append(info.loss)], evaluate=data[:1], epochs=1
    )
    assert fitted.steps == len(ROWS) == len(told) and "loss" in fitted.values
    assert told[-1] == fitted.loss
    made.close()


def test_a_failing_callback_is_raised() -> None:
    made = trainer(plan())

    def fails(info: object) -> None:
        raise ValueError("no disk")

    with pytest.raises(FxpartError, match="no disk"):
        made.fit([batch()], callbacks=[fails])
    made.close()


def test_clipping_is_that_of_a_synchronous_trainer() -> None:
    def run(**more: Any) -> list[float]:
        made = program(plan()).trainer(sgd, clip_norm=0.05, **more)
        found = [float(made.step(batch(rows, step))) for step, rows in enumerate(ROWS)]
        made.close()
        return found

    assert run(routing="queue") == pytest.approx(run(), rel=1e-5)


def test_the_optimizers_state_goes_over() -> None:
    made = trainer(plan())
    made.step(batch())
    kept, weights = made.optimizer_state_dict(), made.state_dict()
    other = program(plan()).trainer(adagrad)
    other.load_state_dict(weights)
    other.load_optimizer_state_dict(kept)
    assert float(other.step(batch(9, 1))) == pytest.approx(float(made.step(batch(9, 1))), rel=1e-6)
    back = trainer(plan((1, 2)))
    back.load_state_dict(other.state_dict())
    back.load_optimizer_state_dict(other.optimizer_state_dict())
    again = [float(t.step(batch(12, 2))) for t in (made, back)]
    assert again[0] == pytest.approx(again[1], rel=1e-6)
    for one in (made, other, back):
        one.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"routing": "lottery"}, "routing is unknown"),
        ({"routing": "turns", "staleness": 1}, "has no staleness"),
        ({"staleness": -1}, "must be integers of at least 0"),
        ({"weight_mode": "pipemare"}, "does not support queues"),
        ({"scheduler": 3}, "a function that makes a scheduler"),
        ({"log_grad_norm": True}, "does not support log_grad_norm"),
    ],
)
def test_refusals(options: dict[str, Any], why: str) -> None:
    with pytest.raises(FxpartError, match=why):
        program(plan()).trainer(adagrad, **{"routing": "queue", **options})


def test_what_is_not_there() -> None:
    made = trainer(plan())
    for call in (
        made.record, lambda: made.step(batch(), local=True),
        lambda: made.step(batch(), accumulate=True), made.gradients,
    ):  # fmt: skip
        with pytest.raises(FxpartError) as caught:
            call()
        assert caught.value.code == "FXP109"
    made.close()


def test_the_last_copy_of_a_stage_ends_it() -> None:
    made = trainer(plan())
    made.step(batch())
    made.pipeline.lose(2)
    with pytest.raises(FxpartError, match="The last replica of stage 2 is lost") as caught:
        made.step(batch())
    assert caught.value.code == "FXP514"
    with pytest.raises(FxpartError, match="an earlier failure ended the training"):
        made.step(batch())
    made.close()


def test_a_batch_that_does_not_fit() -> None:
    made = trainer(plan())
    with pytest.raises(FxpartError, match="it is missing"):
        made.step((batch()[0],))
