"""Report of a run of ``fxpart profile``."""

from __future__ import annotations

import msgspec

from fxpart.costmodels.profile_store import Calibration, ContentionProfile, ProfileCompletion


class ProfilingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a run of ``fxpart profile``.

    seconds: of measurement and planning; capture_seconds: before that. ops, stages, trial_runs:
    measured now; known_ops, known_stages, known_trial_runs: found in the profile. calibration,
    contention: of this model, None if there was no time. median_error, worst_error: relative
    errors of stages predicted from ops with calibration. plan: description of the best plan (with
    one rank per stage if none fits the memory). step_seconds: its step time, measured in a trial
    run or predicted. left_out: descriptions of skipped measurements.
    """

    path: str
    model: str
    device: str
    seconds: float
    capture_seconds: float = 0.0
    ops: int = 0
    known_ops: int = 0
    stages: int = 0
    known_stages: int = 0
    trial_runs: int = 0
    known_trial_runs: int = 0
    calibration: Calibration | None = None
    contention: ContentionProfile | None = None
    median_error: float = 0.0
    worst_error: float = 0.0
    plan: str = ""
    step_seconds: float = 0.0
    left_out: tuple[str, ...] = ()

    def settled(self, budget: float) -> ProfileCompletion:
        """Return the record for later runs with an equal or smaller budget."""
        return ProfileCompletion(
            ops=self.ops + self.known_ops,
            stages=self.stages + self.known_stages,
            trial_runs=self.trial_runs + self.known_trial_runs,
            plan=self.plan,
            step_seconds=self.step_seconds,
            median_error=self.median_error,
            worst_error=self.worst_error,
            budget=budget,
            left_out=self.left_out,
        )
