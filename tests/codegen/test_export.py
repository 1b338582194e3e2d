"""Exported programs: same bytes, verified before they are executed, equal to the live ones."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stage_runs import Stages, assigned, captured_of, prepared
from torch import nn

from fxpart.codegen.materialization import constants_of, materialize
from fxpart.codegen.program_archive import export, load_exported
from fxpart.errors import FxpartError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)) * self.scale + torch.tensor([0.5, 1.0, 2.0]))


@pytest.fixture(scope="module")
def built() -> Stages:
    torch.manual_seed(0)
    captured = captured_of(Model(), (torch.randn(4, 3),), torch.mean, batch_size=4)
    return Stages(captured, assigned(prepared(captured), (0, 1)))


def write(built: Stages, folder: Path, **changes: Any) -> tuple[Path, ...]:
    given: dict[str, Any] = {
        "plan": '{"a": 1}\n',
        "spec": built.spec,
        "sources": built.sources,
        "actions": ["0F0\n0B0\n", "1F0\n1B0\n"],
        "constants": constants_of(built.spec, built.captured.state),
        **changes,
    }
    return export(folder, **given)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.slow
def test_the_same_program_gives_the_same_bytes(built: Stages, tmp_path: Path) -> None:
    paths = write(built, tmp_path / "a")
    write(built, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert {p.name for p in paths} == set(contents(tmp_path / "a"))
    assert [p.name for p in paths] == [
        "plan.json",
        "program.json",
        "stage0.py",
        "stage1.py",
        "rank0.txt",
        "rank1.txt",
        "constants.safetensors",
        "manifest.json",
    ]
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b"}  # nothing beside


def test_it_comes_back_and_computes_the_same(built: Stages, tmp_path: Path) -> None:
    write(built, tmp_path / "a")
    back = load_exported(tmp_path / "a")
    assert back.spec == built.spec
    assert (back.plan, back.actions) == ('{"a": 1}\n', ("0F0\n0B0\n", "1F0\n1B0\n"))
    weights = {n: built.captured.state[n] for n in built.captured.parameters}
    for module in back.modules.values():
        materialize(module, back.spec, weights, constants=back.constants)
    x = torch.randn(5, 3)
    value: Any = (x,)
    expected: Any = (x,)
    for index, live in enumerate(built.modules):
        value, expected = back.modules[index](0, *value), live(0, *expected)
    assert torch.equal(value[0], expected[0])


def test_only_the_stages_that_are_wanted(built: Stages, tmp_path: Path) -> None:
    write(built, tmp_path / "a")
    assert list(load_exported(tmp_path / "a", stages=[1]).modules) == [1]


def test_an_older_program_is_replaced_whole(built: Stages, tmp_path: Path) -> None:
    write(built, tmp_path / "a", actions=["x"] * 5)
    write(built, tmp_path / "a")
    assert "rank4.txt" not in contents(tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    load_exported(tmp_path / "a")


def test_a_folder_of_something_else_is_left_alone(built: Stages, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FxpartError) as caught:
        write(built, tmp_path)
    assert caught.value.code == "FXP603"
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    write(built, tmp_path / "a")
    (tmp_path / "a" / "notes.md").write_text("mine")
    with pytest.raises(FxpartError):
        write(built, tmp_path / "a")
    assert (tmp_path / "a" / "notes.md").exists()


def test_a_changed_module_is_never_executed(built: Stages, tmp_path: Path) -> None:
    write(built, tmp_path / "a")
    marker = tmp_path / "executed"
    with (tmp_path / "a" / "stage1.py").open("a") as file:
        file.write(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(FxpartError) as caught:
        load_exported(tmp_path / "a")
    assert caught.value.code == "FXP505"
    assert "stage1.py" in str(caught.value)
    assert not marker.exists()


def test_a_signed_program_is_verified_first(built: Stages, tmp_path: Path) -> None:
    """Whoever can write the folder can make its digests right again, but not its signature."""
    key, other = tmp_path / "key", tmp_path / "other"
    for path, letter in ((key, "a"), (other, "b")):
        path.write_text(letter * 32)
        path.chmod(0o600)
    paths = write(built, tmp_path / "a", sign=key)
    assert [p.name for p in paths[-2:]] == ["manifest.json", "manifest.sig"]
    load_exported(tmp_path / "a", sign=key)
    load_exported(tmp_path / "a")
    marker, manifest = tmp_path / "executed", tmp_path / "a" / "manifest.json"
    original = manifest.read_bytes()
    source = (tmp_path / "a" / "stage1.py").read_bytes()
    (tmp_path / "a" / "stage1.py").write_bytes(source + f"open({str(marker)!r}, 'w')\n".encode())
    with pytest.raises(FxpartError, match="FXP505"):
        load_exported(tmp_path / "a", sign=key)
    changed = json.loads(original)
    digest = hashlib.sha256((tmp_path / "a" / "stage1.py").read_bytes()).hexdigest()
    changed["files"]["stage1.py"] = digest
    manifest.write_text(json.dumps(changed))
    with pytest.raises(FxpartError, match="FXP524"):
        load_exported(tmp_path / "a", sign=key)
    assert not marker.exists()
    load_exported(tmp_path / "a")
    assert marker.exists(), "without a key the digests alone decide"
    manifest.write_bytes(b"{")
    with pytest.raises(FxpartError, match="FXP524"):
        load_exported(tmp_path / "a", sign=key)
    manifest.write_bytes(original)
    with pytest.raises(FxpartError, match="FXP524"):
        load_exported(tmp_path / "a", sign=other)
    write(built, tmp_path / "a")  # replaces the signed program
    with pytest.raises(FxpartError, match=r"there is no manifest\.sig"):
        load_exported(tmp_path / "a", sign=key)


@pytest.mark.slow
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_flipped_byte_is_found(data: Any, built: Stages, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("program") / "a"
    write(built, folder)
    files = contents(folder)
    name = data.draw(st.sampled_from(sorted(set(files) - {"manifest.json"})))
    changed = bytearray(files[name])
    place = data.draw(st.integers(0, len(changed) - 1))
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    (folder / name).write_bytes(changed)
    with pytest.raises(FxpartError) as caught:
        load_exported(folder)
    assert caught.value.code == "FXP505"
    assert name in str(caught.value)


def test_all_damaged_files_are_named(built: Stages, tmp_path: Path) -> None:
    write(built, tmp_path / "a")
    (tmp_path / "a" / "stage0.py").unlink()
    (tmp_path / "a" / "rank1.txt").write_text("")
    with pytest.raises(FxpartError) as caught:
        load_exported(tmp_path / "a")
    assert {Path(p.where).name for p in caught.value.problems} == {"stage0.py", "rank1.txt"}


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"not json",
        b"[" * 100_000,
        b'{"format": "other", "version": 2, "files": {}}',
        b'{"format": "fxpart-program", "version": 1, "files": {}}',
        b'{"format": "fxpart-program", "version": 2, "files": {}}',
        b'{"format": "fxpart-program", "version": 2, "files": {"../x.py": "00"}}',
        b'{"format": "fxpart-program", "version": 2, "files": {"/etc/passwd": "00"}}',
    ],
)
def test_broken_manifests(tmp_path: Path, manifest: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(manifest)
    with pytest.raises(FxpartError) as caught:
        load_exported(tmp_path)
    assert caught.value.code == "FXP505"


def test_a_program_that_does_not_fit_together(built: Stages, tmp_path: Path) -> None:
    write(built, tmp_path / "a", sources=built.sources)
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    del manifest["files"]["stage1.py"]
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FxpartError) as caught:
        load_exported(tmp_path / "a")
    assert "stage1.py" in str(caught.value)
    with pytest.raises(FxpartError):
        load_exported(tmp_path / "nowhere")
