"""Translation of choices between joint problems with the same blocks."""

from __future__ import annotations

import msgspec

from fxpart.solver.joint.objective import degrees
from fxpart.solver.joint.problem import JointChoice, JointProblem


class ChoiceTranslation:
    """Maps options of ``old`` to those of ``new`` with equal degrees on the same pool."""

    def __init__(self, old: JointProblem, new: JointProblem) -> None:
        """Index the new options."""
        self.old = old
        self._where = {
            (degrees(new, i), option.pool): i
            for i, option in reversed(list(enumerate(new.options)))
        }

    def __call__(self, choice: JointChoice) -> JointChoice:
        """Return the same decisions; raise LookupError if the new problem lacks such an option."""
        old = self.old
        options = tuple(self._where[degrees(old, o), old.options[o].pool] for o in choice.options)
        return msgspec.structs.replace(choice, options=options)
