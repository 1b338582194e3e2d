"""One mesh rank per process over torch.distributed: gloo between CPUs, nccl between GPUs.

Between CPUs the ranks of a group exchange their pieces directly. Measured with torch 2.13 and gloo
on loopback, 2 ranks on 2 cores, medians in microseconds for messages of 16 KiB / 1 MiB / 16 MiB:

                      torch's own             direct
    all_gather        289 / 1180 / 20000      209 /  680 / 13600   (uneven pieces: rejected by gloo)
    reduce_scatter    509 / 2150 / 22800      295 /  660 / 10700   (gloo reduces all, then slices)
    all_to_all        290 /  980 / 11800      223 /  680 / 11200
    all_reduce        466 / 2020 / 38300      315 / 2280 / 38500   (direct: sends the whole)

On 4 ranks direct exchange is also faster, except for all_reduce, where it sends 3/2 of the minimum;
large all-reduces use torch's ring there.

Ranks of one host exchange pieces through memory that they share (:class:`PeerMemory`), where the
caller has connected it: one copy instead of several through sockets, and no other thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fxpart.collectives.communicator import (
    Axis,
    CollectiveHandle,
    Communicator,
    CompletedCollective,
    Size,
)
from fxpart.collectives.failures import (
    ALL,
    NO_RANK,
    PeerLostError,
    TransferTimeoutError,
    waiting,
)
from fxpart.collectives.mesh_groups import Groups, make_groups
from fxpart.compat import foreach_add_
from fxpart.errors import error
from fxpart.sharding import Mesh

_SMALL = 1 << 16  # maximum bytes for an all-reduce by direct exchange
_FEW = 8  # maximum ranks for it
_TAG = 21
_TIMED_OUT = ("timed out", "timeout")
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class PeerMemory(Protocol):
    """Transfers of CPU tensors between the ranks of one host, in order on each channel."""

    def send(self, target: int, channel: int, tensor: torch.Tensor) -> Any:
        """Copy a contiguous tensor and announce it."""

    def send_parts(self, target: int, channel: int, parts: Sequence[torch.Tensor]) -> Any:
        """Send flat tensors of one dtype as one."""

    def post(self, source: int, channel: int, shape: Sequence[Any], dtype: torch.dtype) -> Any:
        """Return the handle of the channel's next tensor."""

    def wait(self, handle: Any) -> torch.Tensor:
        """Return the tensor, in memory of its sender that is free when the tensor is dropped."""


