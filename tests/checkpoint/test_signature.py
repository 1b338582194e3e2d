"""Signed manifests: the right key, another one, changed files, and key files that are unusable."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import Sample

from fxpart.checkpoint import folder, manifest_codec
from fxpart.checkpoint.manifest import CheckpointManifest
from fxpart.checkpoint.reader import Checkpoint
from fxpart.checkpoint.signature import SIGNATURE, SigningKey
from fxpart.cli import run as cli
from fxpart.errors import FxpartError


def write_key(path: Path, content: str = "0123456789abcdef" * 2, mode: int = 0o600) -> str:
    path.write_text(content)
    path.chmod(mode)
    return str(path)


@pytest.fixture
def key(tmp_path: Path) -> str:
    return write_key(tmp_path / "key")


@pytest.fixture
def root(tmp_path: Path, key: str) -> Path:
    """Checkpoints of steps 10 and 20 that are signed, and an unsigned one of step 30."""
    root = tmp_path / "run" / "checkpoints"
    for step in (10, 20):
        Sample.make(step).save(root, step, key=SigningKey.load(key))
    Sample.make(30).save(root, 30)
    return root


def refused(path: Path, key: str) -> str:
    """Open with a key; return why it is refused."""
    with pytest.raises(FxpartError) as caught:
        Checkpoint.open(path, SigningKey.load(key))
    assert caught.value.code == "FXP524", caught.value
    return str(caught.value)


def test_what_the_key_has_signed_is_read(root: Path, key: str, tmp_path: Path) -> None:
    path = root / folder.step_name(20)
    assert Checkpoint.open(path, SigningKey.load(key)).verify() == []
    assert Checkpoint.open(path).verify() == []
    with_newline = write_key(tmp_path / "same", Path(key).read_text() + "\n")
    assert Checkpoint.open(path, SigningKey.load(with_newline)).manifest.step == 20


def test_another_key_a_missing_or_a_moved_signature(root: Path, key: str, tmp_path: Path) -> None:
    path, other = root / folder.step_name(20), write_key(tmp_path / "other", "f" * 32)
    assert "another key" in refused(path, other)
    assert f"no {SIGNATURE}" in refused(root / folder.step_name(30), key)
    (path / SIGNATURE).write_bytes((root / folder.step_name(10) / SIGNATURE).read_bytes())
    assert "another key" in refused(path, key)
    (path / SIGNATURE).unlink()
    (path / SIGNATURE).mkdir()
    assert "not a regular file" in refused(path, key)


def test_a_changed_manifest_is_not_decoded(
    root: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own digest is right again, as someone who can write the folder would make it."""
    path = root / folder.step_name(20)
    text = (path / "manifest.json").read_bytes()
    manifest = manifest_codec.decode(text)
    changed = json.loads(text)
    changed["extra"]["epoch"], changed["digest"] = 77, ""
    forged = json.dumps(changed, sort_keys=True, separators=(",", ":")).encode()
    (path / "manifest.json").write_bytes(manifest_codec.insert_digest(forged))
    assert Checkpoint.open(path).manifest.extra["epoch"] == 77 != manifest.extra["epoch"]

    def decode(data: bytes) -> CheckpointManifest:
        raise AssertionError("decoded before it was verified")

    monkeypatch.setattr(manifest_codec, "decode", decode)
    refused(path, key)


def test_a_changed_tensor(root: Path, key: str) -> None:
    path = root / folder.step_name(20)
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    problems = Checkpoint.open(path, SigningKey.load(key)).verify()
    assert [problem.code for problem in problems] == ["FXP510"]


def test_unsigned_ones_push_no_signed_one_out(root: Path, key: str) -> None:
    Sample.make(40).save(root, 40)
    assert folder.prune(root, 2, key=SigningKey.load(key)) == []
    assert [path.name for path in folder.prune(root, 2)] == [
        folder.step_name(20), folder.step_name(10),
    ]  # fmt: skip


