"""A communicator for every stage and mesh rank of this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from fxpart.collectives import Communicator, GroupCommunicator, InProcessHub
from fxpart.collectives.communicator import Start
from fxpart.collectives.mesh_groups import connect_groups, list_groups, make_groups
from fxpart.errors import error
from fxpart.program.spec import ShardingSpec, select_zero_axes
from fxpart.runtime.mesh.mesh_ranks import MeshRank, Ranks
from fxpart.runtime.state.shard_layout import ShardLayout
from fxpart.runtime.transport.interface import Transport
from fxpart.runtime.transport.process_group_transport import ProcessGroupTransport
from fxpart.runtime.transport.shared_memory import SharedMemory
from fxpart.sharding import Mesh


class MeshCommunicators:
    """The communicators of this process.

    threads: whether all mesh ranks are in this process, each in its own thread. differ: whether
    some stage has fewer ranks than the mesh, each of which represents several mesh ranks.
    """

    def __init__(
        self,
        mesh: Mesh,
        mesh_ranks: Sequence[MeshRank],
        ranks: Ranks,
        transport: Transport,
        sums: Collection[tuple[str, ...]] = (),
        device: torch.device | None = None,
        gather_ahead: int = 0,
    ) -> None:
        """Create the communicators; every rank must call it.

        ranks: of each stage and mesh rank. sums: mesh axes over which gradients are reduced.
        device: of this process's tensors, by default the CPU. gather_ahead: for how many blocks
        sharded parameters are gathered ahead.
        """
        if {rank for stage in ranks for rank in stage} != set(range(transport.ranks)):
            raise error(
                "FXP109",
                where=f"the ranks of the stages, {ranks}",
                why=f"they do not include each of the {transport.ranks} ranks",
                fix=f"{len(ranks)} stages on the mesh {mesh} need {len(ranks) * mesh.size} ranks",
            )
        self.mesh = mesh
        self._ranks = ranks
        self.threads = len(transport.local) == transport.ranks
        self.differ = any(len(set(row)) < len(row) for row in ranks)
        self._memory: SharedMemory | None = None
        self._hubs: list[InProcessHub] = []
        self._reduction_hubs: list[InProcessHub] = []
        self._communicators: dict[tuple[int, int], Communicator] = {}
        self._reduction_communicators: dict[tuple[int, int], Communicator] = {}
        if self.threads:
            self._hubs, self._communicators = _hubs(mesh, len(ranks))
            if sums:
                self._reduction_hubs, self._reduction_communicators = _hubs(mesh, len(ranks))
        else:
            device = torch.device("cpu") if device is None else device
            sets: list[Collection[tuple[str, ...]] | None] = [None, *([sums] if sums else [])]
            memory, channels = _connect_memory(mesh, ranks, transport, device, sets)
            made = [
                _make_group_communicators(
                    mesh, ranks, transport, device, axes, memory=memory, channels=numbers
                )
                for axes, numbers in zip(sets, channels, strict=True)
            ]
            self._memory = memory
            self._communicators = made[0]
            self._reduction_communicators = made[-1] if sums else {}
        for place, end in self._reduction_communicators.items():
            end.counts = self._communicators[place].counts
        for own in self._communicators.values():
            own.blocks_ahead = gather_ahead
        for mesh_rank in mesh_ranks:
            self.attach(mesh_rank.index, mesh_rank.modules)

    def sums(self, stage: int, mesh_rank: int) -> Communicator:
        """Return the communicator for gradient reduction, independent of other collectives."""
        return self._reduction_communicators[stage, mesh_rank]

    def of(self, stage: int, mesh_rank: int) -> Communicator:
        """Return the communicator of a mesh rank at a stage."""
        return self._communicators[stage, mesh_rank]

    def attach(self, mesh_rank: int, modules: Mapping[int, nn.Module]) -> None:
        """Set the communicators of stage modules, as ``module.mesh``."""
        for stage, module in modules.items():
            vars(module)["mesh"] = self._communicators[stage, mesh_rank]

    def watch(self, around: Callable[[int], Callable[[str, Start], Start]] | None) -> None:
        """Start every rank's collectives through ``around(rank)``; None: undo."""
        for (stage, mesh_rank), end in self._communicators.items():
            end.watch(None if around is None else around(self._ranks[stage][mesh_rank]))

    def take_lookups(self) -> tuple[int, int]:
        """Return the ids looked up in row-sharded tables since the last call, and rows received."""
        rows = [c.counts.rows for c in {id(c): c for c in self._communicators.values()}.values()]
        found = [pair for counted in rows for pair in counted.values()]
        for counted in rows:
            counted.clear()
        return sum(ids for ids, _ in found), sum(received for _, received in found)

    def leave(self, mesh_rank: int, cause: BaseException | str) -> None:
        """Report that a mesh rank has ended or failed, so that no thread waits for it."""
        for hub in (*self._hubs, *self._reduction_hubs):
            hub.abort(mesh_rank, cause)

    def recover(self) -> None:
        """Reset after all mesh ranks of this process have ended their tasks."""
        for hub in self._hubs:
            hub.reset()
        for hub in self._reduction_hubs:
            hub.revive()

    def forget(self) -> None:
        """Discard started gradient reductions of this process, after a failure."""
        for hub in self._reduction_hubs:
            hub.reset()

    def close(self) -> None:
        """Release the process groups; no method may be called afterwards."""
        for end in {
            id(e): e
            for e in (*self._communicators.values(), *self._reduction_communicators.values())
        }.values():
            if isinstance(end, GroupCommunicator):
                end.close()
        if self._memory is not None:
            self._memory.close()


