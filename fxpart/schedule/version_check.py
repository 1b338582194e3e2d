"""Proof of weight versions: each computation names the version that the lists imply.

Versions are counted action by action, from what has run before on the rank. The code does not use
the formulas of :mod:`fxpart.schedule.versions` and so checks them independently.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fxpart.errors import Problem, error
from fxpart.schedule.action import Action, ActionKind, Schedule
from fxpart.schedule.consistency import describe_position, make_unsafe_problem
from fxpart.schedule.weight_modes import WeightMode

_BACK = (ActionKind.B, ActionKind.I)


def find_version_problems(schedule: Schedule, mode: WeightMode, every: int | None) -> list[Problem]:
    """Return the problems of the versions that a schedule's actions name.

    every: microbatches after whose last backward a stage updates its weights. If it is None, only
    properties independent of it are checked: that each computation names a version, and a backward
    names its forward's version if it reads those weights. Raises FXP109 for every below 1.
    """
    if every is not None and every < 1:
        raise error("FXP109", where=f"every={every}", why="The value must be at least 1.", fix="")
    if every is not None and schedule.replicas and not mode.flush:
        why = "The replicas of a stage share its microbatches, so weight versions are undefined."
        return [make_unsafe_problem("replicas", why, "Use stages without replicas.")]
    applied = None if every is None or mode.flush else AppliedUpdates.count(schedule, every)
    found: list[Problem] = []
    forwards: dict[tuple[int, int], int] = {}
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            if mode.flush or not action.kind.is_compute:
                none = action.version is None
                why = "" if none else "The action names a weight version where there is none."
            elif action.version is None:
                why = "The action does not name the weight version it reads."
            else:
                why = _explain_wrong_version(action, action.version, mode, applied, forwards)
            if why:
                found.append(make_unsafe_problem(describe_position(rank, position, action), why))
    return found


def _explain_wrong_version(
    action: Action,
    version: int,
    mode: WeightMode,
    applied: AppliedUpdates | None,
    forwards: dict[tuple[int, int], int],
) -> str:
    """Return why the computation cannot read that version; empty if it can."""
    key = (action.stage, action.microbatch)
    if applied is not None:
        wanted = applied.wanted(action, mode)
        there = applied.forward.get(key)
        if wanted is not None and version != wanted:
            return f"After the previous actions {mode.name} reads version {wanted}."
        if action.kind is ActionKind.F and there is not None and version > there:
            return f"Only {there} updates have been applied by then."
    elif mode.backward == "forward":
        first = forwards.setdefault(key, version)
        if first != version:
            return f"The forward read version {first}."
    return ""


@dataclass
class AppliedUpdates:
    """Number of updates that a stage has applied when each computation runs.

    every: microbatches per update. ahead: per stage its forwards before its first backward.
    forward, backward: by (stage, microbatch).
    """

    every: int
    ahead: list[int]
    forward: dict[tuple[int, int], int] = field(default_factory=dict)
    backward: dict[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def count(cls, schedule: Schedule, every: int) -> AppliedUpdates:
        """Count over the lists: a stage updates after every ``every`` backwards."""
        found = cls(every, [0] * schedule.stages)
        updates, pending = Counter[int](), Counter[int]()
        for actions in schedule.ranks:
            for action in actions:
                stage, key = action.stage, (action.stage, action.microbatch)
                if action.kind is ActionKind.F:
                    found.forward.setdefault(key, updates[stage])
                    found.ahead[stage] += not updates[stage] and not pending[stage]
                elif action.kind in _BACK:
                    found.backward.setdefault(key, updates[stage])
                if action.kind in (ActionKind.B, ActionKind.W):
                    pending[stage] += 1
                    if pending[stage] == every:
                        updates[stage], pending[stage] = updates[stage] + 1, 0
        return found

    def wanted(self, action: Action, mode: WeightMode) -> int | None:
        """Return the version that the computation reads; None if the lists do not determine it."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is not ActionKind.F and mode.backward != "forward":
            return self.backward.get((stage, microbatch))
        if mode.base == "first stage":
            stage = self.ahead.index(max(self.ahead))
        elif mode.base == "first microbatch":
            microbatch = microbatch // self.every * self.every
        elif mode.base == "delayed" and max(self.ahead) > 1:
            now = self.backward.get((stage, microbatch))
            return None if now is None else max(0, now - 1)
        return self.forward.get((stage, microbatch))
