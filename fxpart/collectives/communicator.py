"""What a lane needs to talk to the other lanes of its stage, and the part that is the same for all.

A communicator moves plain tensors; gradients are the business of
:mod:`fxpart.collectives.differentiable_ops`. All lanes of a group must start the same transfers in
the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Protocol, TypeAlias

import torch

from fxpart.sharding import Mesh

# One axis of the mesh, or several as one group (major first).
Axis: TypeAlias = str | tuple[str, ...]
Size: TypeAlias = int | torch.SymInt


class CollectiveHandle(Protocol):
    """A transfer under way."""

    def wait(self) -> torch.Tensor:
        """Its result; TransferTimeoutError, PeerLostError."""


Start: TypeAlias = Callable[..., CollectiveHandle]
_STARTS = {
    "all_reduce": "_reduce", "all_gather": "_gather", "reduce_scatter": "_scatter",
    "all_to_all": "_exchange",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompletedCollective:
    """A transfer that is complete."""

    result: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The result."""
        return self.result


@dataclass
class CommunicationCounts:
    """Calls and bytes by (kind, axes joined with a comma), as this lane saw them.

    kind: all_reduce, all_gather, reduce_scatter or all_to_all. bytes: of the tensor that the
    collective is about: what is reduced, the whole that is gathered or scattered, what is sent in
    an all-to-all. That is how Megatron-LM and nccl-tests give sizes. Axes of one lane count not.
    """

    calls: dict[tuple[str, str], Size] = field(default_factory=dict)
    bytes: dict[tuple[str, str], Size] = field(default_factory=dict)

    def note(self, kind: str, axis: Axis, size: Size) -> None:
        """One more call of so many bytes."""
        key = kind, axis if isinstance(axis, str) else ",".join(axis)
        self.calls[key] = self.calls.get(key, 0) + 1
        self.bytes[key] = self.bytes.get(key, 0) + size

    def clear(self) -> None:
        """Start again at nothing."""
        self.calls.clear()
        self.bytes.clear()


def members(mesh: Mesh, lane: int, axis: Axis) -> tuple[int, ...]:
    """The lanes that differ from ``lane`` on the axes alone, itself included, ascending."""
    free = {mesh.index(name) for name in ((axis,) if isinstance(axis, str) else axis)}
    here = mesh.coordinate(lane)
    ranges = [
        range(size) if at in free else (here[at],)
        for at, size in enumerate(mesh.shape)
    ]  # fmt: skip
    return tuple(mesh.lane(coordinate) for coordinate in product(*ranges))


