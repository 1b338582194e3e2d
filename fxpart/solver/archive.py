"""A partition problem as JSON, to keep and to solve again elsewhere: numbers only, no model."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fxpart.errors import error
from fxpart.solver.problem import PartitionProblem
from fxpart.solver.validate import check_problem


def problem_to_json(problem: PartitionProblem) -> bytes:
    """The problem as canonical JSON: sorted keys, equal bytes for equal problems."""
    return msgspec.json.encode(problem, order="sorted") + b"\n"


def problem_from_json(data: bytes | str, where: str = "problem") -> PartitionProblem:
    """The problem that :func:`problem_to_json` wrote; ``where`` names its source in errors.

    Raises FXP206 for text that is no problem, with every fault of its numbers.
    """
    try:
        problem = msgspec.json.decode(data, type=PartitionProblem)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError) as failure:
        raise error(
            "FXP206", where=where, why=str(failure), fix="archive the problem again"
        ) from None
    check_problem(problem)
    return problem


def save_problem(problem: PartitionProblem, path: str | Path) -> None:
    """Write the problem as JSON; raises FXP603 if the file cannot be written."""
    try:
        Path(path).write_bytes(problem_to_json(problem))
    except OSError as failure:
        raise error(
            "FXP603",
            where=str(path),
            why=failure.strerror or str(failure),
            fix="choose another path",
        ) from None


def load_problem(path: str | Path) -> PartitionProblem:
    """Read a problem that :func:`save_problem` wrote; raises FXP206 if that is not possible."""
    try:
        data = Path(path).read_bytes()
    except OSError as failure:
        raise error(
            "FXP206", where=str(path), why=failure.strerror or str(failure), fix="check the path"
        ) from None
    return problem_from_json(data, str(path))
