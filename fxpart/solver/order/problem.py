"""Input of the schedule search: stages on ranks, their seconds, links and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fxpart.errors import FxpartError, Problem
from fxpart.schedule.action import Schedule, StageEdge
from fxpart.schedule.dependence import edge_problems


@dataclass(frozen=True)
class ScheduleProblem:
    """One flushed step of a stage graph on its ranks; the step time is minimized.

    stage_rank: the rank of each stage; several stages may share a rank. forward, backward: seconds
    of each stage for one microbatch. halves: seconds of I and W, if backwards may be split.
    transfer: seconds of an edge (source, target), the same back; 0 if missing. links: whether each
    direction between two ranks carries one transfer at a time, in the order in which the values are
    made; otherwise any number. activation: memory of a stage for a microbatch from its forward to
    the end of its backward (its W), 1 by default. memory: by rank the limit on its stages together,
    in the same unit; None: no limit.
    """

    stage_rank: tuple[int, ...]
    microbatches: int
    edges: tuple[StageEdge, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    halves: tuple[tuple[float, float], ...] | None = None
    transfer: Mapping[tuple[int, int], float] = field(default_factory=dict)
    links: bool = True
    activation: tuple[int, ...] = ()
    memory: tuple[int | None, ...] = ()

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(set(self.stage_rank))

    def get_activation(self, stage: int) -> int:
        """Return the memory of the stage for a microbatch."""
        return self.activation[stage] if self.activation else 1

    def limit(self, rank: int) -> int | None:
        """Return the memory limit of the rank, None without a limit."""
        return self.memory[rank] if self.memory else None

    def check(self) -> None:
        """Raise FXP109 with all inconsistencies, FXP901 for edges that are not a graph."""
        stages = len(self.stage_rank)
        found = list(edge_problems(stages, self.edges))
        costs = {"forward": self.forward, "backward": self.backward}
        if self.halves is not None:
            costs["halves"] = tuple(seconds for pair in self.halves for seconds in pair[:2])
        for name, given in costs.items():
            count = stages * (2 if name == "halves" else 1)
            if len(given) != count or not all(math.isfinite(s) and s >= 0 for s in given):
                found.append(_bad(name, "Each stage needs finite nonnegative seconds."))
        if not all(math.isfinite(s) and s >= 0 for s in self.transfer.values()):
            found.append(_bad("transfer", "The seconds must be finite and nonnegative."))
        if not stages or self.microbatches < 1:
            found.append(_bad("sizes", "At least one stage and one microbatch are needed."))
        if set(self.stage_rank) != set(range(self.ranks)):
            found.append(
                _bad(f"stage_rank={self.stage_rank}", "The ranks must be 0, 1, ... without gaps.")
            )
        for name, numbers, count in (
            ("activation", self.activation, stages),
            ("memory", self.memory, self.ranks),
        ):
            if numbers and (len(numbers) != count or any(n is not None and n < 0 for n in numbers)):
                found.append(_bad(name, f"{count} nonnegative numbers are needed."))
        if found:
            raise FxpartError(found)


@dataclass(frozen=True)
class ScheduleSearchResult:
    """A schedule with its bound.

    schedule: computations only, named "found". seconds: its step time. bound: no schedule's step
    time is shorter. status: "optimal" if the two are equal (within 1e-6), else "feasible". solver:
    "cp-sat", "list", or a builder's name. builder, builder_seconds: the best of the named schedules
    that fit ("" and infinite if none does).
    """

    schedule: Schedule
    seconds: float
    bound: float
    status: str
    solver: str
    seed: int
    builder: str
    builder_seconds: float

    @property
    def gap(self) -> float:
        """Return the relative gap: the share of the step that might still be saved."""
        return 1 - self.bound / self.seconds if self.seconds > 0 else 0.0


def _bad(what: str, why: str) -> Problem:
    return Problem("FXP109", f"schedule to search: {what}", why, "")
