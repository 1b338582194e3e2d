"""Runs with a signing key: they resume from what the key has signed, and from nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from run_folders import heard, new_trainer, rows, run_commands, same, start_command, train

from fxpart.checkpoint import folder
from fxpart.checkpoint.signature import SIGNATURE
from fxpart.cli import run as cli
from fxpart.errors import FxpartError


def write_key(path: Path, letter: str = "k", mode: int = 0o600) -> Path:
    path.write_text(letter * 32)
    path.chmod(mode)
    return path


def refused(code: str, *arguments: Any, **options: Any) -> str:
    with pytest.raises(FxpartError) as caught:
        train(*arguments, **options)
    assert caught.value.code == code, caught.value
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["", "stash"])
def test_only_signed_checkpoints_are_resumed(tmp_path: Path, weights: str) -> None:
    key, run = write_key(tmp_path / "key"), tmp_path / "run"
    given: Any = {"trainer": {"weights": weights}} if weights else {}
    whole = train(tmp_path / "whole", 8, **given)[1]
    train(run, 4, sign=key, **given)
    saved = folder.list_complete(run / "checkpoints")
    assert saved and all((path / SIGNATURE).exists() for path in saved)
    assert "another key" in refused("FXP524", run, 8, sign=write_key(tmp_path / "other", "o"))
    signature = saved[0] / SIGNATURE
    kept = signature.read_bytes()
    signature.unlink()
    refused("FXP524", run, 8, sign=key, **given)
    signature.write_bytes(kept)
    assert same(train(run, 8, sign=key, **given)[1], whole)


@pytest.mark.slow
def test_an_unsigned_run_needs_to_be_signed_first(tmp_path: Path) -> None:
    key, run = write_key(tmp_path / "key"), tmp_path / "run"
    train(run, 4)
    refused("FXP524", run, 6, sign=key)
    assert train(run, 6)[0].steps == 6


@pytest.mark.slow
def test_the_key_is_checked_before_the_folder_is_touched(tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    assert "0 bytes" in refused("FXP109", tmp_path / "run", 4, sign=tmp_path / "key")
    assert not (tmp_path / "run" / "generations.jsonl").exists()
    with heard() as texts:
        train(tmp_path / "run", 2, sign=write_key(tmp_path / "key", mode=0o644))
    assert [text for text in texts if "read by other users" in text]


@pytest.mark.slow
def test_copies_in_memory_are_verified(tmp_path: Path) -> None:
    """The disk is lost; the copies are of this run, but a signature is not."""
    key, run, memory = write_key(tmp_path / "key"), tmp_path / "run", tmp_path / "memory"
    whole = train(tmp_path / "whole", 8)[1]

    def lose(step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, 8, sign=key, copies=memory, after_step=lose)
    copies = sorted(memory.glob("*/step-*"), key=str) or sorted(memory.glob("step-*"))
    assert copies and all((copy / SIGNATURE).exists() for copy in copies)
    shutil.rmtree(run / "checkpoints")
    refused("FXP524", run, 8, sign=write_key(tmp_path / "other", "o"), copies=memory)
    assert same(train(run, 8, sign=key, copies=memory)[1], whole)


@pytest.mark.slow
def test_single_checkpoints(tmp_path: Path) -> None:
    key, other = write_key(tmp_path / "key"), write_key(tmp_path / "other", "o")
    trainer = new_trainer()
    try:
        trainer.save_checkpoint(tmp_path / "saved", {"epoch": 3}, sign=key)
        before = {name: value.clone() for name, value in trainer.state_dict().items()}
        trainer.step(rows(1)[0])
        assert not same(trainer.state_dict(), before)
        for path in (tmp_path / "saved", tmp_path / "saved" / folder.step_name(0)):
            with pytest.raises(FxpartError, match="FXP524"):
                trainer.load_checkpoint(path, sign=other)
            assert trainer.load_checkpoint(path, sign=key) == {"epoch": 3}
        assert same(trainer.state_dict(), before)
    finally:
        trainer.close()


@pytest.mark.slow
def test_the_command_line(tmp_path: Path) -> None:
    """With another key no rank is started, and one error is printed."""
    key, other = write_key(tmp_path / "key"), write_key(tmp_path / "other", "o")
    ended = []
    for given, steps in ((key, 2), (other, 4), (key, 4)):
        command = start_command(
            tmp_path / "nets.py", tmp_path / "run", steps, "--nproc", "2", "--sign", str(given)
        )
        (output,) = run_commands([command])
        ended.append((command.returncode, output.count("FXP524  "), "starting" in output))
    assert ended == [(0, 0, True), (2, 1, False), (0, 0, True)]


def test_sign_needs_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["train", "net.py:net", "--sign", str(write_key(tmp_path / "key"))]) == 2
    assert "--sign" in capsys.readouterr().err
