"""Choices that put any blocks on any stage, if the stages form an acyclic graph."""

from __future__ import annotations

import msgspec

from fxpart.solver.solution import Status


class StageGraphChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A candidate plan: variant, schedule, and the stage of each block.

    stage_of: from 0 on without gaps; no block is on an earlier stage than a block it reads from.
    Stage k runs on device k.
    """

    variant: int
    schedule: str
    stage_of: tuple[int, ...]

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return max(self.stage_of) + 1

    @property
    def order(self) -> tuple[int, ...]:
        """Return the blocks, stage by stage; within a stage in captured order."""
        return tuple(sorted(range(len(self.stage_of)), key=lambda b: (self.stage_of[b], b)))

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the position in :attr:`order` at which each stage begins."""
        sizes = [self.stage_of.count(k) for k in range(self.stages)]
        return tuple(sum(sizes[:k]) for k in range(self.stages))


class StageGraphSolution(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A solver's result: the choice, its step time, and a proven bound, in seconds.

    No split of these blocks into an acyclic graph of stages takes less than ``bound``. status: see
    :class:`fxpart.solver.problem.Solution`. solver: the one that found the choice. over:
    description of the choices that the bound covers.
    """

    status: Status
    choice: StageGraphChoice
    objective: float
    bound: float
    solver: str
    over: str

    @property
    def stage_of(self) -> tuple[int, ...]:
        """Return the stage of each block."""
        return self.choice.stage_of

    @property
    def order(self) -> tuple[int, ...]:
        """Return the blocks, stage by stage."""
        return self.choice.order

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the position in :attr:`order` at which each stage begins."""
        return self.choice.starts