class GroupCommunicator(Communicator):
    """A mesh rank over process groups, one for each set of axes and group of ranks.

    The default process group must exist, with ``stages * mesh.size`` ranks; every rank creates its
    communicator at the same time with the same arguments. A failed transfer raises
    TransferTimeoutError or PeerLostError, after which the groups are unusable.
    """

    def __init__(
        self,
        mesh: Mesh,
        stages: int = 1,
        *,
        ranks: Sequence[Sequence[int]] | None = None,
        timeout: float = 300.0,
        direct: bool = True,
        stage: int | None = None,
        groups: Groups | None = None,
        memory: PeerMemory | None = None,
        channels: Mapping[tuple[int, ...], int] | None = None,
    ) -> None:
        """ranks: of each stage and mesh rank, by default rank = stage * mesh.size + mesh rank.

        timeout: maximum seconds of a wait. direct: send pieces directly between CPUs. stage: which
        of this rank's stages, by default the first. groups: the result of :func:`make_groups`;
        created by default. memory: shared by all ranks, with the channel of each group in
        ``channels``; no other thread uses it.
        """
        world, rank, size = dist.get_world_size(), dist.get_rank(), mesh.size
        table = ranks or [range(stage * size, (stage + 1) * size) for stage in range(stages)]
        needed = len({rank for row in table for rank in row})
        if world != needed:
            raise error(
                "FXP502",
                where=f"{stages} stages on the mesh {mesh or 'of one rank'}",
                why=f"they need {needed} processes, but there are {world}",
                fix=f"start {needed} processes",
            )
        own = next(at for at, row in enumerate(table) if rank in row) if stage is None else stage
        self.stage = own
        super().__init__(mesh, table[own].index(rank))
        self.timeout = timeout
        self._direct = direct
        self._limit = timedelta(seconds=timeout)
        made = make_groups(mesh, table, timeout) if groups is None else groups
        self._groups = made.get(own, {})
        self._row = tuple(table[own])
        self._memory, self._channels = memory, dict(channels or {})

    def close(self) -> None:
        """Release the groups; no method may be called afterwards."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()

    def _reduce(
        self, tensor: torch.Tensor, mesh_ranks: tuple[int, ...], op: str, reuse: bool
    ) -> CollectiveHandle:
        if not tensor.numel():
            return CompletedCollective(tensor if reuse else tensor.clone())
        small = len(mesh_ranks) <= _FEW and tensor.numel() * tensor.itemsize <= _SMALL
        if self._on_cpu(tensor) and (len(mesh_ranks) == 2 or small):
            place, count = mesh_ranks.index(self.mesh_rank), len(mesh_ranks)
            return self._swap(
                mesh_ranks, [tensor] * count, [tuple(tensor.shape)] * count,
                lambda parts: _total(_with(parts, place, tensor), place, op, reuse),
            )  # fmt: skip
        result = tensor if reuse else tensor.clone()
        return self._begin(
            lambda group: dist.all_reduce(result, _OPS[op], group, async_op=True),
            mesh_ranks, tensor, lambda: result,
        )  # fmt: skip

    def start_pair_sum(
        self, tensors: Sequence[torch.Tensor], axis: Axis
    ) -> CollectiveHandle | None:
        """Exchange the tensors through shared memory, without packing them before."""
        _, size, mesh_ranks = self.group(axis)
        memory, counts = self._memory, [tensor.numel() for tensor in tensors]
        if memory is None or size != 2 or not all(counts) or not self._on_cpu(tensors[0]):
            return None
        dtype = tensors[0].dtype
        self.counts.note("all_reduce", axis, sum(counts) * dtype.itemsize)
        other = self._row[mesh_ranks[1 - mesh_ranks.index(self.mesh_rank)]]
        channel = self._channels[mesh_ranks]
        handle = memory.post(other, channel, (sum(counts),), dtype)
        memory.send_parts(other, channel, tensors)

        def wait() -> torch.Tensor:
            received = memory.wait(handle)
            foreach_add_(tensors, received.split(counts))
            return tensors[0]

        return _MemoryTransferHandle(wait)

    def _gather(
        self, flat: torch.Tensor, mesh_ranks: tuple[int, ...], counts: list[Size]
    ) -> CollectiveHandle:
        place = mesh_ranks.index(self.mesh_rank)
        if self._on_cpu(flat):
            whole = flat.new_empty(sum(counts))
            pieces = list(whole.split(counts))
            pieces[place].copy_(flat)
            shapes = [(count,) for count in counts]
            return self._swap(
                mesh_ranks, [flat] * len(mesh_ranks), shapes, lambda _: whole, into=pieces
            )
        longest = max(counts)
        padded = flat.new_empty(len(mesh_ranks) * longest)
        mine = flat if flat.numel() == longest else flat.new_zeros(longest)
        if mine is not flat:
            mine[: flat.numel()].copy_(flat)

        def finish() -> torch.Tensor:
            if min(counts) == longest:
                return padded
            rows = padded.view(len(mesh_ranks), longest)
            return torch.cat([row[:n] for row, n in zip(rows, counts, strict=True)])

        if not longest:
            return CompletedCollective(padded)
        return self._begin(
            lambda group: dist.all_gather_into_tensor(padded, mine, group, async_op=True),
            mesh_ranks, mine, finish,
        )  # fmt: skip

    def _scatter(
        self, flat: torch.Tensor, mesh_ranks: tuple[int, ...], counts: list[Size]
    ) -> CollectiveHandle:
        place = mesh_ranks.index(self.mesh_rank)
        parts = list(flat.split(counts))
        if self._on_cpu(flat):
            return self._swap(
                mesh_ranks, parts, [(counts[place],)] * len(mesh_ranks),
                lambda found: _total(_with(found, place, parts[place]), place, "sum", False),
            )  # fmt: skip
        longest = max(counts)
        if min(counts) == longest:
            padded = flat
        else:
            padded = flat.new_zeros(len(mesh_ranks), longest)
            for row, given in zip(padded, parts, strict=True):
                row[: given.numel()].copy_(given)
            padded = padded.view(-1)
        mine = flat.new_empty(longest)
        if not longest:
            return CompletedCollective(mine)
        return self._begin(
            lambda group: dist.reduce_scatter_tensor(mine, padded, group=group, async_op=True),
            mesh_ranks, padded, lambda: mine[: counts[place]],
        )  # fmt: skip

    def _exchange(
        self, flat: torch.Tensor, mesh_ranks: tuple[int, ...], give: list[Size], get: list[Size]
    ) -> CollectiveHandle:
        place = mesh_ranks.index(self.mesh_rank)
        found = flat.new_empty(sum(get))
        if self._on_cpu(flat):
            given, received = list(flat.split(give)), list(found.split(get))
            received[place].copy_(given[place])
            shapes = [(count,) for count in get]
            return self._swap(mesh_ranks, given, shapes, lambda _: found, into=received)
        return self._begin(
            lambda group: dist.all_to_all_single(found, flat, get, give, group, async_op=True),
            mesh_ranks, flat, lambda: found,
        )  # fmt: skip

    def _on_cpu(self, tensor: torch.Tensor) -> bool:
        return self._direct and tensor.device.type == "cpu"

    def _swap(
        self,
        mesh_ranks: tuple[int, ...],
        give: Sequence[torch.Tensor],
        shapes: Sequence[tuple[Size, ...]],
        finish: Callable[[list[torch.Tensor]], torch.Tensor],
        into: Sequence[torch.Tensor] = (),
    ) -> CollectiveHandle:
        """Send ``give[i]`` to the group's rank i and receive a tensor of ``shapes[i]`` from it.

        finish: gets the received tensors. into: where to put them, by default new memory.
        """
        group, place = self._groups[mesh_ranks], mesh_ranks.index(self.mesh_rank)
        others = [i for i in range(len(mesh_ranks)) if i != place]
        if self._memory is not None:
            return self._swap_in_memory(mesh_ranks, give, shapes, finish, into)
        like = give[place]
        get = list(into) or [
            like if i == place else like.new_empty(shape) for i, shape in enumerate(shapes)
        ]
        try:
            works = [group.recv([get[i]], i, _TAG) for i in others if get[i].numel()]
            works += [group.send([give[i]], i, _TAG) for i in others if give[i].numel()]
        except (RuntimeError, ValueError) as cause:
            raise PeerLostError(str(cause)) from cause
        return _GroupTransferHandle(
            works, (give, get), lambda: finish(get), self._limit, self.timeout
        )

    def _swap_in_memory(
        self,
        mesh_ranks: tuple[int, ...],
        give: Sequence[torch.Tensor],
        shapes: Sequence[tuple[Size, ...]],
        finish: Callable[[list[torch.Tensor]], torch.Tensor],
        into: Sequence[torch.Tensor],
    ) -> CollectiveHandle:
        """Do the same through shared memory. The tensors to send are copied before this returns."""
        memory, channel = self._memory, self._channels[mesh_ranks]
        assert memory is not None
        place = mesh_ranks.index(self.mesh_rank)
        posted = {}
        for at, (mesh_rank, shape) in enumerate(zip(mesh_ranks, shapes, strict=True)):
            if at != place and 0 not in shape:
                posted[at] = memory.post(self._row[mesh_rank], channel, shape, give[at].dtype)
        for at, mesh_rank in enumerate(mesh_ranks):
            if at != place and give[at].numel():
                memory.send(self._row[mesh_rank], channel, give[at].contiguous())

        def wait() -> torch.Tensor:
            empty = give[place].new_empty(0)
            found = [empty] * len(mesh_ranks)
            for at, handle in posted.items():
                found[at] = memory.wait(handle)
                if into:
                    into[at].copy_(found[at])
            for at, shape in enumerate(shapes):
                if at != place and at not in posted:
                    found[at] = empty.view(shape)
            return finish(found)

        return _MemoryTransferHandle(wait)

    def _begin(
        self,
        start: Callable[[Any], Any],
        mesh_ranks: tuple[int, ...],
        tensor: torch.Tensor,
        finish: Callable[[], torch.Tensor],
    ) -> CollectiveHandle:
        """Start one of torch's collectives."""
        try:
            work = start(self._groups[mesh_ranks])
        except (RuntimeError, ValueError) as cause:
            raise PeerLostError(str(cause)) from cause
        # On a GPU, waiting only orders CUDA streams; a limit would block the CPU.
        limit = self._limit if tensor.device.type == "cpu" else None
        return _GroupTransferHandle([work], tensor, finish, limit, self.timeout)


