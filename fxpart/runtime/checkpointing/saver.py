"""Asynchronous checkpoints: tensors are copied between two steps, and a thread writes them.

During a save ranks communicate only through its folder: each leaves a manifest when its file is on
disk, and rank 0 completes the checkpoint when all have. The next save exchanges the result of the
previous one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fxpart.checkpoint import folder, manifest_merge
from fxpart.checkpoint.manifest import NAME, CheckpointManifest
from fxpart.checkpoint.manifest_codec import digest
from fxpart.checkpoint.reader import Checkpoint
from fxpart.checkpoint.signature import SigningKey
from fxpart.checkpoint.writer import PLAN, write_rank, write_text
from fxpart.errors import FxpartError, error
from fxpart.runtime.checkpointing.snapshot import (
    CheckpointSnapshot,
    StagingBuffers,
    flush_before_snapshot,
    take_snapshot,
)
from fxpart.runtime.queues.fault_tolerant_transport import FaultTolerantTransport
from fxpart.runtime.transport.agreement import (
    AllRanksError,
    convert_transport_errors,
    encode_problems,
    merge_problems,
)

if TYPE_CHECKING:
    from fxpart.runtime.trainer import Trainer

_POLL_SECONDS = 0.02  # seconds between two checks of the folder
_EXCHANGE_SECONDS = 1.0  # seconds between exchanges of ranks that wait for a save
# names of flight recorder events
_SNAPSHOT_EVENT, _WAIT_EVENT = "taking a checkpoint", "a checkpoint"


class CheckpointReplicator(Protocol):
    """Stores replicas of checkpoint files elsewhere."""

    def keep(self, step: int, folder: Path, manifest: CheckpointManifest) -> object:
        """Copy the complete checkpoint of a step from this folder."""


@dataclass
class _SaveJob:
    """One save of this process. failure: why the checkpoint is missing.

    world: number of writing ranks. get_lost_ranks: returns ranks that have ended and will not
    write.
    """

    step: int
    snapshot: CheckpointSnapshot | None
    extra: dict[str, Any]
    calls: int
    world: int
    get_lost_ranks: Callable[[], set[int]]
    failure: FxpartError | None = None
    done: Path | None = None
    written: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None


class Saver:
    """Saves a trainer's checkpoints into a folder shared by all ranks.

    last: step of the newest save known to be complete. problems: of failed saves, in order. A
    failed save affects neither training nor earlier checkpoints.
    """

    def __init__(
        self,
        trainer: Trainer,
        root: str | Path,
        *,
        keep: int = folder.FEWEST,
        generation: int = 0,
        fingerprint: str | None = None,
        plan_text: str | None = None,
        copies: CheckpointReplicator | None = None,
        strict: bool = False,
        patience: float = 60.0,
        fence: Callable[[], None] | None = None,
        key: SigningKey | None = None,
    ) -> None:
        """Create a saver; every rank creates one with the same arguments.

        keep: number of checkpoints kept, at least 2; 0: all. generation: of the run. fingerprint,
        plan_text: those of the trainer by default. copies: replicates each checkpoint. strict:
        raise FXP513 on every rank if a save has failed. patience: least seconds that ranks wait for
        each other's files. fence: called before each write; raises FXP521 once another process has
        resumed the run. key: signs each checkpoint.
        """
        self.root = Path(root).absolute()
        self.last: int | None = None
        self.problems: list[FxpartError] = []
        self._trainer = trainer
        self._keep = keep
        self._generation = generation
        self._fingerprint = trainer.fingerprint if fingerprint is None else fingerprint
        self._plan = trainer.plan_text if plan_text is None else plan_text
        self._replicator = copies
        self._strict = strict
        self._patience = patience
        self._check_fence = fence or (lambda: None)
        self._key = key
        self._staging = StagingBuffers()
        self._job: _SaveJob | None = None

    def save(self, step: int, extra: dict[str, Any] | None = None, *, wait: bool = False) -> None:
        """Start a checkpoint of the trainer after ``step`` updates; every rank calls it.

        extra: plain data returned by :func:`~fxpart.runtime.checkpointing.loader.restore`; rank 0's
        is stored. wait: until the checkpoint is complete (without staging copies). A save in
        progress is awaited first. An asynchronous trainer is flushed. FXP109 if accumulated
        gradients wait for an update; other failures are added to :attr:`problems` later.
        """
        flush_before_snapshot(self._trainer)
        self._finish_on_all_ranks()
        self._trainer.events.put(_SNAPSHOT_EVENT)
        transport, calls = self._trainer.transport, self._trainer.calls
        get_lost_ranks = (
            transport.watch_lost_ranks()
            if isinstance(transport, FaultTolerantTransport)
            else set[int]
        )
        job = _SaveJob(step, None, dict(extra or {}), calls, transport.ranks, get_lost_ranks)
        try:
            self._discard_partial(step)
            job.snapshot = take_snapshot(self._trainer, None if wait else self._staging)
        except FxpartError as failure:
            job.failure = failure
        # Before any rank writes, rank 0 removes remains of an earlier attempt.
        self._exchange(0)
        self._trainer.events.put(_SNAPSHOT_EVENT, "end")
        self._job = job
        job.thread = threading.Thread(target=self._run, args=(job,), name="saver", daemon=True)
        job.thread.start()
        if wait:
            self._finish_on_all_ranks()

    def finish(self) -> None:
        """Wait for the save in progress in this process only, without communication or errors.

        Every rank calls it, or none.
        """
        job, self._job = self._job, None
        if job is not None and job.thread is not None:
            job.thread.join()
            self._record_result(job, [] if job.failure is None else [job.failure])

    def wait(self) -> None:
        """Wait for the save in progress; every rank calls it. FXP513 if strict."""
        self._finish_on_all_ranks()

    def confirm(self, step: int) -> bool:
        """Read the checkpoint of a step back; return whether it is complete and intact.

        A save in progress is awaited first. Every rank calls it and reads its share of the bytes.
        """
        self._finish_on_all_ranks()
        transport, path = self._trainer.transport, self.root / folder.step_name(step)
        alone = transport.ranks == len(transport.local)
        share = (0, 1) if alone else (transport.local[0], transport.ranks)
        intact: list[bool] = []

        def read() -> None:
            with contextlib.suppress(FxpartError):
                intact.append(not Checkpoint.open(path, self._key).verify(share=share))

        reader = threading.Thread(target=read, name="confirm", daemon=True)
        reader.start()

        def ended(seconds: float) -> bool:
            reader.join(seconds)
            return not reader.is_alive()

        self._wait_on_all_ranks(ended)
        return all(self._exchange(intact == [True]))

    # -- between the ranks ----------------------------------------------------------------------

    def _exchange(self, number: int) -> list[int]:
        transport = self._trainer.transport
        with convert_transport_errors(transport, "saving a checkpoint"):
            return [row[0] for row in transport.exchange([number])]

    def _wait_on_all_ranks(self, done: Callable[[float], bool]) -> None:
        """Wait until done on every rank, exchanging often enough that none waits for long.

        done: waits at most the given seconds and returns whether it is done.
        """
        while not all(self._exchange(done(_EXCHANGE_SECONDS))):
            pass

    def _finish_on_all_ranks(self) -> None:
        """Wait for the save in progress and exchange its result with all ranks."""
        job, self._job = self._job, None
        if job is None:
            return
        thread, events = job.thread, self._trainer.events
        assert thread is not None
        events.put(_WAIT_EVENT, "wait")
        self._wait_on_all_ranks(job.written.wait)
        if any(self._exchange(job.failure is not None)):
            job.cancelled.set()

        def ended(seconds: float) -> bool:
            thread.join(seconds)
            return not thread.is_alive()

        self._wait_on_all_ranks(ended)
        events.put(_WAIT_EVENT, "end")
        problems = []
        if any(self._exchange(job.failure is not None)):
            transport = self._trainer.transport
            mine = encode_problems([] if job.failure is None else job.failure.problems)
            with convert_transport_errors(transport, "saving a checkpoint"):
                problems = [
                    replace(problem, where=f"{problem.where}, step {job.step}")
                    for problem in merge_problems(transport.exchange_bytes(mine))
                ]
            with contextlib.suppress(FxpartError):
                self._discard_partial(job.step)  # no thread of any rank writes there any more
        self._record_result(job, [AllRanksError(problems)] if problems else [])
        if problems and self._strict:
            raise self.problems[-1]

    def _record_result(self, job: _SaveJob, failures: list[FxpartError]) -> None:
        self.problems += failures
        if not failures:
            self.last = job.step

    # -- the thread -----------------------------------------------------------------------------

    def _run(self, job: _SaveJob) -> None:
        try:
            if job.failure is None:
                started = time.monotonic()
                partial = self._write(job)
                job.written.set()
                limit = max(self._patience, 20 * (time.monotonic() - started))
                job.done = self._complete(job, partial, time.monotonic() + limit)
        except FxpartError as failure:
            job.failure = failure
        except Exception as cause:  # An exception of this thread would not be reported.
            why = f"{type(cause).__name__}: {cause}"
            job.failure = error("FXP513", where=self._where(), why=why, fix="report this bug")
        finally:
            job.snapshot = None
            if job.failure is not None and not job.written.is_set():
                self._mark_failed(job)
            job.written.set()

    def _write(self, job: _SaveJob) -> Path:
        """Write this process's files; return their folder."""
        assert job.snapshot is not None
        self._check_fence()
        partial = folder.begin(self.root, job.step, self._generation)
        first = self._trainer.rank
        for rank, pieces in job.snapshot.pieces.items():
            more = {"groups": job.snapshot.groups} if rank == first else {}
            write_rank(partial, rank, pieces, values=job.snapshot.values[rank], more=more)
        return partial

    def _complete(self, job: _SaveJob, partial: Path, limit: float) -> Path:
        """Return the complete checkpoint: rank 0 completes it, the others wait."""
        final = self.root / folder.step_name(job.step)
        manifest: CheckpointManifest | None = None
        if 0 in self._trainer.transport.local:
            shared = dict(job.snapshot.shared) if job.snapshot is not None else {}
            job.snapshot = None  # release the views of the snapshot
            self._wait_for(
                job,
                limit,
                partial,
                lambda: not manifest_merge.list_missing_ranks(partial, job.world),
            )
            final, manifest = self._commit(job, partial, shared)
            if self._keep:
                folder.prune(
                    self.root, self._keep, generation=self._generation, step=job.step, key=self._key
                )
        else:
            # A damaged checkpoint of the same step may exist there until it is replaced.
            done = (final / NAME).exists
            self._wait_for(job, limit, partial, lambda: not partial.exists() and done())
            if self._replicator is not None:
                manifest = Checkpoint.open(final, self._key).manifest
        if self._replicator is not None and manifest is not None:
            self._check_fence()
            self._replicator.keep(job.step, final, manifest)
        return final

    def _commit(
        self, job: _SaveJob, partial: Path, shared: dict[str, Any]
    ) -> tuple[Path, CheckpointManifest]:
        files = {PLAN: write_text(partial, PLAN, self._plan)} if self._plan else {}
        written = manifest_merge.read_rank_manifests(partial, job.world)
        trainer = self._trainer
        mode = trainer.weight_mode.name
        manifest = manifest_merge.merge(
            written, step=job.step, calls=job.calls, seed=trainer.seed,
            fingerprint=self._fingerprint,
            plan=digest(self._plan.encode()).hexdigest() if self._plan else "",
            generation=self._generation, weights=mode, files=files,
            values={f"trainer/{name}": value for name, value in shared.items()},
            groups=_merge_groups([each.more.get("groups", []) for each in written], trainer),
            extra=job.extra,
        )  # fmt: skip
        self._check_fence()
        return folder.commit(partial, manifest, self._key), manifest

    def _wait_for(self, job: _SaveJob, limit: float, partial: Path, is_done: Any) -> None:
        """Wait for a condition; FXP513 if a rank has failed or after the time limit."""
        while not is_done():
            failed = sorted(path.name for path in partial.glob("*.failed"))
            is_lost = not partial.exists() and not is_done()
            first = 0 in self._trainer.transport.local
            if first and (lost := job.get_lost_ranks()):
                is_lost |= not lost.isdisjoint(
                    manifest_merge.list_missing_ranks(partial, job.world)
                )
            if failed or is_lost or job.cancelled.is_set() or time.monotonic() > limit:
                if first:
                    missing = manifest_merge.list_missing_ranks(partial, job.world)
                    folder.discard(partial)
                    why = f"rank {', '.join(map(str, missing))} did not finish its file"
                else:
                    why = "it was not completed by rank 0"
                fix = "see the messages of the other ranks, and use a folder that all ranks share"
                raise error("FXP513", where=self._where(), why=why, fix=fix)
            time.sleep(_POLL_SECONDS)

    def _mark_failed(self, job: _SaveJob) -> None:
        """Mark this rank's file as failed for the other ranks, if possible."""
        with contextlib.suppress(OSError, FxpartError):
            self._check_fence()
            partial = folder.begin(self.root, job.step, self._generation)
            (partial / f"rank-{self._trainer.rank:05d}.failed").touch()

    def _discard_partial(self, step: int) -> None:
        self._check_fence()
        if 0 in self._trainer.transport.local:
            folder.discard(folder.begin(self.root, step, self._generation))

    def _where(self) -> str:
        return f"{self.root}, rank {self._trainer.rank}"


def _merge_groups(
    groups_by_rank: list[list[dict[str, Any]]], trainer: Trainer
) -> list[dict[str, Any]]:
    """Merge the groups of all processes by position, parameters in model order."""
    place = {name: index for index, name in enumerate(trainer.parts.state.entries)}
    merged: list[dict[str, Any]] = []
    for groups in groups_by_rank:
        for index, group in enumerate(groups):
            if index == len(merged):
                merged.append({**group, "params": []})
            merged[index]["params"] += group["params"]
    for group in merged:
        group["params"] = sorted(set(group["params"]), key=place.__getitem__)
    return merged
