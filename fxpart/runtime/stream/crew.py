"""The stages of this process, driven through one call after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from fxpart.errors import FxpartError, error
from fxpart.events.ring import Ring
from fxpart.runtime.agreement import lost
from fxpart.runtime.batch import Cut
from fxpart.runtime.engine import used_inputs
from fxpart.runtime.lanes import Crew, Lane, Ranks, lane_ranks
from fxpart.runtime.meshes import Meshes
from fxpart.runtime.recompute import Mode
from fxpart.runtime.stage import StageTable
from fxpart.runtime.state import Place
from fxpart.runtime.stream.layout import Layout
from fxpart.runtime.stream.mail import Seat
from fxpart.runtime.stream.runner import Batch, Runner
from fxpart.runtime.stream.updates import StageUpdate
from fxpart.runtime.transport import PeerLostError, TransferTimeoutError, Transport
from fxpart.runtime.turns import in_turn
from fxpart.runtime.weights import StageWeights
from fxpart.schedule.versions import Versions

Work = Callable[[Runner], Iterator[None]]


class Stages:
    """The runners of a process's lanes, one for each stage; they take turns within a lane.

    runners, updates: by stage and lane. broken: why nothing can be run any more.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        ranks: Ranks,
        transport: Transport,
        devices: Mapping[int, torch.device],
        layout: Layout,
        versions: Versions,
        *,
        weights: Mapping[Place, StageWeights],
        updates: Mapping[Place, StageUpdate],
        meshes: Meshes | None,
        crew: Crew,
        recompute: Mapping[int, Mode],
        events: Ring,
    ) -> None:
        """See :class:`fxpart.runtime.engine.Engine`."""
        self._lanes = tuple(lanes)
        self._devices = devices
        self._transport = transport
        self._meshes = meshes
        self._crew = crew
        self._used = {rank: used_inputs(lanes, ranks, rank) for rank in transport.local}
        self.updates = dict(updates)
        self.broken: str | None = None
        self.runners: dict[Place, Runner] = {}
        alone = len(transport.local) == transport.ranks
        for lane in lanes:
            row = lane_ranks(ranks, lane.index)
            for stage, module in sorted(lane.modules.items()):
                place, rank = (stage, lane.index), row[stage]
                threads = meshes is not None and meshes.threads
                seat = Seat(rank, lane.index, row, transport, devices[rank], alone, threads, events)
                table = StageTable.of(
                    lane.spec, lane.spec.stages[stage], module, layout.found, False,
                    recompute.get(stage, "none"),
                )  # fmt: skip
                self.runners[place] = Runner(
                    layout, table, seat, versions, weights[place], updates[place]
                )

    def minibatch(self, cuts: Sequence[Cut], keys: Sequence[int], *, closing: bool) -> None:
        """A call's part of every stage; cuts: by lane. closing: and all that is left after it."""
        parts = {lane.index: cut for lane, cut in zip(self._lanes, cuts, strict=True)}

        def work(runner: Runner) -> Iterator[None]:
            cut = parts[runner.seat.lane]
            yield from runner.minibatch(self._batch(runner, cut, keys), cut.sizes, closing=closing)
            if closing:
                yield from runner.drain()

        self._run(work)

    def drain(self) -> None:
        """All backwards that are left."""
        self._run(Runner.drain)

    def begin(self, versions: Versions) -> None:
        """A stream begins."""
        for runner in self.runners.values():
            runner.weights.restart(versions.start)
            runner.begin(versions)

    def done(self) -> int:
        """Microbatches in the stream so far, the same on every stage between two calls."""
        return next(iter(self.runners.values())).forwards

    def halt(self) -> None:
        """No stage updates any more: what is under way ends with zeros."""
        for runner in self.runners.values():
            runner.halt()

    def _batch(self, runner: Runner, cut: Cut, keys: Sequence[int]) -> Batch:
        rank = runner.seat.rank
        inputs = cut.taken(self._used[rank], self._devices[rank])
        return Batch(inputs, cut.weights, keys)

    def _run(self, work: Work) -> None:
        if self.broken is not None:
            raise error(
                "FXP504",
                where="this process",
                why=f"an earlier failure ended the training: {self.broken}",
                fix="start the job again from its last checkpoint",
            )
        drives = {lane.index: partial(self._drive, lane, work) for lane in self._lanes}
        try:
            self._crew.together(drives)
        except FxpartError as cause:
            self.broken = cause.problems[0].why
            raise
        except (TransferTimeoutError, PeerLostError) as cause:
            self.broken = str(cause)
            raise lost(self._transport.local[0], "a stream of microbatches", cause) from cause
        except BaseException as cause:
            self.broken = type(cause).__name__
            raise
        finally:
            if self._meshes is not None:
                self._meshes.recover()

    def _drive(self, lane: Lane, work: Work) -> None:
        """Step the lane's stages in turn until all are through."""

        def leave(runner: Runner) -> None:
            """Other lanes do not wait for one of which a stage has failed."""
            if runner.halted and self._meshes is not None:
                self._meshes.leave(lane.index, "a stage of the lane has failed")

        mine = [self.runners[stage, lane.index] for stage in sorted(lane.modules)]
        for runner in mine:
            leave(runner)
        runs = {runner: work(runner) for runner in mine}
        stuck = in_turn(runs, lambda runner: runner.done, after=leave)
        if stuck:
            where = ", ".join(f"rank {r.seat.rank} at {r.doing}" for r in stuck)
            raise error("FXP901", where=where, why="no rank can go on", fix="")