class _GroupTransferHandle:
    """A transfer in progress. It keeps the tensors that torch reads and writes."""

    __slots__ = ("_finish", "_kept", "_limit", "_timeout", "_works")

    def __init__(
        self,
        works: list[Any],
        kept: object,
        finish: Callable[[], torch.Tensor],
        limit: timedelta | None,
        timeout: float,
    ) -> None:
        self._works, self._kept, self._finish = works, kept, finish
        self._limit, self._timeout = limit, timeout

    def wait(self) -> torch.Tensor:
        """Return the result; call it once."""
        waiting.rank, waiting.since = ALL, time.monotonic()
        try:
            for work in self._works:
                if self._limit is None:
                    work.wait()
                else:
                    work.wait(self._limit)
        except (RuntimeError, ValueError) as cause:
            text = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
            if any(mark in text.lower() for mark in _TIMED_OUT):
                raise TransferTimeoutError(self._timeout, text) from cause
            raise PeerLostError(text) from cause
        waiting.rank = NO_RANK
        self._works = []
        result = self._finish()
        self._kept = None
        return result


class _MemoryTransferHandle:
    """A transfer through shared memory."""

    __slots__ = ("_wait",)

    def __init__(self, wait: Callable[[], torch.Tensor]) -> None:
        self._wait = wait

    def wait(self) -> torch.Tensor:
        """Return the result; call it once."""
        with torch.no_grad():
            return self._wait()


def _with(parts: list[torch.Tensor], place: int, own: torch.Tensor) -> list[torch.Tensor]:
    """Put this rank's own part among the received ones."""
    return [own if at == place else part for at, part in enumerate(parts)]


def _total(parts: list[torch.Tensor], place: int, op: str, reuse: bool) -> torch.Tensor:
    """Reduce the parts in rank order, so that every rank gets the same bits.

    parts[place] is this rank's own and is overwritten only with ``reuse``.
    """
    add = torch.maximum if op == "max" else torch.add
    with torch.no_grad():
        if len(parts) == 2:
            return add(parts[0], parts[1], out=parts[place] if reuse else None)
        total = add(parts[0], parts[1])
        for part in parts[2:]:
            add(total, part, out=total)
        return total
