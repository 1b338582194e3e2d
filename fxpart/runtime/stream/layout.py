"""What goes between which stages for every microbatch, and how far each stage runs ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpart.program import ProgramSpec
from fxpart.runtime.links import Link, edges, links
from fxpart.runtime.ties import Shared, flows_from, shared
from fxpart.schedule.action import StageEdge
from fxpart.schedule.dependence import depths
from fxpart.schedule.versions import Versions
from fxpart.schedule.weight_modes import WeightMode

Pair = tuple[int, int]  # from stage, to stage


@dataclass(frozen=True)
class Parcel:
    """What a microbatch's message between two stages carries.

    links: values (forward) or their gradients (backward). shared: parameters of which the owner
    sends the weights to a holder (forward), or a holder its part of the gradient (backward).
    """

    links: tuple[Link, ...]
    shared: tuple[Shared, ...]


@dataclass(frozen=True)
class Layout:
    """The stage graph of a stream.

    forward, backward: the parcels by pair of stages, in the direction in which they travel. ahead:
    per stage its forwards before its first backward. found: all links of the program. late: the
    (from, to) pairs whose sums of shared parameters are added behind the stage's own part.
    """

    forward: dict[Pair, Parcel]
    backward: dict[Pair, Parcel]
    ahead: tuple[int, ...]
    found: tuple[Link, ...]
    late: frozenset[Pair]

    @classmethod
    def of(cls, spec: ProgramSpec) -> Layout:
        """Read off a program."""
        found, ties, reached = links(spec), shared(spec), flows_from(spec)
        forward: dict[Pair, Parcel] = {}
        backward: dict[Pair, Parcel] = {}
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

    def changed(self, mode: WeightMode, versions: Versions, owner: int, microbatch: int) -> bool:
        """Whether a forward may read other weights than the one before: holders are sent them."""
        if microbatch == 0:
            return True
        here, before = (versions.read(mode, owner, m) for m in (microbatch, microbatch - 1))
        return (here.version, here.forward, here.look_forward) != (
            before.version, before.forward, before.look_forward,
        )  # fmt: skip


def _add(parcels: dict[Pair, Parcel], pair: Pair, item: Link | Shared) -> None:
    known = parcels.get(pair, Parcel((), ()))
    if isinstance(item, Link):
        parcels[pair] = Parcel((*known.links, item), known.shared)
    else:
        parcels[pair] = Parcel(known.links, (*known.shared, item))


def _edges(spec: ProgramSpec, forward: dict[Pair, Parcel]) -> Sequence[StageEdge]:
    """The program's, and one from each owner of a shared parameter to its holders."""
    known = {(edge.source, edge.target) for edge in edges(spec)}
    return [StageEdge(*pair) for pair in sorted(known | set(forward))]
