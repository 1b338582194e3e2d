"""What is requested of a resumed run is applied, rejected, or at least reported."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import call
from run_folders import TARGET, heard, new_trainer, rows, same, train
from torch.utils.data import DataLoader

from fxpart.errors import FxpartError
from fxpart.runtime.training_run import Checkpoints
from fxpart.runtime.training_run.data_position import DataPosition

SGD = torch.optim.SGD
STEPS = partial(torch.optim.lr_scheduler.StepLR, step_size=3)


def by_hand(steps: int, changes: dict[int, dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A plain loop whose optimizer's options are set after some steps."""
    trainer = new_trainer(optimizer=partial(SGD, lr=0.1, momentum=0.5))
    for step, batch in enumerate(rows()[:steps], start=1):
        trainer.step(batch)
        trainer.optimizer.param_groups[0].update(changes.get(step, {}))
    state: dict[str, torch.Tensor] = trainer.state_dict()
    trainer.close()
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"lr": 0.5}, {"momentum": 0.0}, {"weight_decay": 0.3}, {"lr": 0.05, "momentum": 0.9}]
)
def test_options_of_the_optimizer_are_applied(change: dict[str, Any], tmp_path: Path) -> None:
    given = {"lr": 0.1, "momentum": 0.5}
    train(tmp_path, 5, trainer={"optimizer": partial(SGD, **given)})
    with heard() as texts:
        _, state = train(tmp_path, 8, trainer={"optimizer": partial(SGD, **{**given, **change})})
    assert same(state, by_hand(8, {5: change}))
    (warning,) = [text for text in texts if "continues after step 5" in text]
    for name, value in change.items():
        assert f"{name} {value:g} instead of" in warning
    # It is what the run has now: the same again is no change, and the first options are one.
    with heard() as texts:
        _, state = train(tmp_path, 9, trainer={"optimizer": partial(SGD, **{**given, **change})})
    assert texts == [] and same(state, by_hand(9, {5: change}))
    with heard() as texts:
        _, state = train(tmp_path, 11, trainer={"optimizer": partial(SGD, **given)})
    back = {name: {**given, "weight_decay": 0.0}[name] for name in change}
    assert same(state, by_hand(11, {5: change, 9: back})) and "after step 9" in texts[0]


@pytest.mark.slow
def test_the_same_request_changes_nothing(tmp_path: Path) -> None:
    """Also where a scheduler, or the user, has changed the learning rate since."""
    options = {"trainer": {"optimizer": partial(SGD, lr=0.1)}, "fit": {"scheduler": STEPS}}
    with heard() as texts:
        train(tmp_path / "parts", 5, **options)
        _, state = train(tmp_path / "parts", 9, **options)
    assert texts == []
    assert same(state, train(tmp_path / "whole", 9, **options)[1])


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ({}, {"trainer": {"seed": 11}}, "seed 11 instead of"),
        (
            {"trainer": {"optimizer": partial(SGD, lr=0.1)}, "fit": {"scheduler": STEPS}},
            {"trainer": {"optimizer": partial(SGD, lr=0.2)}, "fit": {"scheduler": STEPS}},
            "lr 0.2 instead of 0.1",
        ),
        (
            {"fit": {"scheduler": STEPS}},
            {"fit": {"scheduler": partial(STEPS, step_size=5)}},
            "scheduler step_size 5 instead of 3",
        ),
        (
            {"fit": {"scheduler": STEPS}},
            {"fit": {"scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)}},
            "scheduler ExponentialLR instead of StepLR",
        ),
        ({"fit": {"scheduler": STEPS}}, {}, "scheduler none instead of StepLR"),
    ],
)
def test_what_a_run_cannot_continue_with(
    first: dict[str, Any], second: dict[str, Any], why: str, tmp_path: Path
) -> None:
    train(tmp_path, 4, **first)
    with pytest.raises(FxpartError, match=why) as caught:
        train(tmp_path, 6, **second)
    assert caught.value.code == "FXP109"
    assert train(tmp_path, 6, **first)[0].steps == 6


def test_options_of_the_trainer_are_told(tmp_path: Path) -> None:
    train(tmp_path, 4)
    with heard() as texts:
        train(tmp_path, 6, trainer={"clip_norm": 0.1}, fit={"accumulate": 2})
    (warning,) = [text for text in texts if "continues after step 4" in text]
    assert "clip_norm 0.1 instead of None" in warning and "accumulate 2 instead of 1" in warning


