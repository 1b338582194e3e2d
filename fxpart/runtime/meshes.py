"""What connects the lanes of each stage: a communicator for every (stage, lane) of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from fxpart.collectives import Communicator, GroupCommunicator, InProcessHub
from fxpart.collectives.communicator import Start
from fxpart.errors import error
from fxpart.runtime.lanes import Lane, Ranks
from fxpart.runtime.transport import Transport
from fxpart.sharding import Mesh


class Meshes:
    """The communicators of this process.

    threads: whether all lanes are in this process, each in a thread of its own.
    """

    def __init__(
        self, mesh: Mesh, lanes: Sequence[Lane], ranks: Ranks, transport: Transport
    ) -> None:
        """ranks: of each stage and lane. Every rank must call it."""
        if sorted(rank for stage in ranks for rank in stage) != list(range(transport.ranks)):
            raise error(
                "FXP109",
                where=f"the stages' ranks, {ranks}",
                why=f"they are not all of the {transport.ranks} that there are, each once",
                fix=f"{len(ranks)} stages on the mesh {mesh} need {len(ranks) * mesh.size} ranks",
            )
        self.mesh = mesh
        self._ranks = ranks
        self.threads = len(transport.local) == transport.ranks
        self._hubs: list[InProcessHub] = []
        self._ends: dict[tuple[int, int], Communicator] = {}
        if self.threads:
            self._hubs = [InProcessHub(mesh) for _ in ranks]
            for stage, hub in enumerate(self._hubs):
                self._ends |= {(stage, end.lane): end for end in hub.communicators}
        else:
            end = GroupCommunicator(mesh, len(ranks), ranks=ranks, timeout=transport.timeout)
            self._ends = {(end.stage, end.lane): end}
        for lane in lanes:
            self.attach(lane.index, lane.modules)

    def of(self, stage: int, lane: int) -> Communicator:
        """The lane's end at a stage."""
        return self._ends[stage, lane]

    def attach(self, lane: int, modules: Mapping[int, nn.Module]) -> None:
        """Give stage modules their communicator, as ``module.mesh``."""
        for stage, module in modules.items():
            vars(module)["mesh"] = self._ends[stage, lane]

    def watch(self, around: Callable[[int], Callable[[str, Start], Start]] | None) -> None:
        """Have every rank's collectives started through ``around(rank)``; None: as ever."""
        for (stage, lane), end in self._ends.items():
            end.watch(None if around is None else around(self._ranks[stage][lane]))

    def leave(self, lane: int, cause: BaseException | str) -> None:
        """The lane has ended or failed: no thread of this process waits for it any more."""
        for hub in self._hubs:
            hub.abort(lane, cause)

    def recover(self) -> None:
        """All lanes of this process are through: they may meet again."""
        for hub in self._hubs:
            hub.reset()

    def close(self) -> None:
        """Give back what connects processes; nothing may be called after it."""
        for end in self._ends.values():
            if isinstance(end, GroupCommunicator):
                end.close()
