"""What a schedule is searched for: stages on ranks, their seconds, links and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fxpart.errors import FxpartError, Problem
from fxpart.schedule.action import Schedule, StageEdge
from fxpart.schedule.dependence import edge_problems


@dataclass(frozen=True)
class ScheduleProblem:
    """One flushed step of a stage graph on its ranks; its length is what is minimised.

    stage_rank: the rank of each stage, several of which may share one. forward, backward: seconds
    of each stage for one microbatch. halves: seconds of I and of W, where backwards may be split.
    transfer: seconds of an edge (source, target), the same back; nothing if it is left out. links:
    whether each direction between two ranks carries one transfer at a time, in the order in which
    the values are made; otherwise any number. activation: what a stage holds for a microbatch from
    its forward to the end of its backward (its W), 1 if not given. memory: by rank the most that
    its stages may hold together, in the same unit; None: no limit.
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
        """Their number."""
        return len(set(self.stage_rank))

    def held(self, stage: int) -> int:
        """What the stage holds for a microbatch."""
        return self.activation[stage] if self.activation else 1

    def limit(self, rank: int) -> int | None:
        """The most that the rank may hold, None without a limit."""
        return self.memory[rank] if self.memory else None

    def check(self) -> None:
        """Raise FXP109 with all that does not fit together, FXP901 for edges that are no graph."""
        stages = len(self.stage_rank)
        found = list(edge_problems(stages, self.edges))
        costs = {"forward": self.forward, "backward": self.backward}
        if self.halves is not None:
            costs["halves"] = tuple(seconds for pair in self.halves for seconds in pair[:2])
        for name, given in costs.items():
            count = stages * (2 if name == "halves" else 1)
            if len(given) != count or not all(math.isfinite(s) and s >= 0 for s in given):
                found.append(_bad(name, "finite seconds, none negative, are needed for each stage"))
        if not all(math.isfinite(s) and s >= 0 for s in self.transfer.values()):
            found.append(_bad("transfer", "finite seconds, none negative, are needed"))
        if not stages or self.microbatches < 1:
            found.append(_bad("sizes", "at least one stage and one microbatch are needed"))
        if set(self.stage_rank) != set(range(self.ranks)):
            found.append(_bad(f"stage_rank={self.stage_rank}", "no rank may be left out from 0 on"))
        for name, numbers, count in (
            ("activation", self.activation, stages),
            ("memory", self.memory, self.ranks),
        ):
            if numbers and (len(numbers) != count or any(n is not None and n < 0 for n in numbers)):
                found.append(_bad(name, f"{count} numbers, none negative, are needed"))
        if found:
            raise FxpartError(found)


@dataclass(frozen=True)
class ScheduleSearchResult:
    """A schedule and what is known of it.

    schedule: computations only, named "found". seconds: its step. bound: no schedule's step is
    shorter. status: "optimal" where the two meet (within 1e-6), else "feasible". solver: what found
    it: "cp-sat", "list", or a builder's name. builder, builder_seconds: the best of the schedules
    that have a name and fit ("" and infinite where none does).
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
        """The share of the step that might still be saved."""
        return 1 - self.bound / self.seconds if self.seconds > 0 else 0.0


def _bad(what: str, why: str) -> Problem:
    return Problem("FXP109", f"schedule to search: {what}", why, "")