class Counts:
    """Counts steps, also those before the run was resumed."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, info: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class OtherCounts(Counts):
    """Of another class."""


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [{}, {"weights": "stash"}])
def test_callbacks_at_other_places(trainer: dict[str, Any], tmp_path: Path) -> None:
    """Their state is found by their class, and reported if there is none of it."""

    def go(steps: int, *callbacks: Counts, **given: Any) -> list[str]:
        made = new_trainer(**trainer)
        with heard() as texts:
            kept = Checkpoints(tmp_path, every=2)
            made.fit(rows(), steps=steps, callbacks=callbacks, checkpoints=kept, **given)
        made.close()
        return texts

    assert go(4, Counts()) == []
    first, second, other = Counts(), Counts(), OtherCounts()
    assert go(6, other, first, second) == []
    assert [each.steps for each in (first, second, other)] == [6, 2, 2]
    first, second = Counts(), Counts()
    (warning,) = go(8, first, second)
    assert [each.steps for each in (first, second)] == [8, 4]
    assert "continues after step 6 without the saved state of OtherCounts" in warning


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [{}, {"weights": "stash"}])
def test_checkpoints_that_are_gone_are_reported(trainer: dict[str, Any], tmp_path: Path) -> None:
    _, whole = train(tmp_path, 5, trainer=trainer)
    shutil.rmtree(tmp_path / "checkpoints")
    with heard() as texts:
        _, state = train(tmp_path, 5, trainer=trainer)
    (warning,) = texts
    assert "has 5 steps, but there is no checkpoint: the run begins again" in warning
    assert same(state, whole)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [{}, {"weights": "stash"}])
def test_a_runs_folder_has_its_own_checkpoints_alone(
    trainer: dict[str, Any], tmp_path: Path
) -> None:
    """A run could not be resumed from one that has no data position."""
    _, whole = train(tmp_path / "whole", 8, trainer=trainer)
    made, refused = new_trainer(**trainer), list[str]()

    def save(info: Any) -> None:
        if info.step == 4:
            with pytest.raises(FxpartError, match="a run resumes from that folder") as caught:
                made.save_checkpoint(tmp_path / "run" / "checkpoints")
            refused.append(caught.value.code)

    kept = Checkpoints(tmp_path / "run", every=4)
    made.fit(rows(), steps=4, callbacks=[save], checkpoints=kept)
    made.close()
    assert refused == ["FXP513"]
    if not trainer:
        assert same(train(tmp_path / "run", 8, trainer=trainer)[1], whole)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, 4])
def test_data_of_another_length(steps: int, tmp_path: Path) -> None:
    """Within an epoch its batches are others; between two epochs that is reported."""
    train(tmp_path, steps, data=rows(4))
    if steps == 4:
        with heard() as texts:
            found, _ = train(tmp_path, 8, data=rows(6))
        assert "batches 6 instead of 4" in " ".join(texts) and found.epochs == 1
        return
    with pytest.raises(FxpartError, match="batches 6 instead of 4") as caught:
        train(tmp_path, 8, data=rows(6))
    assert caught.value.code == "FXP109"
    with heard() as texts:
        assert train(tmp_path, 8, data=rows(6), check=False)[0].steps == 8
    assert "batches 6 instead of 4" in " ".join(texts)


def test_a_loader_of_another_batch_size() -> None:
    position = DataPosition(DataLoader(list(range(24)), batch_size=4), records=True)
    for _ in zip(range(2), position, strict=False):
        position.used += 1
    state = position.state()
    other = DataPosition(DataLoader(list(range(36)), batch_size=6), records=True)
    other.load(state)
    with pytest.raises(FxpartError, match="batch_size 6 instead of 4"):
        iter(other)


@pytest.mark.slow
def test_batches_of_other_rows(tmp_path: Path) -> None:
    """Of data that tells no length."""

    def given(size: int) -> Any:
        return lambda: iter(rows(size=size))

    train(tmp_path, 4, data=given(4))
    with heard() as texts:
        train(tmp_path, 6, data=given(2))
    assert any("updates have 2 rows" in text and "had 4 before" in text for text in texts)
    train(tmp_path.with_name("same"), 4, data=given(4))
    with heard() as texts:
        train(tmp_path.with_name("same"), 6, data=given(4))
    assert texts == []


@pytest.mark.slow
def test_an_epoch_of_another_length(tmp_path: Path) -> None:
    train(tmp_path, 6, data=lambda: iter(rows(4)))
    with heard() as texts:
        train(tmp_path, 12, data=lambda: iter(rows(5)))
    assert any("epoch 1 has 5 batches" in text and "had 4" in text for text in texts)


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nets.py").write_text(TARGET)
    run = ["train", f"{tmp_path / 'nets.py'}:net", "--run", str(tmp_path / "run"), "-c", "local:1"]
    run += ["--cost-model", "roofline", "--check", "off", "--every", "5"]
    call(capsys, *run, "--steps", "5", "-m", "2", "--seed", "3")
    for options, why in (
        (["--seed", "7"], "--seed 7"), (["-m", "4"], "--microbatches 4"),
        (["--batch-size", "16"], "--batch-size 16"),
    ):  # fmt: skip
        _, err = call(capsys, *run, "--steps", "7", *options, status=2)
        assert "FXP109" in err and why in err
    _, err = call(capsys, *run, "--steps", "7", "--lr", "0.5", "-m", "2", "--seed", "3")
    assert "lr 0.5 instead of 0.001" in err and "7 steps are done and saved" in err
    call(capsys, *run, "--steps", "8", "--lr", "0.5")
