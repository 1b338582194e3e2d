"""Joint problems as JSON beside their plans, so that questions need no model and no torch."""

from __future__ import annotations

from pathlib import Path

from fxpart.solver.archive import decode, encode, read, save_problem
from fxpart.solver.joint.problem import JointProblem
from fxpart.solver.joint.validate import check_joint_problem

__all__ = ["from_json", "get_problem_path", "load", "save", "to_json"]

to_json = encode
save = save_problem


def from_json(data: bytes | str, where: str = "problem") -> JointProblem:
    """The problem that :func:`to_json` wrote; FXP206 with every fault of its numbers."""
    return decode(data, JointProblem, check_joint_problem, where)


def load(path: str | Path) -> JointProblem:
    """The problem in a file; FXP206 if it cannot be read or is not one."""
    return from_json(read(path), str(path))


def get_problem_path(plan: str | Path) -> Path:
    """Where the costed problem of a plan file lies: ``plan.json`` -> ``plan.problem.json``."""
    path = Path(plan)
    return path.with_name(f"{path.stem}.problem.json")
