"""Checkpoints of trainers from queues: others go on from them with one process's numbers."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from queued_batches import ROWS, adagrad, batch
from queued_programs import alone, model, plan, program, sgd, touched, trainer

from fxpart.checkpoint import folder, manifest_merge
from fxpart.checkpoint.reader import Checkpoint
from fxpart.checkpoint.writer import write_rank
from fxpart.errors import FxpartError
from fxpart.runtime.checkpointing.saver import Saver, _SaveJob
from fxpart.runtime.training_run import Checkpoints

SAVED = 3  # of six steps


def train(made: Any, first: int, last: int) -> list[float]:
    """Steps, and what is known of their losses then."""
    losses = [made.step(batch(ROWS[step], step)) for step in range(first, last)]
    left = made.drain() if hasattr(made, "drain") else []
    return [float(loss) for loss in (*losses, *left) if loss is not None]


def same(state: dict[str, torch.Tensor]) -> None:
    """The weights of one process after all steps."""
    wanted = alone()[1]
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    assert touched(state) == touched(wanted)


def turns(counts: tuple[int, ...]) -> Any:
    return program(plan(counts)).trainer(adagrad)


def queues(counts: tuple[int, ...]) -> Any:
    return trainer(plan(counts))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "lose", "second"),
    [
        (lambda: queues((2, 1)), None, lambda: queues((1, 2))),
        (lambda: queues((2, 2)), 0, lambda: queues((2, 2))),  # the copy that owned its parameters
        (lambda: queues((2, 2)), 3, lambda: turns((1, 1))),
        (lambda: turns((2, 1)), None, lambda: queues((2, 2))),
    ],
)
def test_another_goes_on(tmp_path: Path, first: Any, lose: int | None, second: Any) -> None:
    made = first()
    losses = train(made, 0, SAVED - 1)
    if lose is not None:
        made.pipeline.lose(lose)
    losses += train(made, SAVED - 1, SAVED)
    made.save_checkpoint(tmp_path, {"note": 7})
    made.close()
    other = second()
    assert other.load_checkpoint(tmp_path) == {"note": 7}
    assert (other.updates, other.calls) == (SAVED, SAVED)
    losses += train(other, SAVED, len(ROWS))
    assert losses == pytest.approx(alone()[0], rel=1e-6)
    same(other.state_dict())
    assert other.updates == len(ROWS)
    other.close()


@pytest.mark.slow
def test_the_same_trainer_goes_back(tmp_path: Path) -> None:
    made = queues((2, 1))
    train(made, 0, 2)
    made.save_checkpoint(tmp_path)
    train(made, 2, 5)
    made.load_checkpoint(tmp_path)
    assert (made.updates, made.calls, made.in_flight) == (2, 2, False)
    assert train(made, 2, len(ROWS)) == pytest.approx(alone()[0][2:], rel=1e-6)
    same(made.state_dict())
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stash", "naive", "spectrain-v2"])
def test_staleness_begins_anew(tmp_path: Path, mode: str) -> None:
    """What is in flight is finished first; then weights, rules and numbers are the saved ones."""

    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    class Dense(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layers(x)
            return found

    import fxpart

    x, y = torch.randn(12, 6), torch.randn(12, 6)
    chain = fxpart.compile(
        Dense(), "local:2", example_inputs=(x, y), loss=torch.nn.functional.mse_loss,
        microbatches=4, constraints={"mesh": "none", "stages": 2},
    )  # fmt: skip
    how: dict[str, Any] = {"routing": "queue", "staleness": 2, "weight_mode": mode}
    made = chain.trainer(momentum, **how)
    for _ in range(5):
        made.step((x, y))
    made.save_checkpoint(tmp_path)
    assert made.updates == 5
    (path,) = tmp_path.iterdir()
    assert Checkpoint.open(path).manifest.weights == mode
    other = chain.trainer(momentum, **how)
    for _ in range(3):
        other.step((x, y))  # its versions are others than the saved one's
    other.load_checkpoint(tmp_path)
    for name, value in made.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=0, atol=0)
    made.load_checkpoint(tmp_path)  # both begin with an empty pipeline
    runs = []
    for each in (made, other):
        losses = [each.step((x, y)) for _ in range(6)]
        runs.append([float(v) for v in (*losses, *each.drain()) if v is not None])
        assert max(report.staleness for report in each.report()) <= 2
        each.close()
    assert runs[0] == pytest.approx(runs[1], rel=1e-6) and len(runs[0]) == 6


@pytest.mark.slow
def test_schedulers_go_on(tmp_path: Path) -> None:
    def halving(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    how: dict[str, Any] = {"scheduler": halving, "optimizer": sgd}
    whole = trainer(plan(), **how)
    wanted = train(whole, 0, len(ROWS))
    first, second = trainer(plan(), **how), trainer(plan((1, 2)), **how)
    losses = train(first, 0, SAVED)
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path)
    assert losses + train(second, SAVED, len(ROWS)) == pytest.approx(wanted, rel=1e-6)
    rates = {group["lr"] for o in second.optimizers.by_place.values() for group in o.param_groups}
    assert rates == {0.1 / 8}
    for made in (whole, first, second):
        made.close()


def data() -> list[Any]:
    return [batch(rows, step) for step, rows in enumerate(ROWS)]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_goes_on(tmp_path: Path, staleness: int) -> None:
    """Asked to end after some steps, and run again by the same script."""
    told: list[int] = []

    def asks(info: Any) -> None:
        told.append(info.step)
        if info.step == SAVED and len(told) == SAVED:
            made.request.mine = signal.SIGTERM

    for why in ("SIGTERM to rank 0", "data"):
        made = trainer(plan(), staleness=staleness)
        found = made.fit(data(), checkpoints=tmp_path, callbacks=[asks])
        assert found.why == why
        if why == "data":
            assert found.steps == len(ROWS)
            if not staleness:
                assert found.loss == pytest.approx(alone()[0][-1], rel=1e-6)
                same(made.state_dict())
        made.close()
    assert told == list(range(1, len(ROWS) + 1))


@pytest.mark.slow
def test_what_is_lost_in_a_run_is_saved_by_others(tmp_path: Path) -> None:
    made = queues((2, 2))

    def loses(info: Any) -> None:
        if info.step == 2:
            made.pipeline.lose(1)

    found = made.fit(data(), steps=SAVED, checkpoints=tmp_path, callbacks=[loses])
    assert found.steps == SAVED and made.pipeline.lost == (1,)
    made.close()
    other = queues((1, 2))
    found = other.fit(data(), checkpoints=tmp_path)
    assert found.steps == len(ROWS) and found.loss == pytest.approx(alone()[0][-1], rel=1e-6)
    same(other.state_dict())
    other.close()


@pytest.mark.slow
def test_of_another_model_it_is_refused(tmp_path: Path) -> None:
    made = queues((2, 1))
    made.step(batch())
    made.save_checkpoint(tmp_path)
    before = made.state_dict()
    with pytest.raises(FxpartError) as caught:
        trainer(plan(), optimizer=sgd).load_checkpoint(tmp_path)
    assert caught.value.code == "FXP512"
    with pytest.raises(FxpartError) as caught:
        made.save_checkpoint(tmp_path)
    assert caught.value.code == "FXP513"
    assert (
        touched(made.state_dict()) == touched(before)
        and before.keys() == model().state_dict().keys()
    )
    made.close()


@pytest.mark.slow
def test_a_file_that_will_not_come_is_not_waited_for(tmp_path: Path) -> None:
    """The rank has ended since the save began; one that has ended after its file is not missed."""
    made = queues((2, 1))
    saver, began = Saver(made, tmp_path), time.monotonic()
    partial = folder.begin(tmp_path, 1, 0)
    write_rank(partial, 0, [], values={}, more={})

    def awaited(lost: int, seconds: float) -> float:
        job = _SaveJob(1, None, {}, 1, 2, lambda: {lost})
        with pytest.raises(FxpartError, match="rank 1 did not finish its file"):
            saver._wait_for(
                job,
                time.monotonic() + seconds,
                partial,
                lambda: not manifest_merge.list_missing_ranks(partial, 2),
            )
        return time.monotonic() - began

    assert awaited(0, 0.5) >= 0.5
    partial = folder.begin(tmp_path, 1, 0)
    write_rank(partial, 0, [], values={}, more={})
    assert awaited(1, 300.0) < 60.0
    made.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FXP523")
def test_the_last_finite_checkpoint_is_kept(tmp_path: Path) -> None:
    """No replica skips an update: the state of a run is not finite after a bad batch."""
    data = [batch(12, step) for step in range(8)]
    data[2] = (data[2][0] * float("nan"), *data[2][1:])
    made = queues((2, 1))
    made.fit(data, steps=8, checkpoints=Checkpoints(tmp_path, every=2))
    made.close()
    complete = map(Checkpoint.open, folder.list_complete(tmp_path / "checkpoints"))
    finite = {each.manifest.step: each.manifest.is_finite for each in complete}
    assert finite == {8: False, 6: False, 2: True}
