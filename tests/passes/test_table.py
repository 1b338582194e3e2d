"""The table of passes: complete, well-formed, and only importable under its right name."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path

import fxpart.passes
import pytest
from fxpart.passes import PASSES, PREPARE, all_passes

from fxpart.compiler import Level, PassManager, format_pipeline
from fxpart.errors import FxpartError

FOLDER = Path(fxpart.passes.__file__).parent


@pytest.mark.slow
def test_each_file_has_a_line() -> None:
    files = {p.stem for p in FOLDER.glob("*.py")} - {"__init__"}
    assert files == set(PASSES)


@pytest.mark.parametrize("name", sorted(PASSES))
def test_each_pass_is_a_frozen_dataclass_with_its_name(name: str) -> None:
    kind = PASSES[name]
    assert is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert kind.name == name
    assert kind.__module__ == f"fxpart.passes.{name}"
    assert isinstance(kind.requires, Level)
    assert isinstance(kind.ensures, Level)
    assert "name" not in {f.name for f in fields(kind)}


def test_prepare_goes_from_captured_to_annotated() -> None:
    passes = PassManager(all_passes()).parse(PREPARE)
    assert format_pipeline(passes) == PREPARE
    assert passes[0].requires is Level.CAPTURED
    assert passes[-1].ensures is Level.ANNOTATED
    assert all(a.ensures is b.requires for a, b in pairwise(passes))


def test_plain_import_is_refused() -> None:
    if FOLDER.name != "passes" or not (FOLDER.parent / "fxpart").is_dir():
        pytest.skip("passes/ stands beside fxpart/ in a checkout only")
    code = f"import sys; sys.path.insert(0, {str(FOLDER.parent)!r}); import passes"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ImportError: this package is fxpart.passes" in done.stderr


class _Entry:
    """An entry point of another package."""

    def __init__(self, name: str) -> None:
        self.name, self.value = name, "theirs:Pass"

    def load(self) -> type[object]:
        return PASSES["simplify"]


def test_passes_of_other_packages_join(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def points(group: str) -> list[_Entry]:
        asked.append(group)
        return [_Entry("theirs")]

    monkeypatch.setattr(fxpart.passes, "entry_points", points)
    assert all_passes()["theirs"] is PASSES["simplify"]
    assert asked == ["fxpart.passes"]
    assert "theirs" not in PASSES


def test_a_taken_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fxpart.passes, "entry_points", lambda group: [_Entry("simplify")])
    with pytest.raises(FxpartError) as caught:
        all_passes()
    assert caught.value.code == "FXP109"
