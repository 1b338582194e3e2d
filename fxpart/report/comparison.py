"""A prediction beside a recording, as numbers: of the step, its stages, their parts, and memory."""

from __future__ import annotations

from dataclasses import dataclass

FORWARD, BACKWARD, TRANSFER = "forward", "backward", "transfer"
COLLECTIVE = "collectives in both"
WAITING, RUNTIME = "waiting", "the runtime itself"


@dataclass(frozen=True)
class TimeComparison:
    """Seconds as predicted and as measured.

    measured: None where a recording cannot tell. ratio: measured over predicted, None without both.
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
    """One stage. each: of a microbatch, collectives being part of forward and backward. step: once.

    slowest: the rank whose step the parts of a step are of, the one that computes longest.
    """

    stage: int
    ranks: str
    slowest: int
    each: dict[str, TimeComparison]
    step: dict[str, TimeComparison]


@dataclass(frozen=True)
class StepDifference:
    """One part of the step's error, as the pace-setting rank spends it.

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
    """All of it. low, high: the quartiles of the steps' seconds. stage: the one that sets the pace.

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
