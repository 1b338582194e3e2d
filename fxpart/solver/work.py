"""The clock of time limits: CPU seconds of this process, so that a busy machine changes no plan.

CP-SAT counts wall time within one call; where it decides something, an effort limits it first.
"""

from __future__ import annotations

import time


def work_seconds() -> float:
    """Return the CPU seconds of this process, all threads together."""
    return time.process_time()


class SolverTimeout(Exception):  # noqa: N818 - a signal between parts of the solver, not a failure
    """The deadline passed during a run."""
