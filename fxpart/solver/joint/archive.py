"""Joint problems as JSON files beside their plans, for later questions without model and torch."""

from __future__ import annotations

from pathlib import Path

from fxpart.solver.archive import decode, encode, read, save_problem
from fxpart.solver.joint.problem import JointProblem
from fxpart.solver.joint.validate import check_joint_problem

__all__ = ["from_json", "get_problem_path", "load", "save", "to_json"]

to_json = encode
save = save_problem


def from_json(data: bytes | str, where: str = "problem") -> JointProblem:
    """Return the problem that :func:`to_json` wrote; raise FXP206 with every invalid number."""
    return decode(data, JointProblem, check_joint_problem, where)


def load(path: str | Path) -> JointProblem:
    """Return the problem in a file; raise FXP206 if it cannot be read or is not a problem."""
    return from_json(read(path), str(path))


def get_problem_path(plan: str | Path) -> Path:
    """Return the path of a plan file's costed problem: ``plan.json`` -> ``plan.problem.json``."""
    path = Path(plan)
    return path.with_name(f"{path.stem}.problem.json")