def test_an_unsigned_one_of_the_same_step_is_replaced(root: Path, key: str) -> None:
    made = Sample.make(30).save(root, 30, key=SigningKey.load(key))
    assert Checkpoint.open(made, SigningKey.load(key)).verify() == []
    assert any(path.name.startswith(".damaged-") for path in root.iterdir())


@pytest.mark.parametrize(
    ("content", "why"),
    [("", "has 0 bytes"), (" \n\n", "has 0 bytes"), ("secret\n", "has 6 bytes"),
     ("x" * 5000, "more than 4096 bytes")],
)  # fmt: skip
def test_key_files_that_are_no_keys(tmp_path: Path, content: str, why: str) -> None:
    with pytest.raises(FxpartError, match=why) as caught:
        SigningKey.load(write_key(tmp_path / "key", content))
    assert caught.value.code == "FXP109"


def test_a_key_file_that_cannot_be_read(tmp_path: Path) -> None:
    wrong: list[Any] = [tmp_path / "none", tmp_path, 5, "a\0b"]
    for path in wrong:
        with pytest.raises(FxpartError, match="cannot be read") as caught:
            SigningKey.load(path)
        assert caught.value.code == "FXP109"


@pytest.mark.parametrize(("mode", "warned"), [(0o600, 0), (0o400, 0), (0o644, 1), (0o620, 1)])
def test_a_key_file_of_others(tmp_path: Path, mode: int, warned: int) -> None:
    path = write_key(tmp_path / "key", mode=mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = SigningKey.load(path)
    assert loaded is not None and loaded.secret.decode() not in repr(loaded)
    assert len([each for each in caught if "other users" in str(each.message)]) == warned


def test_verify_of_the_command_line(
    root: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["ckpt", "verify", str(root)]) == 0
    Path(key).chmod(0o644)
    capsys.readouterr()
    assert cli(["ckpt", "verify", str(root), "--sign", key]) == 2
    shown = capsys.readouterr()
    assert shown.out.count("whole, signed") == 2 and shown.out.count("not signed by the key") == 1
    assert "FXP524" in shown.err and "can be read by other users" in shown.err
    assert "not signed: there is no" in shown.err and "leave out --sign" in shown.err
    file = root / folder.step_name(10) / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert cli(["ckpt", "verify", str(root), "--sign", key, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(each["signed"], each["whole"]) for each in found] == [
        (False, None), (True, True), (True, False),
    ]  # fmt: skip
    file.unlink()
    assert cli(["ckpt", "verify", str(file.parent), "--sign", key]) == 2
    assert capsys.readouterr().out == f"{file.parent.name}  damaged\n"


def test_convert_verifies_its_source_and_signs_its_target(
    root: Path, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signed = str(root / folder.step_name(20))
    for to, name in (("whole", "all.safetensors"), ("fxpart", "again")):
        target = tmp_path / name
        assert cli(["ckpt", "convert", signed, str(target), "--to", to, "--sign", key]) == 0
    again = tmp_path / "again" / folder.step_name(20)
    assert Checkpoint.open(again, SigningKey.load(key)).verify() == []
    words = ["ckpt", "convert", str(root), str(tmp_path / "none"), "--to", "fxpart", "--sign", key]
    assert cli(words) == 2 and not (tmp_path / "none").exists()
    capsys.readouterr()
    words = [str(tmp_path / "all.safetensors"), str(tmp_path / "hf"), "--to", "hf"]
    assert cli(["ckpt", "convert", *words, "--sign", key]) == 2
    assert "have no signature" in capsys.readouterr().err


def test_pruning_keeps_what_the_key_has_signed(
    root: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unsigned checkpoints that are newer do not displace signed ones."""
    Sample.make(40).save(root, 40)
    assert cli(["ckpt", "prune", str(root), "--dry-run"]) == 0
    assert "step-0000000020 would be removed" in capsys.readouterr().out
    assert cli(["ckpt", "prune", str(root), "--sign", key]) == 0
    assert folder.step_name(10) in (kept := {path.name for path in folder.list_complete(root)})
    assert folder.step_name(20) in kept
