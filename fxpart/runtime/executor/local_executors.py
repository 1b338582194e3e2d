"""The executors of this process, run together until all are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic, sleep
from typing import TypeVar

from fxpart.errors import FxpartError, error
from fxpart.runtime.executor.executor import Executor
from fxpart.runtime.mesh.communicators import MeshCommunicators
from fxpart.runtime.mesh.mesh_ranks import MeshRankThreads
from fxpart.runtime.transport.agreement import make_lost_peer_error
from fxpart.runtime.transport.interface import PeerLostError, TransferTimeoutError, Transport

E = TypeVar("E", bound=Executor)
R = TypeVar("R")
T = TypeVar("T")
_PAUSE = 1e-4  # Seconds between looks for messages of other mesh ranks in this process.
_LIMIT = 300.0  # Maximum seconds of such a wait.


class LocalExecutors:
    """Runs executors by mesh rank: mesh ranks concurrently, those of one mesh rank alternately.

    broken: why the connection to other ranks cannot be used any more, or None. has_threads: whether
    all mesh ranks of a stage are in this process.
    """

    def __init__(
        self, mesh_ranks: Sequence[int], transport: Transport, meshes: MeshCommunicators | None
    ) -> None:
        """mesh_ranks: those of this process. meshes: their communicators."""
        self._receives_across = meshes is not None and meshes.threads and meshes.differ
        self.broken: str | None = None
        self.has_threads = meshes is not None and meshes.threads
        self._transport = transport
        self._meshes = meshes
        self._threads = MeshRankThreads(mesh_ranks, self.leave)

    def check_whole(self) -> None:
        """Raise FXP504 if an earlier failure closed the connection.

        Call it before anything is sent: other ranks may still exchange the earlier failure.
        """
        if self.broken is not None:
            raise error(
                "FXP504",
                where="this process",
                why=f"an earlier failure ended the training: {self.broken}",
                fix="restart the job from its last checkpoint",
            )

    @contextmanager
    def watch(self, executors: Mapping[int, list[E]], what: str) -> Iterator[None]:
        """Note failures that close the connection. what: for the message of a lost peer."""
        try:
            yield
        except FxpartError as cause:
            if any(each.lost for mine in executors.values() for each in mine):
                self.broken = cause.problems[0].why
            raise
        except (TransferTimeoutError, PeerLostError) as cause:
            self.broken = str(cause)
            raise make_lost_peer_error(self._transport.local[0], what, cause) from cause
        except BaseException as cause:
            self.broken = type(cause).__name__
            raise
        finally:
            if self._meshes is not None:
                self._meshes.recover()

    def run_all(self, tasks: Mapping[int, Callable[[], T]]) -> dict[int, T]:
        """Run one task for each mesh rank concurrently; return their results."""
        try:
            return self._threads.run_all(tasks)
        finally:
            if self._meshes is not None:
                self._meshes.recover()

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    def run(
        self, executors: Mapping[int, list[E]], begin: Callable[[int, E], Iterator[None]]
    ) -> None:
        """Run all executors to the end. executors: by mesh rank. begin: returns an executor's run.

        Raises FXP901 if none can continue.
        """
        self._threads.run_all(
            {index: partial(self._drive, index, mine, begin) for index, mine in executors.items()}
        )

    def leave(self, mesh_rank: int, cause: BaseException | str) -> None:
        """Release local mesh ranks that wait for a failed one; they fail, too."""
        if self._meshes is not None:
            self._meshes.leave(mesh_rank, cause)

    def _drive(
        self, mesh_rank: int, executors: list[E], begin: Callable[[int, E], Iterator[None]]
    ) -> None:
        def leave_if_halted(executor: E) -> None:
            if executor.halted:
                self.leave(mesh_rank, "a stage of this mesh rank has failed")

        runs = {executor: begin(mesh_rank, executor) for executor in executors}
        for executor in executors:
            leave_if_halted(executor)  # Since an earlier call, of an asynchronous pipeline.
        stuck = run_cooperatively(runs, lambda each: each.position, after=leave_if_halted)
        latest, limit = sum(each.position for each in executors), monotonic() + _LIMIT
        # Messages of stages on meshes of different size come from other mesh ranks' threads.
        while stuck and self._receives_across and monotonic() < limit:
            sleep(_PAUSE)
            runs = {each: runs[each] for each in stuck}
            stuck = run_cooperatively(runs, lambda each: each.position, after=leave_if_halted)
            if (position := sum(each.position for each in executors)) > latest:
                latest, limit = position, monotonic() + _LIMIT
        if stuck:
            self.broken = "no rank can make progress"
            where = ", ".join(f"rank {each.rank} at {each.doing}" for each in stuck)
            raise error("FXP901", where=where, why=self.broken, fix="")


def run_cooperatively(
    runs: Mapping[R, Iterator[None]],
    progress: Callable[[R], object],
    *,
    after: Callable[[R], object] = id,
) -> list[R]:
    """Advance all iterators in round-robin order; return those left when none makes progress.

    progress: returns a value that changes with any activity of the given run. after: called after
    each turn.
    """
    left, done = dict(runs), object()
    while left:
        waiting = list(left)
        before = [progress(each) for each in waiting]
        for each in waiting:
            if next(left[each], done) is done:
                del left[each]
            after(each)
        if len(left) == len(waiting) and before == [progress(each) for each in waiting]:
            return waiting
    return []
