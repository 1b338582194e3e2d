"""fit: the numbers of a plain loop; all ranks end together, whatever raises on one of them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_stages import ADAMW, Whole, batch, language
from ranks import Pool
from runtime_programs import bits, make

from fxpart.errors import FxpartError
from fxpart.program.spec import ProgramSpec
from fxpart.runtime import InProcess, Trainer, connect
from fxpart.runtime.batch.outputs import Outputs, OutputSpec
from fxpart.runtime.callbacks import Callback, EarlyStopping, Event, JsonLines, StepInfo
from fxpart.runtime.mesh.mesh_ranks import MeshRank

CUT = (1, 2, 1)


def trainer(cut: tuple[int, ...] = CUT, **options: Any) -> Trainer:
    """A trainer that can evaluate and predict: the same stages in evaluation mode."""
    transport = connect(len(cut)) if options.pop("ranks_", False) else InProcess(len(cut))
    hand, other = language(cut, tied=False), language(cut, tied=False)
    here = [i for i in range(len(cut)) if i in transport.local]

    def lanes() -> tuple[ProgramSpec, dict[int, torch.nn.Module]]:
        made: dict[int, torch.nn.Module] = {}
        for index in here:
            mine = other.stages[index].eval()
            for attribute in mine.names:
                setattr(mine, attribute, getattr(hand.stages[index], attribute))
            for part in getattr(mine, "parts", ()):
                for attribute, name in part.names.items():
                    setattr(part, attribute, getattr(mine, name.replace(".", "_")))
            made[index] = mine
        return other.spec(), made

    def prediction(loss: bool) -> tuple[list[MeshRank], Outputs]:
        return [MeshRank(0, *lanes())], Outputs((OutputSpec("logits", "output", 0),))

    return make(hand, transport, evaluation=lanes, prediction=prediction, **options)


class Log(Callback):
    """Keeps all it is told, but for times."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_step(self, info: StepInfo) -> None:
        assert info.seconds > 0 and info.rows_per_second > 0
        self.told.append((info.step, info.epoch, info.loss, info.lr, info.grad_norm, info.rows))

    def on_event(self, event: Event) -> None:
        self.told.append((event.kind, event.step, dict(event.values), event.why, str(event.error)))


def data(count: int = 4, rows: int = 4) -> list[Any]:
    return [batch(rows, seed=seed) for seed in range(count)]


def test_fit_is_a_plain_loop() -> None:
    """Accumulation, clipping, a scheduler for each epoch, a smaller last update."""
    made, whole = trainer(clip_norm=0.1), Whole(language(tied=False), ADAMW, 0.1)
    theirs = torch.optim.lr_scheduler.StepLR(whole.optimizer, 1, 0.5)
    log, losses = Log(), []
    for _ in range(2):
        for first, *second in (data(3)[:2], data(3)[2:]):
            both = [whole.backward(given, 4).item() for given in (first, *second)]
            whole.update()
            losses.append(sum(both) / len(both))
        theirs.step()
    fitted = made.fit(
        data(3), epochs=2, accumulate=2, callbacks=[log],
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        scheduler_every="epoch",
    )  # fmt: skip
    assert (fitted.steps, fitted.epochs, fitted.why) == (4, 2, "epochs")
    assert bits(whole.state()).items() <= bits(made.state_dict()).items()
    steps = [told for told in log.told if isinstance(told[0], int)]
    assert [told[2] for told in steps] == pytest.approx(losses, rel=1e-6)
    assert [told[3] for told in steps] == [(0.01,)] * 2 + [(0.005,)] * 2
    assert [told[5] for told in steps] == [8, 4, 8, 4]
    assert all(told[4] is not None for told in steps)
    kinds = [told[0] for told in log.told]
    assert kinds == ["start", 1, 2, "epoch", 3, 4, "epoch", "end"]


@pytest.mark.parametrize(
    ("batches", "run", "steps", "why"),
    [
        (data(3), {}, 3, "data"),
        (data(3), {"steps": 5}, 5, "steps"),
        (iter(data(3)), {"steps": 5}, 3, "data"),
        (lambda: iter(data(3)), {"steps": 7, "epochs": 2}, 6, "epochs"),
        ([], {"steps": 5}, 0, "data"),
    ],
)
def test_where_it_ends(batches: Any, run: dict[str, Any], steps: int, why: str) -> None:
    fitted = trainer().fit(batches, **run)
    assert (fitted.steps, fitted.why) == (steps, why)


