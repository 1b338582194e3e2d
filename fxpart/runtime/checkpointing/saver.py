"""Checkpoints off the step's path: copies are made between two steps, and a thread writes them.

Ranks do not talk to each other about a save that is under way but through its folder: each leaves
word there when its file is on the disk, and rank 0 completes the checkpoint when all have. The
next save asks all ranks how the last one went.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fxpart.checkpoint import folder, manifest_merge
from fxpart.checkpoint.manifest import NAME, CheckpointManifest
from fxpart.checkpoint.manifest_codec import digest
from fxpart.checkpoint.reader import Checkpoint
from fxpart.checkpoint.writer import PLAN, write_rank, write_text
from fxpart.errors import FxpartError, error
from fxpart.runtime.asynchronous.trainer_base import AsyncTrainerBase
from fxpart.runtime.checkpointing.snapshot import (
    CheckpointSnapshot,
    StagingBuffers,
    flush_before_snapshot,
    take_snapshot,
)
from fxpart.runtime.queues.fault_tolerant_transport import FaultTolerantTransport
from fxpart.runtime.stateful_trainer import StatefulTrainer
from fxpart.runtime.trainer import Trainer
from fxpart.runtime.transport.agreement import (
    AllRanksError,
    agree,
    convert_transport_errors,
    encode_problems,
    merge_problems,
)
from fxpart.schedule.weight_modes import FLUSH

_LOOK = 0.02  # seconds between two looks at the folder
_WORD = 1.0  # seconds after which ranks that wait for a save say so to each other
_TAKES, _WAITS = "taking a checkpoint", "a checkpoint"  # as the rank's events have it


class CheckpointReplicator(Protocol):
    """What keeps copies of files elsewhere."""

    def keep(self, step: int, folder: Path, manifest: CheckpointManifest) -> object:
        """The checkpoint of that step is complete in this folder."""


@dataclass
class _SaveJob:
    """One save of this process. failure: why there is no checkpoint of it.

    world: ranks that write. missed: which of them will not, as they have ended.
    """

    step: int
    taken: CheckpointSnapshot | None
    extra: dict[str, Any]
    calls: int
    world: int
    missed: Callable[[], set[int]]
    failure: FxpartError | None = None
    done: Path | None = None
    written: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None


class Saver:
    """Saves a trainer's checkpoints into a folder that all ranks share.

    last: the step of the newest save that is known to be complete. problems: of those that failed,
    in order. A failed save changes nothing of the training, nor of the checkpoints before it.
    """

    def __init__(
        self,
        trainer: StatefulTrainer,
        root: str | Path,
        *,
        keep: int = folder.FEWEST,
        generation: int = 0,
        fingerprint: str | None = None,
        plan_text: str | None = None,
        copies: CheckpointReplicator | None = None,
        strict: bool = False,
        patience: float = 60.0,
    ) -> None:
        """Every rank makes one, with the same arguments.

        keep: how many checkpoints stay, 2 or more; 0: all. generation: of the run. fingerprint,
        plan_text: by default those that the trainer was made with. copies: told of each checkpoint.
        strict: raise FXP513, on every rank, where a save has failed. patience: seconds that ranks
        wait at least for each other's files.
        """
        self.root = Path(root).absolute()
        self.last: int | None = None
        self.problems: list[FxpartError] = []
        self._trainer = trainer
        self._keep = keep
        self._generation = generation
        self._fingerprint = trainer.fingerprint if fingerprint is None else fingerprint
        self._plan = trainer.plan_text if plan_text is None else plan_text
        self._copies = copies
        self._strict = strict
        self._patience = patience
        self._staging = StagingBuffers()
        self._job: _SaveJob | None = None

    def save(self, step: int, extra: dict[str, Any] | None = None, *, wait: bool = False) -> None:
        """Begin a checkpoint of what the trainer is now, after so many updates; every rank calls.

        extra: plain data that comes back with :func:`~fxpart.runtime.checkpointing.loader.restore`;
        rank 0's is kept. wait: until the checkpoint is complete (nothing is copied then). One that
        is still under way is waited for first. An asynchronous trainer is drained. FXP109 where
        batches wait for an update; what else goes wrong is found in :attr:`problems` later.
        """
        flush_before_snapshot(self._trainer)
        self._conclude()
        self._trainer.events.put(_TAKES)
        transport, calls = self._trainer.transport, self._trainer.calls
        missed = transport.missed() if isinstance(transport, FaultTolerantTransport) else set[int]
        job = _SaveJob(step, None, dict(extra or {}), calls, transport.ranks, missed)
        try:
            self._clear(step)
            job.taken = take_snapshot(self._trainer, None if wait else self._staging)
        except FxpartError as failure:
            job.failure = failure
        # Nobody writes before rank 0 has removed what a process before left of the same save.
        self._exchange(0)
        self._trainer.events.put(_TAKES, "end")
        self._job = job
        job.thread = threading.Thread(target=self._run, args=(job,), name="saver", daemon=True)
        job.thread.start()
        if wait:
            self._conclude()

    def finish(self) -> None:
        """Wait for the save that is under way. Of this process alone: nothing is sent, or raised.

        Every rank calls it, or none.
        """
        job, self._job = self._job, None
        if job is not None and job.thread is not None:
            job.thread.join()
            self._note(job, [] if job.failure is None else [job.failure])

    # -- between the ranks ----------------------------------------------------------------------

    def _exchange(self, number: int) -> list[int]:
        transport = self._trainer.transport
        with convert_transport_errors(transport, "saving a checkpoint"):
            return [row[0] for row in transport.exchange([number])]

    def _together(self, done: Callable[[float], bool]) -> None:
        """Until it is so on every rank. A disk may be slow: no rank waits long for another's word.

        done: waits so many seconds at most, and says whether it is.
        """
        while not all(self._exchange(done(_WORD))):
            pass

    def _conclude(self) -> None:
        """Wait for the save that is under way, and hear of all ranks how it went."""
        job, self._job = self._job, None
        if job is None:
            return
        thread, events = job.thread, self._trainer.events
        assert thread is not None
        events.put(_WAITS, "wait")
        self._together(job.written.wait)
        if any(self._exchange(job.failure is not None)):
            job.cancelled.set()

        def ended(seconds: float) -> bool:
            thread.join(seconds)
            return not thread.is_alive()

        self._together(ended)
        events.put(_WAITS, "end")
        problems = []
        if any(self._exchange(job.failure is not None)):
            transport = self._trainer.transport
            mine = encode_problems([] if job.failure is None else job.failure.problems)
            with convert_transport_errors(transport, "saving a checkpoint"):
                problems = merge_problems(transport.exchange_bytes(mine))
            with contextlib.suppress(FxpartError):
                self._clear(job.step)  # no thread of any rank writes there any more
        self._note(job, [AllRanksError(problems)] if problems else [])
        if problems and self._strict:
            raise self.problems[-1]

    def _note(self, job: _SaveJob, failures: list[FxpartError]) -> None:
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
        except Exception as cause:  # a thread's exception would be heard by nobody
            why = f"{type(cause).__name__}: {cause}"
            job.failure = error("FXP513", where=self._where(), why=why, fix="report it")
        finally:
            job.taken = None
            if job.failure is not None and not job.written.is_set():
                self._give_up(job)
            job.written.set()

    def _write(self, job: _SaveJob) -> Path:
        """This process's files; the folder that they are in."""
        assert job.taken is not None
        partial = folder.begin(self.root, job.step, self._generation)
        first = self._trainer.rank
        for rank, pieces in job.taken.pieces.items():
            more = {"groups": job.taken.groups} if rank == first else {}
            write_rank(partial, rank, pieces, values=job.taken.values[rank], more=more)
        return partial

    def _complete(self, job: _SaveJob, partial: Path, limit: float) -> Path:
        """The complete checkpoint: made by rank 0, waited for by the others."""
        final = self.root / folder.step_name(job.step)
        manifest: CheckpointManifest | None = None
        if 0 in self._trainer.transport.local:
            shared = dict(job.taken.shared) if job.taken is not None else {}
            job.taken = None  # the copies' views are needed no more
            self._await(
                job,
                limit,
                partial,
                lambda: not manifest_merge.list_missing_ranks(partial, job.world),
            )
            final, manifest = self._commit(job, partial, shared)
            if self._keep:
                folder.prune(self.root, self._keep, generation=self._generation, step=job.step)
        else:
            # One of the same step that is damaged may stand there until ours takes its place.
            done = (final / NAME).exists
            self._await(job, limit, partial, lambda: not partial.exists() and done())
            if self._copies is not None:
                manifest = Checkpoint.open(final).manifest
        if self._copies is not None and manifest is not None:
            self._copies.keep(job.step, final, manifest)
        return final

    def _commit(
        self, job: _SaveJob, partial: Path, shared: dict[str, Any]
    ) -> tuple[Path, CheckpointManifest]:
        files = {PLAN: write_text(partial, PLAN, self._plan)} if self._plan else {}
        written = manifest_merge.read_rank_manifests(partial, job.world)
        trainer = self._trainer
        mode = trainer.weight_mode.name if isinstance(trainer, AsyncTrainerBase) else FLUSH
        manifest = manifest_merge.merge(
            written, step=job.step, calls=job.calls, seed=trainer.seed,
            fingerprint=self._fingerprint,
            plan=digest(self._plan.encode()).hexdigest() if self._plan else "",
            generation=self._generation, weights=mode, files=files,
            values={f"trainer/{name}": value for name, value in shared.items()},
            groups=_groups([each.more.get("groups", []) for each in written], trainer),
            extra=job.extra,
        )  # fmt: skip
        return folder.commit(partial, manifest), manifest

    def _await(self, job: _SaveJob, limit: float, partial: Path, there: Any) -> None:
        """Until it is there; FXP513 where a rank has given up, or too long has passed."""
        while not there():
            failed = sorted(path.name for path in partial.glob("*.failed"))
            gone = not partial.exists() and not there()
            first = 0 in self._trainer.transport.local
            if first and (lost := job.missed()):
                gone |= not lost.isdisjoint(manifest_merge.list_missing_ranks(partial, job.world))
            if failed or gone or job.cancelled.is_set() or time.monotonic() > limit:
                if first:
                    missing = manifest_merge.list_missing_ranks(partial, job.world)
                    folder.discard(partial)
                    why = f"rank {', '.join(map(str, missing))} did not finish its file"
                else:
                    why = "it was not completed by rank 0"
                fix = "see what the other ranks say; a folder that all ranks share"
                raise error("FXP513", where=self._where(), why=why, fix=fix)
            time.sleep(_LOOK)

    def _give_up(self, job: _SaveJob) -> None:
        """Tell the other ranks that this one's file will not come, as far as that can be."""
        with contextlib.suppress(OSError, FxpartError):
            partial = folder.begin(self.root, job.step, self._generation)
            (partial / f"rank-{self._trainer.rank:05d}.failed").touch()

    def _clear(self, step: int) -> None:
        if 0 in self._trainer.transport.local:
            folder.discard(folder.begin(self.root, step, self._generation))

    def _where(self) -> str:
        return f"{self.root}, rank {self._trainer.rank}"


