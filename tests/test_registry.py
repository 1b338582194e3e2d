"""The registry: order, unknown and taken names, entry points, lazily imported entries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fxpart.errors import FxpartError, error
from fxpart.registry import LazyEntry, Registry


def _package(folder: Path, name: str, points: str, code: str, group: str = "fxtest.things") -> None:
    """Write an installed package: a module and its metadata."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{points}\n")


def test_builtin_entries_keep_their_order_and_others_are_sorted():
    things = Registry("thing", {"z": 1, "a": 2})
    things.register("y", 3)
    things.register("b", 4)
    assert list(things.items()) == [("z", 1), ("a", 2), ("b", 4), ("y", 3)]
    assert things.builtin == ("z", "a") and len(things) == 4 and "y" in things
    things.unregister("y")
    assert "y" not in things and things.get("y") is None
    with pytest.raises(KeyError):
        things.unregister("z")


def test_unknown_name_lists_the_known_ones():
    things = Registry("thing", {"z": 1, "a": 2})
    assert things.lookup("a", where="thing='a'") == 2
    for wrong in ("c", None, 3, ["a"]):
        with pytest.raises(FxpartError, match=r"Unknown thing(.|\n)*z, a") as caught:
            things.lookup(wrong, where="x")
        assert caught.value.code == "FXP109"
    with pytest.raises(FxpartError) as caught:
        things.lookup("c", where="x", code="FXP303")
    assert caught.value.code == "FXP303"


def test_taken_name_is_an_error_and_the_same_object_is_not():
    things = Registry("thing", {"a": [1]})
    mine = things.register("b", [2])
    assert things.register("b", mine) is mine
    for name in ("a", "b"):
        with pytest.raises(FxpartError, match="exists already"):
            things.register(name, [2])
    for name in ("", " c", 5):
        with pytest.raises(FxpartError, match="FXP109"):
            things.register(name, [2])


def test_check_rejects_an_entry():
    def check(name, entry):
        if not isinstance(entry, int):
            raise error("FXP109", where=name, why="not a number")

    things = Registry("thing", {"a": 1}, check=check)
    with pytest.raises(FxpartError, match="not a number"):
        things.register("b", "text")
    assert list(things) == ["a"]


def test_lazy_entry_is_imported_on_first_use():
    things = Registry("thing", {"a": LazyEntry("fractions:Fraction"), "b": LazyEntry("nowhere:x")})
    assert "b" in things and list(things) == ["a", "b"]
    from fractions import Fraction

    assert things["a"] is Fraction and things["a"] is Fraction
    with pytest.raises(ModuleNotFoundError):
        things["b"]


def test_installed_package_adds_entries(tmp_path, monkeypatch):
    _package(tmp_path, "fxtest_one", "d = fxtest_one:D\nbroken = fxtest_one:missing", "D = 4\n")
    monkeypatch.syspath_prepend(tmp_path)
    things = Registry("thing", {"z": 1}, group="fxtest.things")
    assert things["z"] == 1 and "fxtest_one" not in sys.modules
    assert list(things) == ["z", "broken", "d"] and "fxtest_one" not in sys.modules
    assert things["d"] == 4 and things["d"] == 4
    with pytest.raises(FxpartError, match=r"fxtest.things(.|\n)*cannot be imported"):
        things["broken"]
    with pytest.raises(FxpartError, match="exists already"):
        things.register("d", 5)


@pytest.mark.parametrize("name", ["z", "d"])
def test_installed_package_takes_no_used_name(tmp_path, monkeypatch, name):
    _package(tmp_path, "fxtest_two", "d = fxtest_two:D", "D = 4\n")
    _package(tmp_path, "fxtest_three", f"{name} = fxtest_three:E", "E = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    things = Registry("thing", {"z": 1}, group="fxtest.things")
    with pytest.raises(FxpartError, match="exists already"):
        list(things)


def test_registry_imports_neither_torch_nor_ortools():
    code = "import sys, fxpart.registry; print({'torch', 'ortools', 'click'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
