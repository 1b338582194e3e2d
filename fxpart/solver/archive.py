"""Problems as JSON, to archive and solve again elsewhere: numbers only, without model and torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from fxpart.errors import error
from fxpart.files import from_json, read_bytes
from fxpart.solver.joint.problem import JointProblem
from fxpart.solver.joint.validate import check_joint_problem

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


def decode_joint_problem(data: bytes | str, where: str = "problem") -> JointProblem:
    """Return the joint problem that was encoded; raise FXP206 with every invalid number."""
    return decode(data, JointProblem, check_joint_problem, where)


def load_joint_problem(path: str | Path) -> JointProblem:
    """Return the joint problem in a file; raise FXP206 if there is none."""
    return decode_joint_problem(read(path), str(path))


def get_problem_path(plan: str | Path) -> Path:
    """Return the path of a plan file's costed problem: ``plan.json`` -> ``plan.problem.json``."""
    path = Path(plan)
    return path.with_name(f"{path.stem}.problem.json")
