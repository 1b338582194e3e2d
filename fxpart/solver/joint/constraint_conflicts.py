"""What a user has asked of a joint problem, one by one, to find which of it cannot hold together.

With the wishes as they were written, each is a limit; of a problem alone, its pins, cuts and
numbers of stages are. A conflict is found by deletion filtering: a limit without which the rest
still cannot hold is no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from fxpart.errors import FxpartError
from fxpart.solver.joint.constraints.apply import apply_constraints
from fxpart.solver.joint.constraints.parse import PlanConstraint
from fxpart.solver.joint.feasibility import find_feasible_joint_choice
from fxpart.solver.joint.problem import JointProblem, StagePin

_PLENTY = 2**55  # bytes: more memory than anything needs, and sums of it are exact
Change = Callable[[JointProblem], JointProblem]


class RelaxableConstraints:
    """The limits of a problem, as words and as what can be dropped."""

    def __init__(
        self, problem: JointProblem, wider: JointProblem | None, wishes: Sequence[PlanConstraint]
    ) -> None:
        """wishes: those that made ``problem`` out of ``wider``; without them, its own limits."""
        self.wishes = tuple(wishes) if wider is not None else ()
        self.base = wider if wider is not None and self.wishes else problem
        self._drops = [] if self.wishes else _own(problem)
        self.texts = [str(w) for w in self.wishes] or [text for text, _ in self._drops]

    def problem(
        self, dropped: Collection[int] = (), change: Change | None = None
    ) -> JointProblem | None:
        """The problem without these limits, changed; None where a limit leaves nothing of it.

        A change comes before the limits, so that none of those kept is lost by it.
        """
        changed = change(self.base) if change is not None else self.base
        if self.wishes:
            kept = [w for i, w in enumerate(self.wishes) if i not in dropped]
            try:
                return apply_constraints(changed, kept)
            except FxpartError:
                return None
        if self.base.min_stages == self.base.max_stages:  # a fixed number stays fixed
            changed = msgspec.structs.replace(changed, max_stages=self.base.max_stages)
        for i in sorted(dropped):
            changed = self._drops[i][1](changed)
        return changed

    def fit(
        self,
        deadline: float,
        dropped: Collection[int] = (),
        change: Change | None = None,
    ) -> bool:
        """Whether anything fits then."""
        problem = self.problem(dropped, change)
        return problem is not None and find_feasible_joint_choice(problem, deadline) is not None

    def conflict(
        self, deadline: float, change: Change | None = None, given_up: Collection[int] = ()
    ) -> list[int]:
        """Limits that cannot hold together, none of them needless; [] where others are to blame.

        given_up: limits that are out already. Nothing may fit with all the others. Raises
        :class:`~fxpart.solver.suffix_dp.SolverTimeout`.
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
    """The problem with more memory than anything needs."""
    pools = tuple(msgspec.structs.replace(p, memory=_PLENTY) for p in problem.pools)
    return msgspec.structs.replace(problem, pools=pools)


def _own(problem: JointProblem) -> list[tuple[str, Change]]:
    """(words, how to drop it) of the limits that a problem has by itself."""
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
    first, last = problem.blocks[pin.first], problem.blocks[pin.last]
    return f"{first if first == last else f'{first} … {last}'} on stage {pin.stage}"


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
