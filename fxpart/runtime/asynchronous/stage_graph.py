"""Messages between stages for every microbatch, and how far each stage runs ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpart.program.edges import ValueEdge, find_stage_edges, find_value_edges
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.gradients.tied_parameters import (
    TiedParameterRoutes,
    find_backward_predecessors,
    find_tied_parameters,
)
from fxpart.schedule.action import StageEdge
from fxpart.schedule.dependence import depths
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import WeightMode

Pair = tuple[int, int]  # from stage, to stage


@dataclass(frozen=True)
class StageMessageSpec:
    """Content of a microbatch's message between two stages.

    links: values (forward) or their gradients (backward). shared: tied parameters: their weights
    from the owner to another stage (forward), or a partial gradient back (backward).
    """

    links: tuple[ValueEdge, ...]
    shared: tuple[TiedParameterRoutes, ...]


@dataclass(frozen=True)
class AsyncStageGraph:
    """Stage graph of an asynchronous pipeline.

    forward, backward: message specs by (from, to) stage. ahead: forwards of each stage before its
    first backward. found: all value edges of the program. late: (from, to) pairs whose
    tied-parameter gradients are added after the stage's own gradient.
    """

    forward: dict[Pair, StageMessageSpec]
    backward: dict[Pair, StageMessageSpec]
    ahead: tuple[int, ...]
    found: tuple[ValueEdge, ...]
    late: frozenset[Pair]

    @classmethod
    def of(cls, spec: ProgramSpec) -> AsyncStageGraph:
        """Build the graph of a program."""
        found, ties, reached = (
            find_value_edges(spec),
            find_tied_parameters(spec),
            find_backward_predecessors(spec),
        )
        forward: dict[Pair, StageMessageSpec] = {}
        backward: dict[Pair, StageMessageSpec] = {}
        for link in found:
            _add(forward, (link.source, link.target), link)
            if link.gradient:
                _add(backward, (link.target, link.back), link)
        for item in ties:
            for user in item.attribute:
                if user != item.owner:
                    _add(forward, (item.owner, user), item)
            for source, target in item.routes.items():
                _add(backward, (source, target), item)
        late = {(s, t) for item in ties for s, t in item.routes.items() if s not in reached[t]}
        ahead = depths(len(spec.stages), _edges(spec, forward))
        return cls(forward, backward, ahead, found, frozenset(late))

    def producers(self, stage: int) -> list[int]:
        """Return the stages whose forward messages a stage receives, ascending."""
        return sorted(s for s, t in self.forward if t == stage)

    def consumers(self, stage: int) -> list[int]:
        """Return the stages whose backward messages a stage receives, descending."""
        return sorted((s for s, t in self.backward if t == stage), reverse=True)

    def targets(self, stage: int) -> list[int]:
        """Return the stages that a stage sends forward messages to, nearest first."""
        return sorted(t for s, t in self.forward if s == stage)

    def returns(self, stage: int) -> list[int]:
        """Return the stages that a stage sends backward messages to, nearest first."""
        return sorted((t for s, t in self.backward if s == stage), reverse=True)

    def changed(
        self, mode: WeightMode, versions: WeightVersionCounters, owner: int, microbatch: int
    ) -> bool:
        """Return whether the owner's forward may read other weights than for the previous
        microbatch.
        """
        if microbatch == 0:
            return True
        here, before = (versions.read(mode, owner, m) for m in (microbatch, microbatch - 1))
        return (here.version, here.forward, here.look_forward) != (
            before.version, before.forward, before.look_forward,
        )  # fmt: skip


def _add(
    specs: dict[Pair, StageMessageSpec], pair: Pair, item: ValueEdge | TiedParameterRoutes
) -> None:
    known = specs.get(pair, StageMessageSpec((), ()))
    if isinstance(item, ValueEdge):
        specs[pair] = StageMessageSpec((*known.links, item), known.shared)
    else:
        specs[pair] = StageMessageSpec(known.links, (*known.shared, item))


def _edges(spec: ProgramSpec, forward: dict[Pair, StageMessageSpec]) -> Sequence[StageEdge]:
    """Return the edges of the program, and one from each owner of a tied parameter to its users."""
    known = {(edge.source, edge.target) for edge in find_stage_edges(spec)}
    return [StageEdge(*pair) for pair in sorted(known | set(forward))]