def save_once(trainer: StatefulTrainer, root: Path, extra: dict[str, Any]) -> Path:
    """:meth:`fxpart.runtime.stateful_trainer.StatefulTrainer.save_checkpoint`."""
    assert isinstance(trainer, (Trainer, AsyncTrainerBase)), "there is no other"
    flush_before_snapshot(
        trainer
    )  # first: only without minibatches in flight do all ranks count alike
    step = trainer.updates
    root = root.absolute()
    final = root / folder.step_name(step)

    def check() -> tuple[None, str]:
        if trainer.rank == 0 and final.exists():
            fix = "another folder, or remove it"
            raise error("FXP513", where=str(final), why="it is there already", fix=fix)
        return None, f"step {step} {root}"

    agree(trainer.transport, "where a checkpoint is saved", check)
    Saver(trainer, root, keep=0, strict=True).save(step, extra, wait=True)
    return final


def _groups(told: list[list[dict[str, Any]]], trainer: StatefulTrainer) -> list[dict[str, Any]]:
    """The groups of all processes merged by position, parameters in the model's order."""
    place = {name: index for index, name in enumerate(trainer._state.entries)}
    merged: list[dict[str, Any]] = []
    for groups in told:
        for index, group in enumerate(groups):
            if index == len(merged):
                merged.append({**group, "params": []})
            merged[index]["params"] += group["params"]
    for group in merged:
        group["params"] = sorted(set(group["params"]), key=place.__getitem__)
    return merged
