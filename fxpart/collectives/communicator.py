"""Communicator of a mesh rank: collectives with the other mesh ranks of its stage.

A communicator moves plain tensors; :mod:`fxpart.collectives.differentiable_ops` adds gradients. All
ranks of a group must start the same transfers in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol, TypeAlias

import torch

from fxpart.sharding import Mesh

# One axis of the mesh, or several as one group (major first).
Axis: TypeAlias = str | tuple[str, ...]
Size: TypeAlias = int | torch.SymInt


class CollectiveHandle(Protocol):
    """A transfer in progress."""

    def wait(self) -> torch.Tensor:
        """Return the result; raise TransferTimeoutError or PeerLostError."""


class GatheredParameters(Protocol):
    """Parameters whose gathers have started before their use."""

    def take(self, x: torch.Tensor, axis: object, dim: int, outer: int) -> torch.Tensor | None:
        """Return the whole parameter of a shard; None for another tensor."""


class GradientScatters(Protocol):
    """Gradients of sharded parameters that are reduced during the backward."""

    def add(self, parameter: torch.Tensor, finish: Callable[[], torch.Tensor]) -> None:
        """Add a started reduction; ``finish`` returns the gradient of the shard."""


class CachedRows(Protocol):
    """Rows of embedding tables that were received since the weights last changed."""

    def of(self, weight: torch.Tensor) -> Any:
        """Return the rows of a table, to which more are added; None for other tensors."""


class PrefetchedRows(Protocol):
    """Rows of the lookups of a step, which were requested ahead."""

    def take(self, request: Any) -> tuple[torch.Tensor, int] | None:
        """Return the result of a lookup; None for lookups that were not requested."""


Start: TypeAlias = Callable[..., CollectiveHandle]
_STARTS = {
    "all_reduce": "_reduce", "all_gather": "_gather", "reduce_scatter": "_scatter",
    "all_to_all": "_exchange",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompletedCollective:
    """A completed transfer."""

    result: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Return the result."""
        return self.result


@dataclass
class CommunicationCounts:
    """Calls and bytes by (kind, axes joined with a comma), as seen by this rank.

    kind: all_reduce, all_gather, reduce_scatter or all_to_all. bytes: size of the reduced tensor,
    of the whole gathered or scattered tensor, or of the data sent in an all-to-all, like in
    Megatron-LM and nccl-tests. Axes of size 1 are not counted. rows: by axes, ids that were looked
    up in tables sharded by rows, and rows received for them.
    """

    calls: dict[tuple[str, str], Size] = field(default_factory=dict)
    bytes: dict[tuple[str, str], Size] = field(default_factory=dict)
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)

    def note(self, kind: str, axis: Axis, size: Size) -> None:
        """Count one call and its bytes."""
        key = kind, axis if isinstance(axis, str) else ",".join(axis)
        self.calls[key] = self.calls.get(key, 0) + 1
        self.bytes[key] = self.bytes.get(key, 0) + size

    def note_rows(self, axes: Sequence[str], ids: int, received: int) -> None:
        """Count a lookup of ids, for which rows were received."""
        before = self.rows.get(",".join(axes), (0, 0))
        self.rows[",".join(axes)] = before[0] + ids, before[1] + received

    def clear(self) -> None:
        """Reset all counts."""
        self.calls.clear()
        self.bytes.clear()
        self.rows.clear()


def members(mesh: Mesh, mesh_rank: int, axis: Axis) -> tuple[int, ...]:
    """Return the mesh ranks that differ from ``mesh_rank`` only on the axes, itself included,
    ascending.
    """
    free = {mesh.index(name) for name in ((axis,) if isinstance(axis, str) else axis)}
    here = mesh.coordinate(mesh_rank)
    ranges = [
        range(size) if at in free else (here[at],)
        for at, size in enumerate(mesh.shape)
    ]  # fmt: skip
    return tuple(mesh.mesh_rank(coordinate) for coordinate in product(*ranges))


