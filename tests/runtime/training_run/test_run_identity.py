"""In-memory checkpoints belong to the run whose ledger they continue."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from run_folders import heard, rows, same, train, wait_for_saver

from fxpart.checkpoint.run_directory import RunDir
from fxpart.errors import FxpartError
from fxpart.runtime.checkpointing.memory_replicas import read_identity
from fxpart.runtime.training_run.ledger import check_ledger


def fail_at(step: int) -> Any:
    def fail(done: int) -> None:
        if done == step:
            raise RuntimeError("the end")

    return fail


def train_until_failure(folder: Path, step: int, memory: Path, **more: Any) -> None:
    """A run with copies in memory, which ends after a step without its last checkpoint."""
    with pytest.raises(FxpartError, match="the end"):
        train(folder, 40, after_step=fail_at(step), copies=memory, **more)
    wait_for_saver()


def first_step(folder: Path, memory: Path, **more: Any) -> int:
    """The first step of a start."""
    seen: list[int] = []
    train(folder, 12, after_step=seen.append, copies=memory, **more)
    return seen[0]


def test_folders_have_names_of_their_own(tmp_path: Path) -> None:
    """A copy, an empty word, a word of something else: none has the name of another folder."""
    run = RunDir(tmp_path / "a")
    name = read_identity(run)
    assert read_identity(run) == name and len(name) == 16
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    run.path.rename(tmp_path / "moved")
    assert read_identity(RunDir(tmp_path / "moved")) == name
    names = {name, read_identity(RunDir(tmp_path / "b"))}
    for folder, text in (("c", ""), ("d", ""), ("e", "unknown"), ("f", "x/../../y"), ("g", "\xff")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "identity").write_text(text, encoding="latin-1")
        names.add(read_identity(RunDir(tmp_path / folder)))
        assert read_identity(RunDir(tmp_path / folder)) in names
    assert len(names) == 7


@pytest.mark.slow
@pytest.mark.parametrize("newer", [True, False])
def test_a_copy_goes_on_with_its_own_state(newer: bool, tmp_path: Path) -> None:
    """Both have the same memory here: the original's later checkpoint is not the copy's."""
    memory = tmp_path / "memory"
    train_until_failure(tmp_path / "a", 5, memory)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    if newer:
        train_until_failure(tmp_path / "a", 9, memory)
    data = rows(40, first=30)  # the copy has other data from now on
    with heard():
        assert first_step(tmp_path / "b", memory, data=data, check=False) == 5
    summary = check_ledger(tmp_path / "b" / "steps.jsonl")
    assert all("values differ" in problem for problem in summary.problems)


@pytest.mark.slow
def test_a_backup_in_the_same_folder(tmp_path: Path) -> None:
    """The folder is the same, its files are older: memory is ahead of what they say."""
    run, memory = tmp_path / "run", tmp_path / "memory"
    train_until_failure(run, 5, memory)
    shutil.copytree(run, tmp_path / "backup")
    train_until_failure(run, 9, memory)
    for path in run.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(tmp_path / "backup", run, dirs_exist_ok=True)
    assert first_step(run, memory) == 5


@pytest.mark.slow
def test_memory_of_the_same_history_is_used(tmp_path: Path) -> None:
    """The disk lost its checkpoints, and the ledger is there: nothing is repeated twice."""
    run, memory = tmp_path / "run", tmp_path / "memory"
    train_until_failure(run, 9, memory)
    shutil.rmtree(run / "checkpoints")
    assert first_step(run, memory) == 9
    assert check_ledger(run / "steps.jsonl").problems == ()
    assert same(train(run, 14)[1], train(tmp_path / "whole", 14)[1])


@pytest.mark.slow
def test_memory_without_a_history_is_not_used(tmp_path: Path) -> None:
    """A ledger that was lost says nothing of the memory."""
    run, memory = tmp_path / "run", tmp_path / "memory"
    train_until_failure(run, 9, memory)
    shutil.rmtree(run / "checkpoints")
    (run / "steps.jsonl").unlink()
    assert first_step(run, memory) == 1


@pytest.mark.slow
def test_memory_is_given_back_only_if_the_disk_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fxpart.runtime.checkpointing.saver import Saver

    memory = tmp_path / "memory"
    monkeypatch.setattr(Saver, "confirm", lambda self, step: self.wait())
    found, _ = train(tmp_path / "run", 4, copies=memory)
    assert not found.saved and len(list(memory.iterdir())) == 2
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    found, state = train(tmp_path / "run", 4, copies=memory)
    assert found.saved and not memory.exists()
    assert same(state, train(tmp_path / "whole", 4)[1])


@pytest.mark.slow
def test_a_ledger_of_another_run(tmp_path: Path) -> None:
    """Refused if it contradicts the checkpoint, reported if it only lacks steps."""
    run, ledger = tmp_path / "run", tmp_path / "run" / "steps.jsonl"
    train(tmp_path / "other", 6, data=rows(first=50))
    _, whole = train(tmp_path / "whole", 8)
    train(run, 6)
    own = ledger.read_bytes()
    shutil.copy(tmp_path / "other" / "steps.jsonl", ledger)
    with pytest.raises(FxpartError, match="FXP520[\\s\\S]*was replaced or changed"):
        train(run, 8)
    lines = own.splitlines(keepends=True)
    for left in (lines[:-2], []):
        ledger.write_bytes(b"".join(left))
        with heard() as texts:
            assert same(train(run, 8)[1], whole)
        assert any("lacks step" in text for text in texts)
        assert check_ledger(ledger).gaps and not check_ledger(ledger).problems
        shutil.rmtree(run)
        train(run, 6)
    ledger.write_bytes(own.replace(b'"rows":4', b'"rows":5', 1))
    with pytest.raises(FxpartError, match="FXP520"):
        train(run, 8)


@pytest.mark.slow
def test_a_checkpoint_that_could_not_be_read(tmp_path: Path) -> None:
    """The run has trained its steps again, with other losses: it is not used when it can be."""
    train(tmp_path, 6, every=3)
    newest = tmp_path / "checkpoints" / "step-0000000006" / "manifest.json"
    content = newest.read_text()
    newest.write_text("")  # as a network file system may show it for a moment

    def fail(step: int) -> None:
        if step == 7:
            raise OSError("lost")

    with heard() as texts, pytest.raises(FxpartError, match="lost"):
        train(tmp_path, 9, data=rows(first=3), every=9, check=False, after_step=fail)
    assert any("FXP510" in text for text in texts)
    for each in tmp_path.glob("checkpoints/*step-0000000006*/manifest.json"):
        each.write_text(content)
    found, _ = train(tmp_path, 9, data=rows(first=3), every=3)
    assert found.saved and check_ledger(tmp_path / "steps.jsonl").gaps == ()


@pytest.mark.slow
def test_a_ledger_that_is_replaced_during_the_run(tmp_path: Path) -> None:
    ledger = tmp_path / "run" / "steps.jsonl"
    train(tmp_path / "other", 6, data=rows(first=50))

    def replace(step: int) -> None:
        if step == 3:
            copied = shutil.copy(tmp_path / "other" / "steps.jsonl", tmp_path / "copied")
            Path(copied).replace(ledger)

    with heard() as texts:
        train(tmp_path / "run", 6, after_step=replace)
    assert any("replaced, removed or moved away before step 4" in text for text in texts)
    summary = check_ledger(ledger)
    assert (summary.gaps, summary.steps, summary.problems) == (((1, 3),), 3, ())
    assert len(check_ledger(ledger.with_suffix(".replaced.jsonl")).epochs) == 1
