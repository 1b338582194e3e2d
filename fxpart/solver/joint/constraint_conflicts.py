"""Conflicting constraints of a joint problem, found one by one.

If the user's constraints are known, each is a limit; otherwise the problem's pins, cuts and numbers
of stages are. A conflict is found by deletion filtering: a limit without which the remaining limits
still conflict is not part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from fxpart.errors import FxpartError
from fxpart.solver.infeasible import describe_blocks
from fxpart.solver.joint.constraints.apply import apply_constraints
from fxpart.solver.joint.constraints.parse import PlanConstraint
from fxpart.solver.joint.feasibility import find_feasible_joint_choice
from fxpart.solver.joint.objective import JointEvaluation, evaluate
from fxpart.solver.joint.problem import JointProblem, StagePin

_PLENTY = 2**55  # bytes: more memory than anything needs; sums of it are exact
Change = Callable[[JointProblem], JointProblem]


class RelaxableConstraints:
    """The limits of a problem, each with a description and a relaxation."""

    def __init__(
        self,
        problem: JointProblem,
        wider: JointProblem | None,
        constraints: Sequence[PlanConstraint],
    ) -> None:
        """Collect the limits.

        constraints: the constraints that made ``problem`` out of ``wider``; without them, the
        problem's own limits.
        """
        self.constraints = tuple(constraints) if wider is not None else ()
        self.base = wider if wider is not None and self.constraints else problem
        self._drops = [] if self.constraints else _own(problem)
        self.texts = [str(w) for w in self.constraints] or [text for text, _ in self._drops]

    def problem(
        self, dropped: Collection[int] = (), change: Change | None = None
    ) -> JointProblem | None:
        """Return the problem without these limits, changed; None if a limit leaves no choice.

        A change is applied before the limits, so that all remaining limits apply to it.
        """
        changed = change(self.base) if change is not None else self.base
        if self.constraints:
            kept = [w for i, w in enumerate(self.constraints) if i not in dropped]
            try:
                return apply_constraints(changed, kept)
            except FxpartError:
                return None
        if self.base.min_stages == self.base.max_stages:  # a fixed number of stages stays fixed
            changed = msgspec.structs.replace(changed, max_stages=self.base.max_stages)
        for i in sorted(dropped):
            changed = self._drops[i][1](changed)
        return changed

    def find(
        self, deadline: float, dropped: Collection[int] = (), change: Change | None = None
    ) -> JointEvaluation | None:
        """Return the evaluation of any choice that fits then, or None."""
        problem = self.problem(dropped, change)
        choice = None if problem is None else find_feasible_joint_choice(problem, deadline)
        return None if problem is None or choice is None else evaluate(problem, choice)

    def fit(
        self, deadline: float, dropped: Collection[int] = (), change: Change | None = None
    ) -> bool:
        """Return whether any choice fits then."""
        return self.find(deadline, dropped, change) is not None

    def conflict(
        self, deadline: float, change: Change | None = None, given_up: Collection[int] = ()
    ) -> list[int]:
        """Return a minimal set of limits that conflict; [] if limits are not the cause.

        given_up: limits that are already relaxed. Precondition: nothing fits with all the others.
        Raises :class:`~fxpart.solver.work.SolverTimeout`.
        """
        everything = range(len(self.texts))
        if not self.fit(deadline, everything, change):
            return []
        dropped = list(given_up)
        for i in everything:
            if i not in dropped and not self.fit(deadline, [*dropped, i], change):
                dropped.append(i)
        return [i for i in everything if i not in dropped]


def with_unlimited_memory(problem: JointProblem) -> JointProblem:
    """Return the problem with more memory than anything needs."""
    pools = tuple(msgspec.structs.replace(p, memory=_PLENTY) for p in problem.pools)
    return msgspec.structs.replace(problem, pools=pools)


def _own(problem: JointProblem) -> list[tuple[str, Change]]:
    """Return (description, relaxation) of the limits of the problem itself."""
    limits: list[tuple[str, Change]] = [
        (_pin(problem, pin), _without_pin(pin)) for pin in problem.pins
    ]
    limits += [
        (f"a cut after {problem.blocks[block]}", _without_cut(block)) for block in problem.cut_after
    ]
    n = len(problem.blocks)
    if 1 < problem.min_stages == problem.max_stages:
        limits.append((f"{problem.min_stages} stages", _stages(1, n)))
    else:
        if problem.min_stages > 1:
            limits.append((f"at least {problem.min_stages} stages", _stages(1, None)))
        if problem.max_stages < n:
            limits.append((f"at most {problem.max_stages} stages", _stages(None, n)))
    if problem.uniform:
        limits.append(("the same degrees on every stage", _uneven))
    return limits


def _pin(problem: JointProblem, pin: StagePin) -> str:
    return f"{describe_blocks(problem.blocks, pin.first, pin.last)} on stage {pin.stage}"


def _without_pin(pin: StagePin) -> Change:
    return lambda p: msgspec.structs.replace(p, pins=tuple(x for x in p.pins if x != pin))


def _without_cut(block: int) -> Change:
    return lambda p: msgspec.structs.replace(
        p, cut_after=tuple(b for b in p.cut_after if b != block)
    )


def _stages(least: int | None, most: int | None) -> Change:
    return lambda p: msgspec.structs.replace(
        p,
        min_stages=p.min_stages if least is None else least,
        max_stages=p.max_stages if most is None else most,
    )


def _uneven(problem: JointProblem) -> JointProblem:
    return msgspec.structs.replace(problem, uniform=False)