def find_reduction_axes(sharding: ShardingSpec) -> set[tuple[str, ...]]:
    """Return the sets of mesh axes over which gradients are reduced or scattered."""
    found = {tensor.partial for tensor in sharding.state.values() if tensor.partial}
    if sharding.zero:
        for name, tensor in sharding.state.items():
            sharded = ShardLayout.of(sharding, name, tensor.shape).axes
            axes = select_zero_axes(sharding.zero_axis, sharded, tensor.partial)
            if axes and {*axes} <= {*tensor.partial}:
                found.add(axes)
    return found


CommunicatorTable = dict[tuple[int, int], Communicator]


def _hubs(mesh: Mesh, stages: int) -> tuple[list[InProcessHub], CommunicatorTable]:
    """Create a hub per stage for mesh ranks in one process, and the communicators."""
    hubs = [InProcessHub(mesh) for _ in range(stages)]
    return hubs, {
        (s, end.mesh_rank): end for s, hub in enumerate(hubs) for end in hub.communicators
    }


def _connect_memory(
    mesh: Mesh,
    ranks: Ranks,
    transport: Transport,
    device: torch.device,
    sets: Sequence[Collection[tuple[str, ...]] | None],
) -> tuple[SharedMemory | None, list[dict[tuple[int, tuple[int, ...]], int]]]:
    """Connect the ranks of one host by shared memory, with a channel for each group.

    Returns the channels by stage and mesh ranks, for each of the sets of axes.
    """
    channels: list[dict[tuple[int, tuple[int, ...]], int]] = []
    count = 0
    for axes in sets:
        groups = [
            (stage, group)
            for stage in range(len(dict.fromkeys(ranks)))
            for group in list_groups(mesh, axes)
        ]
        channels.append({group: count + at for at, group in enumerate(groups)})
        count += len(groups)
    if device.type != "cpu" or not isinstance(transport, ProcessGroupTransport):
        return None, channels
    return transport.connect_memory(count), channels


def _make_group_communicators(
    mesh: Mesh,
    ranks: Ranks,
    transport: Transport,
    device: torch.device,
    axes: Collection[tuple[str, ...]] | None = None,
    *,
    memory: SharedMemory | None,
    channels: Mapping[tuple[int, tuple[int, ...]], int],
) -> CommunicatorTable:
    """Create communicators of this process's rank; stages on the same ranks share one."""
    rows = list(dict.fromkeys(ranks))
    made = make_groups(mesh, rows, transport.timeout, axes)
    connect_groups(made, device)
    (here,) = transport.local
    ends = {
        row: GroupCommunicator(
            mesh,
            len(rows),
            ranks=rows,
            timeout=transport.timeout,
            stage=at,
            groups=made,
            memory=memory,
            channels={group: n for (where, group), n in channels.items() if where == at},
        )
        for at, row in enumerate(rows)
        if here in row
    }
    return {(s, ends[row].mesh_rank): ends[row] for s, row in enumerate(ranks) if row in ends}
