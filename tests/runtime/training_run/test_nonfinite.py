"""A loss or gradient that is not finite: reported, skipped, a reason to stop, or rolled back."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import call
from hand_stages import batch
from run_folders import heard, new_trainer, rows, same, train
from torch import nn

import fxpart
from fxpart.checkpoint import folder
from fxpart.errors import FxpartError
from fxpart.runtime.monitor import nonfinite_guard
from fxpart.runtime.training_run.ledger import check_ledger, read_updates

BAD = 5  # the step of the bad batch
ADAM = partial(torch.optim.AdamW, lr=0.01)


def poisoned(trainer: Any, kind: str, bad: tuple[int, ...], count: int = 12) -> Any:
    """Batches; before a bad one is read, the module is set to fail in its backward or forward."""
    weight = dict(trainer.parts.state.parameters())["head.weight"]
    factor = {"on": 1.0}
    if kind == "gradient":
        weight.register_hook(lambda grad: grad * factor["on"])

    class Data:
        def __iter__(self) -> Any:
            for index, given in enumerate(rows(count), start=1):
                factor["on"] = math.inf if index in bad else 1.0
                if kind == "loss" and index in bad:
                    given = {**given, "labels": torch.full_like(given["labels"], -100)}
                yield given

        def __len__(self) -> int:
            return count

    return Data()


def run(
    path: Path, kind: str, reaction: str, steps: int, bad: tuple[int, ...] = (BAD,), **kept: Any
) -> tuple[Any, dict[str, torch.Tensor], list[str]]:
    """A run over poisoned data; its result, state and warnings."""
    trainer = new_trainer(optimizer=ADAM)
    with heard() as texts:
        from fxpart.runtime.training_run import Checkpoints

        found = trainer.fit(
            poisoned(trainer, kind, bad), steps=steps, nonfinite=reaction,
            checkpoints=Checkpoints(path, **{"every": 2, **kept}),
        )  # fmt: skip
    state = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    trainer.close()
    return found, state, texts


def by_hand(numbers: list[int], *, skips: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """The weights after updates with these batches, counted from 1.

    skips: batches that were computed without an update: they count for random ops.
    """
    trainer, given = new_trainer(optimizer=ADAM), rows()
    for number in numbers:
        if number in skips:
            before = trainer.state_dict()
            trainer.backward(given[number - 1])
            trainer.zero_grad()
            trainer.load_state_dict(before)
        else:
            trainer.step(given[number - 1])
    state: dict[str, torch.Tensor] = trainer.state_dict()
    trainer.close()
    return state


KINDS = ["gradient", "loss"]


@pytest.mark.slow
def test_a_loss_is_told(tmp_path: Path) -> None:
    """Its gradients are zero, so the state stays finite."""
    found, state, texts = run(tmp_path, "loss", "warn", 12)
    (warning,) = [text for text in texts if "FXP523" in text]
    assert f"rank 0, step {BAD}" in warning and "the loss is nan" in warning
    assert found.steps == 12 and all(torch.isfinite(tensor).all() for tensor in state.values())


@pytest.mark.slow
def test_a_gradient_is_told_and_a_finite_checkpoint_is_kept(tmp_path: Path) -> None:
    kind = "gradient"
    found, state, texts = run(tmp_path, kind, "warn", 12)
    warned = [text for text in texts if "FXP523" in text]
    assert f"rank 0, step {BAD}" in warned[0] and "head.weight" in warned[0]
    assert not all(torch.isfinite(tensor).all() for tensor in state.values())
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-0000000004", "step-0000000010", "step-0000000012"]
    opened = [folder.find_checkpoints(tmp_path / "checkpoints" / name)[0] for name in names]
    assert [folder.Checkpoint.open(path).manifest.is_finite for path in opened] == [
        True, False, False,
    ]  # fmt: skip
    assert folder.prune(tmp_path / "checkpoints", 2) == []
    # Also after the run was resumed without a reaction; then it goes back there.
    _, _, texts = run(tmp_path, kind, "warn", 12)
    assert any("is not finite; the last finite checkpoint is kept" in text for text in texts)
    found, state, texts = run(tmp_path, kind, "rollback", 9)
    assert found.steps == 9 and all(torch.isfinite(t).all() for t in state.values())
    assert found.saved and folder.newest(tmp_path / "checkpoints").manifest.step == 9


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_update(kind: str, tmp_path: Path) -> None:
    found, state, texts = run(tmp_path / "skip", kind, "skip", 9)
    assert same(state, by_hand(list(range(1, 10)), skips=(BAD,))) and found.steps == 9
    assert sum("rejected (skip)" in text for text in texts) == 1
    ledger = tmp_path / "skip" / "steps.jsonl"
    assert check_ledger(ledger).problems == () and len(read_updates(ledger)) == 9
    assert all(p.manifest.is_finite for p in map(folder.Checkpoint.open, list_of(tmp_path)))
    run(tmp_path / "parts", kind, "skip", 6)
    assert same(run(tmp_path / "parts", kind, "skip", 9)[1], state)


def list_of(path: Path) -> list[Path]:
    return folder.list_complete(path / "skip" / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize(("reaction", "finite"), [("skip", True), ("warn", False)])
@pytest.mark.parametrize("options", [{}, {"weights": "stash"}])
def test_buffers_of_a_bad_batch(
    options: dict[str, str], reaction: str, finite: bool, tmp_path: Path
) -> None:
    """The forward has updated them: restored, or the checkpoint before it is the last finite one.

    Stages that update on their own always skip.
    """
    data = rows(6)
    data[2]["mask"] = data[2]["mask"] * math.nan
    made = {"optimizer": ADAM, **options}
    with heard():
        found, state = train(tmp_path, 6, data=data, fit={"nonfinite": reaction}, trainer=made)
    assert found.saved
    wrong = [name for name, tensor in state.items() if not torch.isfinite(tensor).all()]
    complete = map(folder.Checkpoint.open, folder.list_complete(tmp_path / "checkpoints"))
    kept = {each.manifest.step: each.manifest.is_finite for each in complete}
    if finite or options:
        assert wrong == [] and kept == {6: True, 4: True}
    else:
        assert "norm.running_mean" in wrong and kept == {6: False, 4: False, 2: True}


LAYOUTS = {
    "pipeline": (2, {"mesh": "none", "stages": 2}, 2),
    "data": (2, {"mesh": "dp=2", "stages": 1}, 2),
    "tensor": (2, {"mesh": "tp=2", "stages": 1}, 1),
    "zero": (2, {"mesh": "dp=2", "stages": 1, "zero": 3}, 1),
}


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_skipped_update_changes_nothing(layout: str) -> None:
    """Weights, buffers, averages and the optimizer's state are as before the bad batch."""
    devices, constraints, microbatches = LAYOUTS[layout]
    data = [(torch.randn(8, 8), torch.ones(8, 1)) for _ in range(4)]
    data[2] = (data[2][0] * math.nan, data[2][1])
    program = fxpart.compile(
        normed(), f"local:{devices}", example_inputs=data[0], loss=nn.functional.mse_loss,
        constraints=constraints, microbatches=microbatches, batch_coupling="per-microbatch",
        check="off", cost_model="roofline",
    )  # fmt: skip
    trainer, seen = program.trainer(ADAM, ema=0.9), []

    def look(_: Any) -> None:
        slots = trainer.optimizer_state_dict()["state"]
        found = {f"{name} {slot}": t for name, own in slots.items() for slot, t in own.items()}
        found |= {f"average {name}": t for name, t in trainer.ema_state_dict().items()}
        seen.append({**trainer.state_dict(), **found})

    trainer.fit(data, steps=4, nonfinite="skip", callbacks=[look])
    trainer.close()
    assert same(seen[1], seen[2])
    assert not any(torch.equal(seen[2][name], seen[3][name]) for name in seen[2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_stops_before_the_update(kind: str, tmp_path: Path) -> None:
    for _ in range(2):  # the same batch is read again, and stops it again
        with pytest.raises(FxpartError, match="FXP523") as caught:
            run(tmp_path, kind, "stop", 9)
        assert caught.value.exit_code == 6 and f"step {BAD}" in caught.value.problems[0].where
        assert folder.newest(tmp_path / "checkpoints").manifest.step == BAD - 1
    found, state, _ = run(tmp_path, kind, "skip", 9)
    assert found.saved and same(state, by_hand(list(range(1, 10)), skips=(BAD,)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_goes_back(kind: str, tmp_path: Path) -> None:
    """To the checkpoint of step 4 before it, or of step 3; the data goes on."""
    found, state, texts = run(tmp_path / "a", kind, "rollback", 8, every=3)
    assert same(state, by_hand([1, 2, 3, 6, 7, 8, 9, 10])) and found.steps == 8
    assert any("goes back from step 5 to step 3" in text for text in texts)
    summary = check_ledger(tmp_path / "a" / "steps.jsonl")
    assert (summary.problems, summary.steps) == ((), 8)
    # Resumed after it, and killed before the next checkpoint after it.
    run(tmp_path / "b", kind, "rollback", 5, every=3)
    assert same(run(tmp_path / "b", kind, "rollback", 8, every=3)[1], state)
    assert check_ledger(tmp_path / "b" / "steps.jsonl").problems == ()


@pytest.mark.slow
def test_a_repetition_of_a_rollback_is_no_difference(tmp_path: Path) -> None:
    """The run ends abruptly after it went back: the steps are repeated from before the bad one."""
    trainer = new_trainer(optimizer=ADAM)

    def fail(info: Any) -> None:
        fail.seen = getattr(fail, "seen", 0) + 1  # type: ignore[attr-defined]
        if fail.seen == 6:  # type: ignore[attr-defined]
            raise RuntimeError("the end")

    with pytest.raises(FxpartError, match="the end"), heard():
        trainer.fit(
            poisoned(trainer, "gradient", (BAD,)), steps=8, nonfinite="rollback",
            checkpoints=folder_of(tmp_path), callbacks=[fail],
        )  # fmt: skip
    trainer.close()
    _, state, _ = run(tmp_path, "gradient", "rollback", 8, every=3)
    assert same(state, by_hand([1, 2, 3, 6, 7, 8, 9, 10]))
    assert check_ledger(tmp_path / "steps.jsonl").problems == ()


def folder_of(path: Path) -> Any:
    from fxpart.runtime.training_run import Checkpoints

    return Checkpoints(path, every=3)


def test_it_does_not_go_back_for_ever(tmp_path: Path) -> None:
    with pytest.raises(FxpartError, match="FXP523"):
        run(tmp_path, "gradient", "rollback", 12, bad=(3, 4, 5, 6, 7, 8, 9))


def test_it_does_not_skip_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpart.runtime.fit.MOST_SKIPPED", 3)
    with pytest.raises(FxpartError, match="FXP523"):
        run(tmp_path, "loss", "skip", 12, bad=(3, 4, 5, 6, 7, 8, 9))


def test_large_gradients_are_finite() -> None:
    """Their norm is not."""
    trainer = new_trainer(optimizer=ADAM)
    trainer.backward(batch(seed=1))
    for _, parameter in trainer.parts.state.parameters():
        parameter.grad.fill_(3e38)
    assert nonfinite_guard._find_nonfinite_gradient(trainer) == ""
    name, parameter = list(trainer.parts.state.parameters())[-1]
    parameter.grad.view(-1)[0] = math.inf
    assert nonfinite_guard._find_nonfinite_gradient(trainer) == name
    trainer.close()


@pytest.mark.slow
def test_reports_become_rare(tmp_path: Path) -> None:
    _, _, texts = run(tmp_path, "gradient", "warn", 12)
    assert len([text for text in texts if "FXP523" in text]) == 4  # 1, 2, 4 and 8 in a row


def test_wrong_requests(tmp_path: Path) -> None:
    trainer = new_trainer(optimizer=ADAM)
    with pytest.raises(FxpartError, match="nonfinite must be one of"):
        trainer.fit(rows(), nonfinite="ignore")
    with pytest.raises(FxpartError, match="needs checkpoints"):
        trainer.fit(rows(), nonfinite="rollback")
    assert trainer.fit(rows(2), nonfinite="skip").steps == 2
    assert trainer.accepts_update is None, "the guard belongs to fit"
    trainer.close()


TARGET = """
import fxpart, torch
from torch import nn

BATCH = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), torch.ones(8, 1)


def data():
    for step in range(1, 100):
        yield BATCH[0] * (float("nan") if step == 5 else 1.0), BATCH[1]


def net():
    layers = [nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)]
    return fxpart.Workload(nn.Sequential(*layers), BATCH, nn.functional.mse_loss, data, 8, "adamw")
"""


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nets.py").write_text(TARGET)
    words = ["train", f"{tmp_path / 'nets.py'}:net", "-c", "local:1", "--steps", "8"]
    words += ["--cost-model", "roofline", "--check", "off"]
    assert "the loss of step 5 is nan" in call(capsys, *words)[1]
    run = [*words, "--run", str(tmp_path / "run"), "--every", "3"]
    _, err = call(capsys, *run, "--on-nonfinite", "stop", status=6)
    assert "FXP523" in err and "step 5" in err
    _, err = call(capsys, *run, "--on-nonfinite", "rollback")
    assert "goes back from step 5 to step 4" in err and "8 steps are done and saved" in err
    assert "FXP109" in call(capsys, *words, "--on-nonfinite", "skip", status=2)[1]