class Communicator(ABC):
    """One lane's end. The four collectives take and give tensors; ``start_`` forms do not wait.

    A backend gives ``_reduce``, ``_gather``, ``_scatter`` and ``_exchange`` on flat, contiguous
    tensors. An input may not change between a start and the end of its wait.

    mesh, lane: who this is. counts: see :class:`CommunicationCounts`. fake: there are no other
    lanes, only shapes matter.
    """

    fake = False

    def __init__(self, mesh: Mesh, lane: int) -> None:
        """lane: this rank's place in the mesh."""
        self.mesh = mesh
        self.lane = lane
        self.counts = CommunicationCounts()
        self._known: dict[Axis, tuple[int, int, tuple[int, ...]]] = {}

    def group(self, axis: Axis) -> tuple[int, int, tuple[int, ...]]:
        """This lane's place in the group of the axes, the group's size, its lanes in order."""
        found = self._known.get(axis)
        if found is None:
            lanes = members(self.mesh, self.lane, axis)
            found = self._known[axis] = lanes.index(self.lane), len(lanes), lanes
        return found

    def place(self, axis: Axis) -> int:
        """This lane's place along the axis, or in the group of several."""
        return self.group(axis)[0]

    def size(self, axis: Axis) -> int:
        """How many lanes the axis has, or the group of several."""
        return self.group(axis)[1]

    def start_all_reduce(
        self, tensor: torch.Tensor, axis: Axis, op: str = "sum", *, reuse: bool = False
    ) -> CollectiveHandle:
        """Sum ("sum") or take the largest ("max") of every lane's tensor of this shape.

        reuse: the result may take the tensor's place.
        """
        _, size, lanes = self.group(axis)
        if size == 1:
            return CompletedCollective(tensor if reuse else tensor.clone())
        self.counts.note("all_reduce", axis, tensor.numel() * tensor.itemsize)
        fresh = tensor.contiguous()
        return self._reduce(fresh, lanes, op, reuse or fresh is not tensor)

    def start_all_gather(
        self, tensor: torch.Tensor, axis: Axis, counts: Sequence[Size] | None = None
    ) -> CollectiveHandle:
        """Every lane's elements one after another, 1-D, in order of place.

        counts: how many each lane gives; None where that is the same for all.
        """
        _, size, lanes = self.group(axis)
        if size == 1:
            return CompletedCollective(tensor.reshape(-1))
        sizes: list[Size] = [tensor.numel()] * size if counts is None else list(counts)
        self.counts.note("all_gather", axis, sum(sizes) * tensor.itemsize)
        return self._gather(tensor.reshape(-1), lanes, sizes)

    def start_reduce_scatter(
        self, flat: torch.Tensor, axis: Axis, counts: Sequence[Size]
    ) -> CollectiveHandle:
        """Sum every lane's 1-D tensor; this lane gets its own part, 1-D. counts: of the parts."""
        _, size, lanes = self.group(axis)
        if size == 1:
            return CompletedCollective(flat)
        self.counts.note("reduce_scatter", axis, flat.numel() * flat.itemsize)
        return self._scatter(flat.contiguous(), lanes, list(counts))

    def start_all_to_all(
        self, flat: torch.Tensor, axis: Axis, give: Sequence[Size], get: Sequence[Size]
    ) -> CollectiveHandle:
        """Send the parts of a 1-D tensor, one to each lane; the received parts, 1-D, in order.

        give: elements of each part. get: elements that each lane sends here.
        """
        _, size, lanes = self.group(axis)
        if size == 1:
            return CompletedCollective(flat)
        self.counts.note("all_to_all", axis, flat.numel() * flat.itemsize)
        return self._exchange(flat.contiguous(), lanes, list(give), list(get))

    def watch(self, around: Callable[[str, Start], Start] | None) -> None:
        """Start transfers by what ``around(kind, start)`` makes of a kind's start; None: as ever.

        The kinds are those of :class:`CommunicationCounts`.
        """
        for kind, name in _STARTS.items():
            vars(self).pop(name, None)
            if around is not None:
                vars(self)[name] = around(kind, getattr(self, name))

    def all_reduce(self, tensor: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
        """A new tensor: the sum ("sum") or the largest ("max") over the lanes of the axis."""
        return self.start_all_reduce(tensor, axis, op).wait()

    def all_gather(
        self, tensor: torch.Tensor, axis: Axis, shapes: Sequence[Sequence[Size]] | None = None
    ) -> list[torch.Tensor]:
        """Every lane's tensor, in order of place. shapes: theirs; None: all like this one."""
        shapes = [tuple(tensor.shape)] * self.size(axis) if shapes is None else shapes
        counts = [_count(shape) for shape in shapes]
        return _split(self.start_all_gather(tensor, axis, counts).wait(), shapes, counts)

    def reduce_scatter(self, pieces: Sequence[torch.Tensor], axis: Axis) -> torch.Tensor:
        """The sum of what all lanes give as this lane's piece; piece i has one shape everywhere."""
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        counts = [piece.numel() for piece in pieces]
        mine = self.start_reduce_scatter(flat, axis, counts).wait()
        return mine.view(pieces[self.place(axis)].shape)

    def all_to_all(
        self,
        pieces: Sequence[torch.Tensor],
        axis: Axis,
        shapes: Sequence[Sequence[Size]] | None = None,
    ) -> list[torch.Tensor]:
        """Piece i goes to lane i; what the lanes send here, in order.

        shapes: of what comes; None: as this lane's own piece.
        """
        if shapes is None:
            shapes = [tuple(pieces[self.place(axis)].shape)] * len(pieces)
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        counts = [_count(shape) for shape in shapes]
        give = [piece.numel() for piece in pieces]
        return _split(self.start_all_to_all(flat, axis, give, counts).wait(), shapes, counts)

    @abstractmethod
    def _reduce(
        self, tensor: torch.Tensor, lanes: tuple[int, ...], op: str, reuse: bool
    ) -> CollectiveHandle:
        """The sum or maximum over the lanes; reuse: ``tensor`` may hold it."""

    @abstractmethod
    def _gather(
        self, flat: torch.Tensor, lanes: tuple[int, ...], counts: list[Size]
    ) -> CollectiveHandle:
        """All lanes' flat pieces, one after another; counts: elements of each."""

    @abstractmethod
    def _scatter(
        self, flat: torch.Tensor, lanes: tuple[int, ...], counts: list[Size]
    ) -> CollectiveHandle:
        """This lane's piece of the sum; counts: elements of each lane's."""

    @abstractmethod
    def _exchange(
        self, flat: torch.Tensor, lanes: tuple[int, ...], give: list[Size], get: list[Size]
    ) -> CollectiveHandle:
        """Pieces given and got, flat; give, get: elements by lane."""


def _count(shape: Sequence[Size]) -> Size:
    count: Size = 1
    for size in shape:
        count = count * size
    return count


def _split(
    flat: torch.Tensor, shapes: Sequence[Sequence[Size]], counts: Sequence[Size]
) -> list[torch.Tensor]:
    pieces, at = [], 0
    for shape, count in zip(shapes, counts, strict=True):
        pieces.append(flat.narrow(0, at, count).view(*shape) if shape else flat[at])
        at = at + count  # type: ignore[assignment]
    return pieces
