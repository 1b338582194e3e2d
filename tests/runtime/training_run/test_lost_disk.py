"""A disk that is full or faulty, a folder that is removed: training continues, and says so."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_folders import heard, read_until, rows, run_commands, same, start_command, train

from fxpart.checkpoint import folder
from fxpart.elastic.progress import is_finished, read_end_reason
from fxpart.errors import EXIT_INCOMPLETE, FxpartError
from fxpart.runtime.checkpointing.saver import Saver
from fxpart.runtime.training_run import json_lines
from fxpart.runtime.training_run.json_lines import JsonLinesAppender
from fxpart.runtime.training_run.ledger import Ledger, LedgerGeneration, check_ledger, read_updates


def break_ledger(
    monkeypatch: pytest.MonkeyPatch, code: int, *, written: int = 0
) -> Callable[[bool], None]:
    """Return a switch: while it is on, lines of the ledger fail after so many bytes."""
    real, broken = json_lines.write, [False]

    def write(file: Any, data: bytes) -> None:
        if broken[0] and file.name and b'"update"' in data:
            real(file, data[:written])
            raise OSError(code, os.strerror(code))
        real(file, data)

    monkeypatch.setattr(json_lines, "write", write)
    return lambda on: broken.__setitem__(0, on)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "written"),
    [(errno.ENOSPC, 0), (errno.ENOSPC, 30), (errno.EIO, 0), (errno.EROFS, 0), (errno.EFBIG, 7)],
)
def test_a_ledger_that_cannot_be_written_for_a_while(
    code: int, written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = break_ledger(monkeypatch, code, written=written)
    with heard() as texts:
        found, state = train(
            tmp_path / "run", 9, after_step=lambda step: switch(3 <= step < 6), every=4
        )
    warned = [text for text in texts if "FXP603" in text]
    assert len(warned) == 1 and os.strerror(code) in warned[0] and "training continues" in warned[0]
    assert found.steps == 9 and found.saved
    summary = check_ledger(tmp_path / "run" / "steps.jsonl")
    assert summary.problems == () and summary.gaps == ((4, 6),)
    assert [u.step for u in read_updates(tmp_path / "run" / "steps.jsonl")] == [1, 2, 3, 7, 8, 9]
    whole, others = train(tmp_path / "whole", 9)
    assert whole.loss == found.loss and same(state, others)
    assert train(tmp_path / "run", 11)[0].steps == 11
    assert check_ledger(tmp_path / "run" / "steps.jsonl").problems == ()


def test_a_ledger_that_fails_ends_a_strict_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = break_ledger(monkeypatch, errno.EIO)
    with pytest.raises(FxpartError, match="FXP603"):
        train(tmp_path, 9, after_step=lambda step: switch(step == 3), strict=True)
    assert [u.step for u in read_updates(tmp_path / "steps.jsonl")] == [1, 2, 3]


@pytest.mark.slow
def test_a_run_that_is_resumed_behind_its_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger failed to the end, so the next start marks what it lacks."""
    switch = break_ledger(monkeypatch, errno.ENOSPC)
    with heard():
        train(tmp_path / "run", 6, after_step=lambda step: switch(step >= 3))
    switch(False)
    train(tmp_path / "run", 8)
    summary = check_ledger(tmp_path / "run" / "steps.jsonl")
    assert summary.problems == () and summary.gaps == ((4, 6),)
    assert same(train(tmp_path / "run", 10)[1], train(tmp_path / "whole", 10)[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["removed", "moved", "replaced by another"])
def test_a_folder_that_goes_while_the_run_trains(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def remove(step: int) -> None:
        if step == 5:
            run.rename(tmp_path / "moved")
            if kind == "removed":
                shutil.rmtree(tmp_path / "moved", ignore_errors=True)  # a save is in progress
            if kind == "replaced by another":
                run.mkdir()

    with heard() as texts:
        found, state = train(run, 9, after_step=remove, every=4)
    warned = [text for text in texts if "removed or moved away" in text]
    assert len(warned) == 1 and "FXP603" in warned[0] and "step 6" in warned[0]
    assert found.saved and folder.newest(run / "checkpoints").manifest.step == 9
    assert check_ledger(run / "steps.jsonl").gaps == ((1, 5),) and is_finished_run(run)
    whole, others = train(tmp_path / "whole", 9)
    assert whole.loss == found.loss and same(state, others)
    # What was created again can be resumed.
    assert same(train(run, 11)[1], train(tmp_path / "whole", 11)[1])
    assert check_ledger(run / "steps.jsonl").problems == ()


def is_finished_run(path: Path) -> bool:
    from fxpart.checkpoint.run_directory import RunDir

    return is_finished(RunDir(path))


def test_a_folder_that_goes_ends_a_strict_run(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def remove(step: int) -> None:
        if step == 5:
            run.rename(tmp_path / "moved")

    with pytest.raises(FxpartError, match="removed or moved away"):
        train(run, 9, after_step=remove, every=4, strict=True)
    assert not (run / "steps.jsonl").exists()


@pytest.mark.slow
def test_a_folder_of_another_run(tmp_path: Path) -> None:
    """The folder is removed, and another run begins there: the first one writes nothing more."""
    run = tmp_path / "run"

    def replace(step: int) -> None:
        if step == 5:
            run.rename(tmp_path / "moved")
            train(run, 3, data=rows(first=50))

    with pytest.raises(FxpartError, match="FXP521"):
        train(run, 9, after_step=replace)
    assert [u.step for u in read_updates(run / "steps.jsonl")] == [1, 2, 3]
    assert folder.newest(run / "checkpoints").manifest.step == 3


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["removed", "one bit", "truncated"])
def test_saved_is_what_can_be_read_back(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each checkpoint of the last step is damaged after it is complete."""
    real = folder.commit

    def commit(*given: Any) -> Path:
        path = real(*given)
        if folder.step_of(path) == 5:
            file = path / "rank-00001.safetensors"
            raw = bytearray(file.read_bytes())
            raw[-1] ^= 1
            file.write_bytes(raw if damage == "one bit" else raw[:-3])
            if damage == "removed":
                shutil.rmtree(path)
        return path

    monkeypatch.setattr(folder, "commit", commit)
    found, _ = train(tmp_path, 5)
    assert found.saved is False and found.steps == 5
    assert read_end(tmp_path) == "not saved" and not is_finished_run(tmp_path)
    monkeypatch.setattr(folder, "commit", real)
    resumed, state = train(tmp_path, 5)
    assert resumed.saved and is_finished_run(tmp_path)
    assert same(state, train(tmp_path.with_name("whole"), 5)[1])


def read_end(path: Path) -> str:
    from fxpart.checkpoint.run_directory import RunDir

    return read_end_reason(RunDir(path))


def test_a_checkpoint_that_is_removed_before_the_end_is_saved_again(tmp_path: Path) -> None:
    """The last step was saved when it was due; nothing is known of the folder since then."""
    real = Saver.confirm
    removed: list[Path] = []

    def confirm(self: Saver, step: int) -> bool:
        self.wait()
        if not removed:
            removed.append(tmp_path / "checkpoints" / folder.step_name(step))
            shutil.rmtree(removed[0])
        return real(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "confirm", confirm)
        found, _ = train(tmp_path, 6)
    assert removed and found.saved and folder.newest(tmp_path / "checkpoints").manifest.step == 6


def test_each_missed_save_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with heard() as texts:
        found, _ = train(tmp_path, 6)
    for step in (0, 2, 4, 6):
        assert any("FXP513" in text and f"step {step}" in text for text in texts), step
    assert found.saved is False


def test_a_line_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    file = JsonLinesAppender(path)
    file.write({"a": 1})
    real = json_lines.write

    def fail(target: Any, data: bytes) -> None:
        real(target, data[:4])
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(json_lines, "write", fail)
    with pytest.raises(FxpartError, match="FXP603"):
        file.write({"b": 2})
    assert path.read_bytes() == b'{"a":1}\n'
    monkeypatch.setattr(os, "ftruncate", None)  # the file cannot be shortened either
    with pytest.raises(TypeError):
        file.write({"b": 2})
    monkeypatch.undo()
    file.write({"c": 3})
    file.close()
    assert path.read_bytes() == b'{"a":1}\n{"b"\n{"c":3}\n'


@pytest.mark.slow
def test_the_chain_of_a_ledger(tmp_path: Path) -> None:
    """It is the same for the same history, whatever generations and repetitions there were."""
    train(tmp_path / "whole", 8)
    with pytest.raises(FxpartError, match="FXP507"):
        train(tmp_path / "parts", 8, after_step=lambda step: 1 / (step != 5))
    train(tmp_path / "parts", 8)
    train(tmp_path / "other", 8, data=rows(first=40))
    chains = {}
    for name in ("whole", "parts", "other"):
        ledger = Ledger(tmp_path / name / "steps.jsonl")
        chains[name] = [ledger.chain_at(step) for step in range(1, 9)]
        ledger.close()
    assert chains["whole"] == chains["parts"] and len(set(chains["whole"])) == 8
    assert not set(chains["whole"]) & set(chains["other"]) and "" not in chains["whole"]
    ledger = Ledger(tmp_path / "whole" / "steps.jsonl")
    ledger.begin(LedgerGeneration(generation=9, after=6, world=2, same=""))
    assert ledger.chain == chains["whole"][5]
    ledger.close()


@pytest.mark.slow
def test_the_command_says_saved_only_if_it_is(tmp_path: Path) -> None:
    """No file may grow any more: the steps are done, and the exit status tells that it is lost."""
    run = tmp_path / "run"
    command = start_command(tmp_path / "nets.py", run, 30, "-c", "local:1", slow=0.03)
    read_until(command, 5)
    resource.prlimit(command.pid, resource.RLIMIT_FSIZE, (1, 1))
    (out,) = run_commands([command])
    assert command.returncode == EXIT_INCOMPLETE, out
    assert "FXP522" in out and "the newest is of step 0" in out and "step   30 " in out
    assert "done and saved" not in out and "internal" not in out
    again = start_command(tmp_path / "nets.py", run, 30, "-c", "local:1")
    (out,) = run_commands([again])
    assert again.returncode == 0 and f"30 steps are done and saved in {run}" in out
    assert check_ledger(run / "steps.jsonl").problems == ()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_launcher_whose_terminal_is_closed(tmp_path: Path) -> None:
    """SIGHUP, and nothing can be printed any more: the ranks save and end, and exit with 0."""
    run = tmp_path / "run"
    command = start_command(
        tmp_path / "nets.py", run, 5000, "--nproc", "2", "--every", "1000", slow=0.03
    )
    read_until(command, 8)
    assert command.stdout is not None
    command.stdout.close()
    command.send_signal(signal.SIGHUP)
    assert command.wait(timeout=60) == 0
    steps = len(read_updates(run / "steps.jsonl"))
    assert folder.newest(run / "checkpoints").manifest.step == steps >= 8


@pytest.mark.slow
def test_output_that_cannot_be_written_does_not_end_training(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        command = start_command(
            tmp_path / "nets.py", tmp_path / "run", 6, "-c", "local:1",
            stdout=full, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert command.wait(timeout=60) == 0
    assert len(read_updates(tmp_path / "run" / "steps.jsonl")) == 6
