"""Problems as JSON, to archive and solve again elsewhere: numbers only, no model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from fxpart.errors import error
from fxpart.files import from_json, read_bytes
from fxpart.solver.problem import PartitionProblem
from fxpart.solver.validate import check_problem

T = TypeVar("T", bound=msgspec.Struct)


def encode(problem: msgspec.Struct) -> bytes:
    """Return any problem as canonical JSON: sorted keys, equal bytes for equal problems."""
    return msgspec.json.encode(problem, order="sorted") + b"\n"


def decode(data: bytes | str, kind: type[T], check: Callable[[T], None], where: str) -> T:
    """Return the problem that :func:`encode` wrote; ``where`` names its source in errors.

    Raises FXP206 for text that is not a problem of this kind, and the errors of ``check``.
    """
    try:
        problem = from_json(data, kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError) as failure:
        raise error(
            "FXP206", where=where, why=str(failure), fix="Archive the problem again."
        ) from None
    check(problem)
    return problem


def save_problem(problem: msgspec.Struct, path: str | Path) -> None:
    """Write any problem as JSON; raises FXP603 if the file cannot be written."""
    try:
        Path(path).write_bytes(encode(problem))
    except OSError as failure:
        raise error(
            "FXP603",
            where=str(path),
            why=failure.strerror or str(failure),
            fix="Choose another path.",
        ) from None


def read(path: str | Path) -> bytes:
    """Return the bytes of a file; raise FXP206 if it cannot be read."""
    try:
        return read_bytes(path)
    except OSError as failure:
        raise error(
            "FXP206", where=str(path), why=failure.strerror or str(failure), fix="Check the path."
        ) from None


def problem_to_json(problem: PartitionProblem) -> bytes:
    """Return the partition problem as canonical JSON."""
    return encode(problem)


def problem_from_json(data: bytes | str, where: str = "problem") -> PartitionProblem:
    """Return the problem that :func:`problem_to_json` wrote; raise FXP206 with every invalid
    number."""
    return decode(data, PartitionProblem, check_problem, where)


def load_problem(path: str | Path) -> PartitionProblem:
    """Read a problem that :func:`save_problem` wrote; raise FXP206 if that is not possible."""
    return problem_from_json(read(path), str(path))
