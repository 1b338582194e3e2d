"""What a stream's stages have to say of themselves: staleness, copies of weights, predictions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fxpart.runtime.transport.interface import Transport
from fxpart.runtime.weights import StageWeights
from fxpart.schedule.weight_modes import PIPEOPTIM


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """One stage.

    staleness: the most updates between a forward and its backward. updates: so far; skipped: of
    them, left out since gradients were not finite. copies: the most sets of weights held at once,
    the parameters among them. rho: (microbatch, ρ = |predicted - real| / |stale - real|) where
    predictions were watched; above 1 a prediction was worse than none.
    """

    stage: int
    staleness: int
    updates: int
    skipped: int
    copies: int
    rho: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, stage: int, staleness: int, weights: StageWeights) -> StageReport:
        """Since the last report."""
        return cls(
            stage=stage, staleness=staleness, updates=weights.updates, skipped=weights.skipped,
            copies=weights.most, rho=tuple(weights.rhos()),
        )  # fmt: skip

    @property
    def mean_rho(self) -> float | None:
        """The mean of all, None where there is none."""
        return sum(rho for _, rho in self.rho) / len(self.rho) if self.rho else None


def gather_stage_reports(
    transport: Transport, mine: Sequence[StageReport]
) -> tuple[StageReport, ...]:
    """Those of all processes, by stage."""
    raws = transport.exchange_bytes(msgspec.json.encode(mine))
    found = [each for raw in raws for each in msgspec.json.decode(raw, type=list[StageReport])]
    return tuple(sorted(found, key=lambda each: each.stage))


def describe_inaccurate_predictions(rhos: Sequence[float | None]) -> str:
    """A warning where predictions were further off than no prediction, by stage; else empty.

    rhos: the mean ρ of each stage, None where nothing was predicted or measured.
    """
    beyond = [(stage, rho) for stage, rho in enumerate(rhos) if rho is not None and rho > 1]
    if not beyond:
        return ""
    named = ", ".join(f"{stage} ({rho:.2f})" for stage, rho in beyond)
    return (
        f"predictions were further from the real weights than no prediction is on stage {named}: "
        f"they look too far ahead there; {PIPEOPTIM} looks less far, and the rule decaying never "
        "overshoots"
    )
