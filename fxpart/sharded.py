"""From a prepared graph and a mesh to the program of each lane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import fx

from fxpart.codegen import emit, split
from fxpart.pipeline import PassManager
from fxpart.program import ProgramSpec

if TYPE_CHECKING:
    from fxpart.capture import Captured
    from fxpart.plan import PlanSharding
    from fxpart.planning import Shared
    from fxpart.pricing.sharing import Sharing
    from fxpart.requests import Request
    from fxpart.solver.problem import PartitionProblem


@dataclass(frozen=True)
class Sharded:
    """A prepared graph whose every op and value has its placements over a mesh."""

    whole: fx.GraphModule

    def local(self, lane: int) -> fx.GraphModule:
        """The graph that one lane runs."""
        raise NotImplementedError

    def sharing(self) -> Sharing:
        """What pricing has to know."""
        raise NotImplementedError

    def described(self, problem: PartitionProblem) -> Shared:
        """What the plan has to say."""
        raise NotImplementedError


def shard(graph: fx.GraphModule, captured: Captured, request: Request) -> Sharded:
    """Annotate, propagate and place."""
    raise NotImplementedError


def restore(graph: fx.GraphModule, captured: Captured, given: PlanSharding) -> Sharded:
    """The placements of a plan."""
    raise NotImplementedError


@dataclass
class Lanes:
    """The programs of all lanes of a sharded graph cut into stages, each made when asked for."""

    sharded: Sharded
    captured: Captured
    starts: tuple[int, ...]
    seed: int
    _made: dict[int, tuple[ProgramSpec, tuple[str, ...]]] = field(default_factory=dict)

    def program(self, lane: int) -> tuple[ProgramSpec, tuple[str, ...]]:
        """The stages as data and the text of each."""
        if lane not in self._made:
            assigned = assign(self.sharded.local(lane), self.starts)
            self._made[lane] = generate(assigned, self.captured, self.seed)
        return self._made[lane]


def assign(graph: fx.GraphModule, starts: Sequence[int]) -> fx.GraphModule:
    """The graph with its stages. starts: the first block of each."""
    listed = ",".join(map(str, starts))
    return PassManager().run(f'assign{{starts="{listed}"}}', graph)


def generate(
    assigned: fx.GraphModule, captured: Captured, seed: int
) -> tuple[ProgramSpec, tuple[str, ...]]:
    """The program's description, and each stage's text."""
    spec, stages = split(assigned, captured, seed)
    return spec, tuple(emit(stage) for stage in stages)
