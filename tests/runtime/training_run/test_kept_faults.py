"""What goes wrong around a run: disks, damage, other data, other models, restarts in vain."""

from __future__ import annotations

import json
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import kept_programs
import pytest
import torch
from hand_stages import batch
from kept_programs import go, trainer

from fxpart.diagnostics.failure_record import read_failure
from fxpart.errors import FxpartError
from fxpart.runtime.callbacks import Callback, JsonLines, StepInfo
from fxpart.runtime.training_run import Checkpoints
from fxpart.runtime.training_run.generations import load_generations
from fxpart.runtime.training_run.ledger import check_ledger

NAME = "plain"


def fit(folder: Path, data: Any, *, steps: int = 8, callbacks: Any = (), **kept: Any) -> Any:
    """A run over this data."""
    made = trainer(NAME, True)
    options = {"every": 3, **kept}
    return made.fit(
        data, steps=steps, callbacks=callbacks, checkpoints=Checkpoints(folder, **options)
    )


def data(first: int = 0, count: int = 4) -> list[Any]:
    return [batch(4, seed=first + seed) for seed in range(count)]


def saved(folder: Path, step: int) -> None:
    """Wait for a checkpoint that a run which has failed has still under way."""
    for _ in range(1000):
        if (folder / "checkpoints" / f"step-{step:010d}").exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"no checkpoint of step {step}")


class Fails(Callback):
    """Raises after a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, info: StepInfo) -> None:
        if info.step == self.at:
            raise OSError("the logger is gone")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file stands where checkpoints go: training goes on, and says so; or it ends."""
    (tmp_path / "checkpoints").write_text("")
    with pytest.warns(UserWarning, match="FXP513"):
        assert fit(tmp_path, data()).steps == 8
    with pytest.raises(FxpartError, match="FXP513"):
        fit(tmp_path, data(), strict=True)
    with pytest.raises(FxpartError, match="FXP603"):
        fit(tmp_path / "checkpoints" / "inner", data())


def test_the_last_save_fails(tmp_path: Path) -> None:
    """One that was begun off the step's path, with no step after it."""

    def break_(info: StepInfo) -> None:
        if info.step == 2:
            shutil.rmtree(tmp_path / "checkpoints")
            (tmp_path / "checkpoints").write_text("")

    with pytest.raises(FxpartError, match="FXP513"):
        fit(tmp_path, data(), steps=3, callbacks=[break_], strict=True)


@pytest.mark.slow
def test_damage_is_passed_over(tmp_path: Path) -> None:
    """The newest checkpoint is damaged: the one before is gone on with, and the bits are equal."""
    whole = go(str(tmp_path / "whole"), NAME, True)
    go(str(tmp_path / "parts"), NAME, True, (7, 0, 15))
    newest = tmp_path / "parts" / "checkpoints" / "step-0000000007"
    file = newest / "rank-00001.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    with pytest.warns(UserWarning, match="FXP510"):
        assert go(str(tmp_path / "parts"), NAME, True) == whole
    told = check_ledger(tmp_path / "parts" / "steps.jsonl")
    assert told.problems == () and told.redone == 1
    for each in (tmp_path / "parts" / "checkpoints").glob("step-*/manifest.json"):
        each.write_text("{}")
    with pytest.raises(FxpartError, match="FXP511"):
        go(str(tmp_path / "parts"), NAME, True)


@pytest.mark.slow
def test_other_data_and_another_model(tmp_path: Path) -> None:
    with pytest.raises(FxpartError, match="FXP507"):
        fit(tmp_path, data(), callbacks=[Fails(5)])
    saved(tmp_path, 3)
    for _ in range(2):
        with pytest.raises(FxpartError, match="FXP518") as caught:
            fit(tmp_path, data(first=9))
    assert caught.value.problems[0].where.endswith("steps.jsonl, step 4")
    assert "values differ from before" in caught.value.problems[0].why
    assert fit(tmp_path, data(first=9), check=False).steps == 8
    assert len(check_ledger(tmp_path / "steps.jsonl").problems) == 2, (
        "each step that was done again"
    )
    other = kept_programs.make(
        kept_programs.language((2, 2), tied=True), kept_programs.InProcess(2)
    )
    with pytest.raises(FxpartError, match="FXP512"):
        other.fit(data(), steps=9, checkpoints=tmp_path)


@pytest.mark.slow
def test_restarts_without_progress(tmp_path: Path) -> None:
    """The first start and three more fail at the same step; then it is refused, and begins anew."""
    for _ in range(4):
        with pytest.raises(FxpartError, match="FXP507"):
            fit(tmp_path, data(), callbacks=[Fails(5)])
        saved(tmp_path, 3)
    with pytest.raises(FxpartError, match="FXP517") as caught:
        fit(tmp_path, data(), callbacks=[Fails(5)])
    assert "the logger is gone" in caught.value.problems[0].why
    failure = read_failure(tmp_path / "events" / "generation-4" / "rank-0.failure.json")
    assert (failure.rank, failure.generation, failure.problems[0].code) == (0, 4, "FXP507")
    assert fit(tmp_path, data()).steps == 8
    generations = load_generations(tmp_path / "generations.jsonl")
    assert [g.ended.how for g in generations if g.ended] == ["failed"] * 4 + ["FXP517", "steps"]


def test_a_state_that_is_not_plain(tmp_path: Path) -> None:
    class Holds(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"model": torch.zeros(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Nothing."""

    with pytest.raises(FxpartError, match="FXP109") as caught:
        fit(tmp_path, data(), callbacks=[Holds()])
    assert "callback Holds" in caught.value.problems[0].where


def test_a_log_is_gone_on_with(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    fit(tmp_path / "run", data(), steps=3, callbacks=[JsonLines(log)])
    fit(tmp_path / "run", data(), steps=8, callbacks=[JsonLines(log)])
    told = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in told if "loss" in line] == list(range(1, 9))
    assert [line["step"] for line in told if line.get("event") == "start"] == [0, 3]


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trainer(NAME, True).fit(data(), steps=8).steps == 8
    for wrong in ({"every": 0}, {"keep": 1}, {"restarts": -1}):
        with pytest.raises(FxpartError, match="FXP109"):
            Checkpoints(tmp_path, **wrong)
