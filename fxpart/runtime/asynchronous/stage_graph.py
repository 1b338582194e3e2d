"""What goes between which stages for every microbatch, and how far each stage runs ahead."""

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
    """What a microbatch's message between two stages carries.

    links: values (forward) or their gradients (backward). shared: parameters of which the owner
    sends the weights to a holder (forward), or a holder its part of the gradient (backward).
    """

    links: tuple[ValueEdge, ...]
    shared: tuple[TiedParameterRoutes, ...]


@dataclass(frozen=True)
class AsyncStageGraph:
    """The stage graph of a stream.

    forward, backward: the parcels by pair of stages, in the direction in which they travel. ahead:
    per stage its forwards before its first backward. found: all links of the program. late: the
    (from, to) pairs whose sums of shared parameters are added behind the stage's own part.
    """

    forward: dict[Pair, StageMessageSpec]
    backward: dict[Pair, StageMessageSpec]
    ahead: tuple[int, ...]
    found: tuple[ValueEdge, ...]
    late: frozenset[Pair]

    @classmethod
    def of(cls, spec: ProgramSpec) -> AsyncStageGraph:
        """Read off a program."""
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
            for holder in item.attribute:
                if holder != item.owner:
                    _add(forward, (item.owner, holder), item)
            for source, target in item.routes.items():
                _add(backward, (source, target), item)
        late = {(s, t) for item in ties for s, t in item.routes.items() if s not in reached[t]}
        ahead = depths(len(spec.stages), _edges(spec, forward))
        return cls(forward, backward, ahead, found, frozenset(late))

    def producers(self, stage: int) -> list[int]:
        """The stages whose forward messages a stage waits for, ascending."""
        return sorted(s for s, t in self.forward if t == stage)

    def consumers(self, stage: int) -> list[int]:
        """The stages whose backward messages a stage waits for, descending."""
        return sorted((s for s, t in self.backward if t == stage), reverse=True)

    def targets(self, stage: int) -> list[int]:
        """The stages that a forward is sent to, nearest first."""
        return sorted(t for s, t in self.forward if s == stage)

    def returns(self, stage: int) -> list[int]:
        """The stages that a backward is sent to, nearest first."""
        return sorted((t for s, t in self.backward if s == stage), reverse=True)

    def changed(
        self, mode: WeightMode, versions: WeightVersionCounters, owner: int, microbatch: int
    ) -> bool:
        """Whether a forward may read other weights than the one before: holders are sent them."""
        if microbatch == 0:
            return True
        here, before = (versions.read(mode, owner, m) for m in (microbatch, microbatch - 1))
        return (here.version, here.forward, here.look_forward) != (
            before.version, before.forward, before.look_forward,
        )  # fmt: skip


def _add(
    parcels: dict[Pair, StageMessageSpec], pair: Pair, item: ValueEdge | TiedParameterRoutes
) -> None:
    known = parcels.get(pair, StageMessageSpec((), ()))
    if isinstance(item, ValueEdge):
        parcels[pair] = StageMessageSpec((*known.links, item), known.shared)
    else:
        parcels[pair] = StageMessageSpec(known.links, (*known.shared, item))


def _edges(spec: ProgramSpec, forward: dict[Pair, StageMessageSpec]) -> Sequence[StageEdge]:
    """The program's, and one from each owner of a shared parameter to its holders."""
    known = {(edge.source, edge.target) for edge in find_stage_edges(spec)}
    return [StageEdge(*pair) for pair in sorted(known | set(forward))]
