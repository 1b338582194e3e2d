"""Report of asynchronous stages: staleness, weight versions in memory, prediction errors."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fxpart.runtime.transport.interface import Transport
from fxpart.runtime.weights import StageWeights
from fxpart.schedule.weight_modes import PIPEOPTIM


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one stage, or of one replica with queues.

    staleness: most updates between a forward and its backward; with queues, and its own update.
    updates: so far. copies: most weight versions in memory at once, including the parameters.
    skipped: updates skipped because of non-finite gradients. rho: (microbatch, ρ = |predicted -
    real| / |stale - real|) for measured predictions; above 1, the prediction is worse than the
    stale weights. microbatches: forwards computed since the trainer was created, with queues
    including repetitions for a lost replica.
    """

    stage: int
    staleness: int
    updates: int
    copies: int
    skipped: int = 0
    rho: tuple[tuple[int, float], ...] = ()
    microbatches: int = 0

    @classmethod
    def of(
        cls, stage: int, staleness: int, weights: StageWeights, microbatches: int
    ) -> StageReport:
        """Report on a stage since the last report."""
        return cls(
            stage=stage, staleness=staleness, updates=weights.updates, skipped=weights.skipped,
            copies=weights.most, rho=tuple(weights.rhos()), microbatches=microbatches,
        )  # fmt: skip

    @property
    def mean_rho(self) -> float | None:
        """Return the mean prediction error ratio, or None if none was measured."""
        return sum(rho for _, rho in self.rho) / len(self.rho) if self.rho else None


def gather_stage_reports(
    transport: Transport, mine: Sequence[StageReport]
) -> tuple[StageReport, ...]:
    """Gather the reports of all processes, by stage."""
    raws = transport.exchange_bytes(msgspec.json.encode(mine))
    found = [report for raw in raws for report in msgspec.json.decode(raw, type=list[StageReport])]
    return tuple(sorted(found, key=lambda report: report.stage))


def describe_inaccurate_predictions(rhos: Sequence[float | None]) -> str:
    """Return a warning if predictions are worse than none on some stage, or move nothing, else "".

    rhos: mean ρ of each stage, None if nothing was predicted or measured. A ratio of
    exactly 1 means that every measured prediction was equal to the stale weights.
    """
    unmoved = ", ".join(str(stage) for stage, rho in enumerate(rhos) if rho == 1)
    if unmoved:
        return (
            f"predicted weights were equal to the stale ones on stage {unmoved}: the rule finds "
            "nothing in the optimizer that moves weights without a gradient; use the rule linear "
            "or difference"
        )
    inaccurate = [(stage, rho) for stage, rho in enumerate(rhos) if rho is not None and rho > 1]
    if not inaccurate:
        return ""
    stages = ", ".join(f"{stage} ({rho:.2f})" for stage, rho in inaccurate)
    return (
        f"predicted weights were further from the real weights than stale ones on stage {stages}: "
        f"the prediction horizon is too long there; {PIPEOPTIM} has a shorter horizon, and the "
        "rule decaying never overshoots"
    )