class Communicator(ABC):
    """One mesh rank's communicator. The ``start_`` forms of the collectives do not wait.

    A backend implements ``_reduce``, ``_gather``, ``_scatter`` and ``_exchange`` on flat,
    contiguous tensors. An input must not change between a start and the end of its wait.
    mesh, mesh_rank: the mesh and this rank in it. counts: see :class:`CommunicationCounts`. fake:
    there are no other ranks, and only shapes matter. slowest: this rank does as much as the one
    with the most work. ahead: gathers the parameters of the stage module that is called now
    (:class:`~fxpart.collectives.gather_prefetch.ForwardGathers`). blocks_ahead: for how many blocks
    it does so before their use. scatters: takes the gradients of sharded parameters in the backward
    that runs now. row_cache: rows of tables, while no weights change
    (:class:`~fxpart.collectives.all_to_all_embedding.RowCache`). rows_ahead: serves the lookups of
    a step (:class:`~fxpart.collectives.row_prefetch.RowPrefetch`). requests: while it is a list,
    lookups are added to it and not made.
    """

    fake = False
    slowest = False
    ahead: GatheredParameters | None = None
    blocks_ahead = 0
    scatters: GradientScatters | None = None
    row_cache: CachedRows | None = None
    rows_ahead: PrefetchedRows | None = None
    requests: list[Any] | None = None

    def __init__(self, mesh: Mesh, mesh_rank: int) -> None:
        """mesh_rank: this rank's position in the mesh."""
        self.mesh = mesh
        self.mesh_rank = mesh_rank
        self.counts = CommunicationCounts()
        self._known: dict[Axis, tuple[int, int, tuple[int, ...]]] = {}

    def group(self, axis: Axis) -> tuple[int, int, tuple[int, ...]]:
        """Return this rank's position in the group of the axes, the group's size and its ranks."""
        found = self._known.get(axis)
        if found is None:
            mesh_ranks = members(self.mesh, self.mesh_rank, axis)
            place = mesh_ranks.index(self.mesh_rank)
            found = self._known[axis] = place, len(mesh_ranks), mesh_ranks
        return found

    def place(self, axis: Axis) -> int:
        """Return this rank's position along the axis, or in the group of several axes."""
        return self.group(axis)[0]

    def size(self, axis: Axis) -> int:
        """Return the size of the axis, or of the group of several axes."""
        return self.group(axis)[1]

    def start_all_reduce(
        self, tensor: torch.Tensor, axis: Axis, op: str = "sum", *, reuse: bool = False
    ) -> CollectiveHandle:
        """Start a sum ("sum") or maximum ("max") of every rank's tensor of this shape.

        reuse: the result may overwrite the tensor.
        """
        _, size, mesh_ranks = self.group(axis)
        if size == 1:
            return CompletedCollective(tensor if reuse else tensor.clone())
        self.counts.note("all_reduce", axis, tensor.numel() * tensor.itemsize)
        fresh = tensor.contiguous()
        return self._reduce(fresh, mesh_ranks, op, reuse or fresh is not tensor)

    def start_pair_sum(
        self, tensors: Sequence[torch.Tensor], axis: Axis
    ) -> CollectiveHandle | None:
        """Start adding the other rank's flat tensors in place, if this is faster than a sum of one.

        None if it is not, as the axis has more than two ranks or they share no memory. The tensors
        have one dtype, and must not change before ``wait`` returns.
        """
        return None

    def start_all_gather(
        self, tensor: torch.Tensor, axis: Axis, counts: Sequence[Size] | None = None
    ) -> CollectiveHandle:
        """Start gathering every rank's elements, 1-D, in rank order.

        counts: elements of each rank; None if equal.
        """
        _, size, mesh_ranks = self.group(axis)
        if size == 1:
            return CompletedCollective(tensor.reshape(-1))
        sizes: list[Size] = [tensor.numel()] * size if counts is None else list(counts)
        self.counts.note("all_gather", axis, sum(sizes) * tensor.itemsize)
        return self._gather(tensor.reshape(-1), mesh_ranks, sizes)

    def start_reduce_scatter(
        self, flat: torch.Tensor, axis: Axis, counts: Sequence[Size]
    ) -> CollectiveHandle:
        """Start a sum of 1-D tensors; this rank gets its own part. counts: sizes of the parts."""
        _, size, mesh_ranks = self.group(axis)
        if size == 1:
            return CompletedCollective(flat)
        self.counts.note("reduce_scatter", axis, flat.numel() * flat.itemsize)
        return self._scatter(flat.contiguous(), mesh_ranks, list(counts))

    def start_all_to_all(
        self, flat: torch.Tensor, axis: Axis, give: Sequence[Size], get: Sequence[Size]
    ) -> CollectiveHandle:
        """Start sending parts of a 1-D tensor, one to each rank; the result has the received parts.

        give: elements of each sent part. get: elements received from each rank.
        """
        _, size, mesh_ranks = self.group(axis)
        if size == 1:
            return CompletedCollective(flat)
        self.counts.note("all_to_all", axis, flat.numel() * flat.itemsize)
        return self._exchange(flat.contiguous(), mesh_ranks, list(give), list(get))

    def watch(self, around: Callable[[str, Start], Start] | None) -> None:
        """Wrap the start of each kind of transfer by ``around(kind, start)``; None removes it.

        The kinds are those of :class:`CommunicationCounts`.
        """
        for kind, name in _STARTS.items():
            vars(self).pop(name, None)
            if around is not None:
                vars(self)[name] = around(kind, getattr(self, name))

    def all_reduce(self, tensor: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
        """Return a new tensor: the sum ("sum") or maximum ("max") over the axis."""
        return self.start_all_reduce(tensor, axis, op).wait()

    def all_gather(
        self, tensor: torch.Tensor, axis: Axis, shapes: Sequence[Sequence[Size]] | None = None
    ) -> list[torch.Tensor]:
        """Return every rank's tensor, in rank order. shapes: of each; None if all are equal."""
        shapes = [tuple(tensor.shape)] * self.size(axis) if shapes is None else shapes
        counts = [_count(shape) for shape in shapes]
        return _split(self.start_all_gather(tensor, axis, counts).wait(), shapes, counts)

    def reduce_scatter(self, pieces: Sequence[torch.Tensor], axis: Axis) -> torch.Tensor:
        """Return the sum of this rank's piece over all ranks; piece i has one shape on
        all ranks.
        """
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
        """Send piece i to rank i; return the received pieces in order.

        shapes: of the received pieces; None for the shape of this rank's own piece.
        """
        if shapes is None:
            shapes = [tuple(pieces[self.place(axis)].shape)] * len(pieces)
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        counts = [_count(shape) for shape in shapes]
        give = [piece.numel() for piece in pieces]
        return _split(self.start_all_to_all(flat, axis, give, counts).wait(), shapes, counts)

    @abstractmethod
    def _reduce(
        self, tensor: torch.Tensor, mesh_ranks: tuple[int, ...], op: str, reuse: bool
    ) -> CollectiveHandle:
        """Start the sum or maximum over the ranks; reuse: the result may overwrite ``tensor``."""

    @abstractmethod
    def _gather(
        self, flat: torch.Tensor, mesh_ranks: tuple[int, ...], counts: list[Size]
    ) -> CollectiveHandle:
        """Start gathering all ranks' flat pieces; counts: elements of each."""

    @abstractmethod
    def _scatter(
        self, flat: torch.Tensor, mesh_ranks: tuple[int, ...], counts: list[Size]
    ) -> CollectiveHandle:
        """Start reducing to this rank's piece of the sum; counts: elements of each rank's piece."""

    @abstractmethod
    def _exchange(
        self, flat: torch.Tensor, mesh_ranks: tuple[int, ...], give: list[Size], get: list[Size]
    ) -> CollectiveHandle:
        """Start exchanging flat pieces; give, get: elements by rank."""


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