@pytest.mark.parametrize(
    "run",
    [
        {"steps": 0}, {"every": 2}, {"step": 3}, {"accumulate": 0}, {"scheduler_every": "day"},
        {"evaluate": iter([])}, {"evaluate": data(1), "early_stopping": EarlyStopping("accuracy")},
    ],
)  # fmt: skip
def test_wrong_arguments(run: dict[str, Any]) -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        trainer().fit(data(2), **run)


def correct(outputs: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Accuracy."""
    return (outputs.argmax(-1) == given["labels"]).float().mean()


class Right:
    """The same, with sums of its own."""

    def __init__(self) -> None:
        self.right = self.count = 0

    def reset(self) -> None:
        self.right = self.count = 0

    def update(self, outputs: torch.Tensor, given: dict[str, Any]) -> None:
        self.right += int((outputs.argmax(-1) == given["labels"]).sum())
        self.count += given["labels"].numel()

    def compute(self) -> float:
        return self.right / self.count


def evaluated(whole: Whole, batches: list[Any]) -> tuple[float, float]:
    """Loss and accuracy of one process in evaluation mode."""
    loss = right = rows = 0.0
    with torch.no_grad():
        for stage in whole.stages:
            stage.eval()
        for given in batches:
            count = len(given["ids"])
            found = whole.run(dict(given), 0)
            loss, rows = loss + float(found["loss"]) * count, rows + count
            right += float(correct(found["logits"], given)) * count
        for stage in whole.stages:
            stage.train()
    return loss / rows, right / rows


def test_evaluation_is_that_of_one_process() -> None:
    made, whole = trainer(), Whole(language(tied=False), ADAMW)
    for seed in range(2):
        made.step(batch(seed=seed))
        whole.step(batch(seed=seed), 4)
    batches = [batch(8, seed=7), batch(5, seed=8)]
    loss, right = evaluated(whole, batches)
    assert made.evaluate(batches)["loss"] == pytest.approx(loss, rel=1e-6)
    found = made.evaluate(batches, {"accuracy": correct, "right": Right()})
    assert list(found) == ["loss", "accuracy", "right"]
    assert found == pytest.approx({"loss": loss, "accuracy": right, "right": right}, rel=1e-6)
    assert made.evaluate(iter(batches)) == made.evaluate(batches)
    with pytest.raises(FxpartError, match="no batches"):
        made.evaluate([])


def fit_all(path: str) -> Any:
    """Evaluations with metrics, a plateau scheduler, early stopping, a log: on ranks or not."""
    made, log = trainer(ranks_=True, log_grad_norm=True), Log()
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.1)
    fitted = made.fit(
        data(6), epochs=9, evaluate=[batch(5, seed=9)], every=2, metrics={"accuracy": correct},
        scheduler=plateau, early_stopping=EarlyStopping(patience=2),
        callbacks=[log, JsonLines(path)],
    )  # fmt: skip
    return vars(fitted), log.told, bits(made.state_dict())


@pytest.mark.slow
def test_fit_over_gloo(pool: Pool, tmp_path: Path) -> None:
    """Every rank is told the same numbers, and stops after the same step."""
    expected = fit_all(str(tmp_path / "one.jsonl"))
    assert expected[0]["why"] == "early stopping" and 4 <= expected[0]["steps"] < 54
    assert pool.run(fit_all, str(tmp_path / "ranks.jsonl"), ranks=3) == [expected] * 3
    one, ranks = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("one.jsonl", "ranks.jsonl")
    )
    assert len(ranks) == len(one) == len(expected[1])
    assert [line.get("loss") for line in ranks] == [line.get("loss") for line in one]
    assert one[0] == {"event": "start", "step": 0, "epoch": 0}
    assert one[-1]["why"] == "early stopping"


class Broken(Callback):
    """Raises in one place on one rank."""

    def __init__(self, rank: int, place: str) -> None:
        self.rank, self.place, self.told = rank, place, [""]

    def on_step(self, info: StepInfo) -> None:
        if info.rank == self.rank and self.place == str(info.step):
            raise ValueError("a callback that cannot")

    def on_event(self, event: Event) -> None:
        self.told.append(event.kind)
        if event.rank == self.rank and event.kind == self.place:
            raise ValueError("a callback that cannot")


class Saves(Callback):
    """Makes a call of all ranks in each step."""

    trainer: Trainer

    def on_step(self, info: StepInfo) -> None:
        self.trainer.state_dict(first_only=True)


def broken(rank: int, place: str, saves: bool) -> Any:
    """Where a callback raises, and how every rank ends; then a good step."""
    made, saver = trainer(ranks_=True), Saves()
    saver.trainer = made
    callback = Broken(rank, place)
    metrics: dict[str, Any] = {"accuracy": correct}

    def failing(outputs: Any, given: Any) -> float:
        raise KeyError("labels")

    def reading() -> Any:
        yield from data(2)
        if made.rank == rank:
            raise OSError("a file that cannot be read")
        yield from data(2)

    if place == "metric":
        metrics = {"failing": failing}
    batches = reading if place == "data" else data(3 if place != "short" or made.rank else 2)
    try:
        made.fit(
            batches, evaluate=data(1), every=2, metrics=metrics,
            callbacks=[callback, *([saver] if saves else [])],
        )  # fmt: skip
    except FxpartError as failure:
        loss = made.step(batch()).item()
        problems = [(p.code, p.where, p.why) for p in failure.problems]
        return problems, callback.told[-1], loss
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "place", "saves", "where", "why"),
    [
        (1, "2", False, "rank 1, callback Broken.on_step after step 2", "ValueError"),
        (0, "3", False, "rank 0, callback Broken.on_step after step 3", "ValueError"),
        (2, "1", True, "rank 2, callback Broken.on_step after step 1", "ValueError"),
        (1, "start", False, "rank 1, callback Broken.on_event(start)", "ValueError"),
        (2, "evaluation", True, "rank 2, callback Broken.on_event(evaluation)", "ValueError"),
        (1, "end", False, "rank 1, callback Broken.on_event(end)", "ValueError"),
        (0, "metric", False, "rank 0, a metric", "KeyError"),
        (2, "data", False, "rank 2, the batches", "OSError"),
    ],
)
def test_what_raises_on_one_rank_ends_all(
    pool: Pool, rank: int, place: str, saves: bool, where: str, why: str
) -> None:
    found = pool.run(broken, rank, place, saves, ranks=3)
    assert found[0] is not None
    ((code, at, because),), last, _ = found[0]
    assert (code, at, last) == ("FXP507", where, "failure")
    assert because.startswith(why)
    assert found == [found[0]] * 3


@pytest.mark.slow
def test_data_that_ends_early_on_one_rank(pool: Pool) -> None:
    found = pool.run(broken, 0, "short", False, ranks=3)
    ((code, _, why),), last, _ = found[0]
    assert (code, last) == ("FXP501", "failure")
    assert "the data has ended" in why and "training call 2" in why
    assert found == [found[0]] * 3


def test_early_stopping() -> None:
    stopping = EarlyStopping("x", patience=2, min_delta=0.1, mode="max")
    values = [0.1, 0.5, 0.55, 0.7, float("nan"), 0.75]
    assert [stopping.stop({"x": value}) for value in values] == [False] * 5 + [True]
    assert stopping.best == -0.7
    with pytest.raises(FxpartError, match="patience"):
        EarlyStopping(patience=0)


def predict_all(first_only: bool) -> Any:
    """Predictions of several sizes, without labels."""
    made, found = trainer(ranks_=True), []
    for rows, length in ((8, 5), (3, 5), (1, 2)):
        given = batch(rows, length)
        logits = made.predict(given, first_only=first_only)
        found.append(None if logits is None else (tuple(logits.shape), logits.numpy().tobytes()))
    return found


def test_predictions_are_those_of_one_process() -> None:
    whole, made = Whole(language(tied=False), ADAMW), trainer()
    given = batch(6)
    for stage in whole.stages:
        stage.eval()
    with torch.no_grad():
        expected = whole.run(dict(given), 0)["logits"]
    torch.testing.assert_close(made.predict(given), expected, rtol=1e-6, atol=1e-7)
    assert not made.predict(given).requires_grad


@pytest.mark.slow
def test_predictions_over_gloo(pool: Pool) -> None:
    expected = predict_all(False)
    assert pool.run(predict_all, False, ranks=3) == [expected] * 3
    nobody = [None] * len(expected)
    assert pool.run(predict_all, True, ranks=3) == [expected, nobody, nobody]
