"""Benchmarks are not run by the tests: what they import has to be there all the same."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1] / "benchmarks"
FILES = sorted(HERE.glob("*.py"))


def imported(path: Path) -> list[tuple[str, str]]:
    """What a file takes from fxpart, anywhere in it: (module, name)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.partition(".")[0] == "fxpart"
        for alias in node.names
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_they_import_is_there(path: Path) -> None:
    missing = []
    for module, name in imported(path):
        found = importlib.import_module(module)
        if not hasattr(found, name) and not _is_module(f"{module}.{name}"):
            missing.append(f"{module}.{name}")
    assert not missing


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_they_take_from_each_other_is_there(path: Path) -> None:
    """By what the files define, as importing one may do work."""
    missing = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (other := HERE / f"{node.module}.py").is_file()
        for alias in node.names
        if alias.name not in _defined(other)
    ]
    assert not missing


def _defined(path: Path) -> set[str]:
    """The names that a file has at its top."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        for part in ast.walk(node) if not isinstance(node, ast.FunctionDef | ast.ClassDef) else ():
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                found.add(part.id)
            if isinstance(part, ast.Import | ast.ImportFrom):
                found |= {(alias.asname or alias.name).partition(".")[0] for alias in part.names}
    return found


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def test_all_are_run_by_make() -> None:
    """Each that writes a result is a word in the Makefile, so that nobody forgets it."""
    words = re.findall(r"\w+", (HERE.parents[1] / "Makefile").read_text(encoding="utf-8"))
    writing = [path.stem for path in FILES if f'write("{path.stem}"' in path.read_text("utf-8")]
    assert len(writing) > 20
    assert sorted(set(writing) - set(words)) == []
