"""Annotation files: TOML or JSON, independent of the model's source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fxpart.annotations.entry_syntax import (
    AnnotationKey,
    read_placements,
    read_strategies,
    text_problems,
)
from fxpart.errors import FxpartError, Problem, error, quoted
from fxpart.files import from_json, read_bytes, toml
from fxpart.sharding import Mesh

FORMAT = "fxpart annotations 1"
MAX_BYTES = 64 << 20
_FIELDS = ("format", "mesh", "annotations", "origins")


def load_annotations(path: str | Path) -> dict[str, str]:
    """Load the annotations of a ``.toml`` or ``.json`` file as key -> placements.

    The file has a table ``annotations`` and optionally ``mesh`` ("dp=2,tp=2"), which must contain
    every axis. Raise FXP111 with all problems.
    """
    path = Path(path)
    if path.suffix not in (".toml", ".json"):
        raise _unreadable(path, "the suffix is not .toml or .json")
    try:
        data = read_bytes(path, MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise _unreadable(path, str(cause)) from cause
    return parse_annotations(data, path.suffix, str(path))


def parse_annotations(data: str, suffix: str = ".toml", where: str = "the text") -> dict[str, str]:
    """Parse the text of an annotation file; see :func:`load_annotations`."""
    try:
        held: Any = toml(data) if suffix == ".toml" else from_json(data)
    except (ValueError, RecursionError) as cause:
        raise _unreadable(where, str(cause)) from cause
    entries = held.get("annotations") if isinstance(held, dict) else None
    if not isinstance(entries, dict):
        raise _unreadable(where, "it has no table `annotations`")
    problems = [
        Problem("FXP111", where, f"{quoted(name)} is not known", f"there are {', '.join(_FIELDS)}")
        for name in held
        if name not in _FIELDS
    ]
    if held.get("format", FORMAT) != FORMAT:
        why = f"format {quoted(held['format'])} is not known"
        problems.append(Problem("FXP111", where, why, f"write {FORMAT!r}"))
    faults = text_problems(entries)
    problems += faults
    if not faults and "mesh" in held:
        problems += _axis_problems(held["mesh"], entries, where)
    if problems:
        raise FxpartError(problems)
    return {str(key): str(text) for key, text in entries.items()}


def _axis_problems(mesh: Any, entries: dict[str, str], where: str) -> list[Problem]:
    """Return problems of an invalid mesh, and of axes that it lacks."""
    try:
        names = Mesh.parse(mesh if isinstance(mesh, str) else quoted(mesh)).names
    except FxpartError as cause:
        return [Problem("FXP111", f"{where}, mesh", cause.problems[0].why, cause.problems[0].fix)]
    found = []
    for key, text in entries.items():
        axes = (read_strategies if AnnotationKey.parse(key).kind == "op" else read_placements)(text)
        for axis in axes:
            if axis not in names:
                why = f"the mesh has no axis {quoted(axis)}, only {', '.join(names) or 'none'}"
                found.append(
                    Problem(
                        "FXP111", f"annotation {quoted(key)}", why, "use one of the mesh's axes"
                    )
                )
    return found


def _unreadable(where: str | Path, why: str) -> FxpartError:
    fix = 'write [annotations] and lines such as "layers.*.up.weight" = "tp:S(0)"'
    return error("FXP111", where=str(where), why=why, fix=fix)
