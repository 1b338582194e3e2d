"""A prediction compared with a recording: step, stages, parts of a step, and memory."""

from __future__ import annotations

from dataclasses import dataclass

FORWARD, BACKWARD, TRANSFER = "forward", "backward", "transfer"
COLLECTIVE = "collectives"
WAITING, RUNTIME = "waiting", "runtime overhead"


@dataclass(frozen=True)
class TimeComparison:
    """Seconds as predicted and as measured.

    measured: None where the recording does not show it. ratio: measured over predicted, None
    without both.
    """

    predicted: float
    measured: float | None

    @property
    def difference(self) -> float:
        """Measured minus predicted; 0 where it was not measured."""
        return 0.0 if self.measured is None else self.measured - self.predicted

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.measured and self.predicted else None


@dataclass(frozen=True)
class StageComparison:
    """One stage. each: per microbatch, collectives in forward and backward. step: per step.

    slowest: the busiest rank, whose step is compared.
    """

    stage: int
    ranks: str
    slowest: int
    each: dict[str, TimeComparison]
    step: dict[str, TimeComparison]


@dataclass(frozen=True)
class StepDifference:
    """One part of the error of the step, on the busiest rank of the bottleneck stage.

    share: of the whole difference; None where predicted and measured step agree. source: where the
    prediction of the part comes from, as the plan says.
    """

    name: str
    predicted: float
    measured: float
    difference: float
    share: float | None
    source: str


@dataclass(frozen=True)
class MemoryComparison:
    """Bytes of a rank: the predicted peak, the process's before the model and at its peak.

    exact: the peak is one of the recorded steps. shared: ranks in the same process.
    """

    rank: int
    predicted: int
    limit: int
    baseline: int
    peak: int
    live: int
    exact: bool
    shared: int

    @property
    def needed(self) -> int:
        """The process's peak without what it had before the model."""
        return max(0, self.peak - self.baseline)


@dataclass(frozen=True)
class RecordingComparison:
    """The whole comparison. low, high: quartiles of the steps' seconds. stage: the bottleneck.

    shown: the step that took the median time. notes: what limits the comparison.
    """

    steps: int
    step: TimeComparison
    low: float
    high: float
    bubble_predicted: float
    bubble_measured: float
    stages: tuple[StageComparison, ...]
    stage: int
    differences: tuple[StepDifference, ...]
    memory: tuple[MemoryComparison, ...]
    shown: int
    notes: tuple[str, ...]
