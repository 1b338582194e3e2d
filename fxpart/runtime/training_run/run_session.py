"""One call of fit with a run folder: resume, write the ledger, save checkpoints, record the end."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from fxpart.checkpoint import folder
from fxpart.checkpoint.manifest import FINITE
from fxpart.checkpoint.reader import Checkpoint
from fxpart.checkpoint.signature import SigningKey
from fxpart.checkpoint.value_codec import from_json_value, to_json_value
from fxpart.diagnostics.exception_text import describe_exception
from fxpart.diagnostics.rank_event import LEFT
from fxpart.environment import read_launch
from fxpart.errors import FxpartError, Problem
from fxpart.runtime import heartbeat
from fxpart.runtime.monitor.nonfinite_guard import find_nonfinite_state
from fxpart.runtime.training_run import generations
from fxpart.runtime.training_run.generations import GenerationFence
from fxpart.runtime.training_run.ledger import LedgerGeneration, LedgerRollback, LedgerUpdate
from fxpart.runtime.training_run.options import Checkpoints
from fxpart.runtime.training_run.run_digests import (
    CompletedUpdate,
    digest_batches,
    digest_determinants,
    digest_text,
)
from fxpart.runtime.training_run.run_journal import RunJournal, RunStart
from fxpart.runtime.training_run.run_request import Options, apply_request, describe_request
from fxpart.runtime.training_run.run_state import (
    LEDGER,
    REQUEST,
    capture_run_state,
    restore_run_state,
)
from fxpart.runtime.training_run.stop_signals import StopSignals, get_signal_name
from fxpart.runtime.transport.agreement import agree, convert_transport_errors

if TYPE_CHECKING:
    from fxpart.runtime.checkpointing.memory_replicas import CheckpointReplicas
    from fxpart.runtime.checkpointing.saver import Saver
    from fxpart.runtime.fit import FitLoop

_MOST_ROLLBACKS = 3


class RunSession:
    """One call of fit with a folder. generation: number of this start, known after
    :meth:`begin`. saved: whether the last state is complete and intact on the disk, known after
    :meth:`end`.
    """

    def __init__(self, fit: FitLoop, options: Checkpoints) -> None:
        """Create a session; nothing is read or written yet."""
        self.options = options
        self.generation = 0
        self.resumed = self.saved = False
        self._fit = fit
        self._run = options.run
        self._first = 0 in fit.transport.local
        self._signals = StopSignals(fit.trainer.request)
        self._request: Options = {}
        self._key: SigningKey | None = None
        self._saver: Saver | None = None
        self._journal: RunJournal | None = None
        self._replicas: CheckpointReplicas | None = None
        self._reported_saves = 0  # problems of the saver that were reported
        self._reported_replicas = 0  # problems of the memory replicas that were reported
        self._saved_step = -1
        self._rollbacks = 0  # since the last new checkpoint

    # -- the beginning --------------------------------------------------------------------------

    def begin(self) -> None:
        """Resume from the newest complete checkpoint; every rank calls it.

        FXP517 if restarts make no progress, FXP511 if no checkpoint can be loaded, FXP512 if one
        does not fit, FXP520 if the ledger is that of another run, FXP524 if one is not signed with
        the key.
        """
        from fxpart.runtime.checkpointing.saver import Saver

        if self.options.signals:
            self._signals.__enter__()
        fit = self._fit
        self._key = agree(
            fit.transport, "the signing key", lambda: (SigningKey.load(self.options.sign), "")
        )
        self._request = describe_request(fit)
        start = self._read_folder()
        self.generation = start.generation
        self._fence = GenerationFence(self._run.generations, start.generation, start.writer)
        agree(fit.transport, "the flight recorder file", self._store_events)
        if self.options.copies:
            self._replicas = self._make_replicas()
        extra = self._restore_from_memory(start.newest)
        if extra is None and start.newest >= 0:
            extra = self._restore_from_disk()
        if extra is not None:
            agree(fit.transport, "the restored run state", partial(restore_run_state, fit, extra))
            apply = partial(apply_request, fit, self._request, from_json_value(extra.get(REQUEST)))
            agree(fit.transport, "the options of the resumed run", lambda: (apply(), ""))
            self.resumed, self._saved_step = True, fit.step
        elif self._journal is not None and self._journal.reached:
            warnings.warn(
                f"{self._run.ledger} has {self._journal.reached} steps, but there is no "
                "checkpoint: the run begins again with step 1",
                stacklevel=4,
            )
        self._saver = Saver(
            fit.trainer, self._run.checkpoints, keep=self.options.keep,
            generation=start.generation, strict=self.options.strict, copies=self._replicas,
            fence=self._fence.check, key=self._key,
        )  # fmt: skip
        chain = "" if extra is None else str(extra.get(LEDGER, ""))
        agree(fit.transport, "the run's ledger", partial(self._open_ledger, chain))
        if not self.resumed:
            # Initial weights drawn without a seed are then the same after a restart.
            self.save(wait=True)

    def _make_replicas(self) -> CheckpointReplicas:
        """Open the memory replicas of the run."""
        from fxpart.runtime.checkpointing.memory_replicas import CheckpointReplicas

        root = None if self.options.copies is True else Path(cast(Any, self.options.copies))
        return CheckpointReplicas.of(self._run, self._fit.transport, root=root)

    def _restore_from_memory(self, newest: int) -> dict[str, Any] | None:
        """Restore a complete in-memory checkpoint that is as new as the disk's; return its extra
        data. It must belong to the history in the run's ledger.
        """
        from fxpart.runtime.checkpointing.loader import restore

        fit, tried = self._fit, list[str]()
        problems: list[Problem] = []
        while self._replicas is not None and (path := self._replicas.gather(newest, tried)):
            tried.append(path.name)
            try:
                found = agree(
                    fit.transport, "the in-memory checkpoint", partial(self._open_replica, path)
                )
                if self._belongs_to_run(found):
                    return restore(fit.trainer, found, random=False)
            except FxpartError as failure:
                if failure.code != "FXP510":
                    raise
                problems += failure.problems
        # without a disk checkpoint, the damaged trainer state is no valid start
        if problems and newest < 0:
            raise FxpartError(problems)
        for problem in problems:
            warnings.warn(str(problem), stacklevel=5)
        return None

    def _open_replica(self, path: Path) -> tuple[Checkpoint, str]:
        """Open an in-memory checkpoint; also return the text that the ranks compare."""
        return Checkpoint.open(path, self._key), path.name

    def _restore_from_disk(self) -> dict[str, Any]:
        """Restore the newest checkpoint, with finite state if rollback is requested; return its
        extra data.
        """
        from fxpart.runtime.checkpointing.loader import restore_newest

        checkpoint, extra = restore_newest(
            self._fit.trainer, self._run.checkpoints, random=False,
            finite=self._fit.run.nonfinite == "rollback", key=self._key,
        )  # fmt: skip
        for problem in checkpoint.skipped:
            warnings.warn(str(problem), stacklevel=4)
        if not checkpoint.manifest.is_finite and self._first:
            warnings.warn(
                f"the state of {checkpoint.path} is not finite; the last finite checkpoint is kept "
                'beside it: nonfinite="rollback" (--on-nonfinite rollback) returns to it',
                stacklevel=4,
            )
        if checkpoint.skipped or self._fit.run.nonfinite == "rollback":
            # The run trains their steps again: they do not belong to its history any more.
            newer = partial(self._set_newer_aside, checkpoint.manifest.step)
            agree(self._fit.transport, "checkpoints that are not used", newer)
        return extra

    def _set_newer_aside(self, step: int) -> tuple[None, str]:
        for path in folder.list_complete(self._run.checkpoints) if self._first else ():
            if folder.step_of(path) > step:
                folder.set_aside(path)
        return None, ""

    def roll_back(self) -> bool:
        """Return to the newest checkpoint with finite state, but not in the data; every rank calls
        it. False if that has been done three times without a new checkpoint.
        """
        assert self._saver is not None
        fit, failed = self._fit, self._fit.step + 1
        self._saver.wait()
        self._warn_failed_saves()
        if self._rollbacks >= _MOST_ROLLBACKS:
            return False
        self._rollbacks += 1
        extra = self._restore_from_disk()
        agree(
            fit.transport, "the restored run state",
            partial(restore_run_state, fit, extra, position=False),
        )  # fmt: skip
        self._saved_step = fit.step
        if self._journal is not None:
            line = LedgerRollback(step=failed, after=fit.step)
            fit.guarded("the run's ledger", partial(self._journal.roll_back, line))
            warnings.warn(f"the run goes back from step {failed} to step {fit.step}", stacklevel=5)
        return True

    def _belongs_to_run(self, found: Checkpoint) -> bool:
        """Return on every rank whether a checkpoint has the history of rank 0's ledger."""
        same, saved = True, found.manifest.extra.get(LEDGER)
        if self._journal is not None:
            same = bool(saved) and saved == self._journal.chain_at(found.manifest.step)
        transport = self._fit.transport
        with convert_transport_errors(transport, "comparing the in-memory checkpoint"):
            return bool(transport.exchange([int(same)])[0][0])

    def _read_folder(self) -> RunStart:
        """Read the folder on rank 0 and share its state."""
        transport = self._fit.transport
        found = agree(transport, "the run's folder", lambda: (self._read_folder_on_first(), ""))
        with convert_transport_errors(transport, "sharing the state of the run's folder"):
            raw = transport.exchange_bytes(b"" if found is None else msgspec.json.encode(found))[0]
        return msgspec.json.decode(raw, type=RunStart)

    def _read_folder_on_first(self) -> RunStart | None:
        """Read the folder on rank 0 and record this generation, however it ends."""
        if not self._first:
            return None
        launch = read_launch()
        restarted = launch is not None and launch.restarts > 0
        self._journal = RunJournal(self.options, restarted=restarted)
        saved = folder.list_complete(self._run.checkpoints)
        return self._journal.begin_generation(
            folder.step_of(saved[0]) if saved else -1, world=self._fit.transport.ranks,
            plan=digest_text(self._fit.trainer.plan_text),
        )  # fmt: skip

    def _store_events(self) -> tuple[None, str]:
        """Store the flight recorder of this process in the run's folder from now on."""
        if not self._first:
            self._fence.check_shared(self._fit.trainer.rank)
        rank, events = self._fit.trainer.rank, self._fit.trainer.events
        path = self._run.events(self.generation, rank)
        events.keep(path, rank=rank, generation=self.generation)
        heartbeat.set_exit_callback(self.fail)
        return None, ""

    def _open_ledger(self, chain: str) -> tuple[None, str]:
        """Begin the ledger of this generation; chain: digest of its history in the checkpoint."""
        fit = self._fit
        if self._journal is not None:
            self._journal.check_history(fit.step, chain)
            begin = LedgerGeneration(
                generation=self.generation, after=fit.step, world=fit.transport.ranks,
                same=digest_determinants(fit), own=fit.run.local,
                stream=fit.trainer.is_asynchronous,
            )  # fmt: skip
            self._journal.begin_ledger(begin, fit.trainer.plan_text)
        return None, ""

    # -- during training ---------------------------------------------------------------------------

    def digest(self, batches: Sequence[Any]) -> str:
        """Return the digest of an update's batches on the rank with the ledger."""
        return "" if self._journal is None else digest_batches(batches)

    def updated(self, done: CompletedUpdate, loss: float) -> None:
        """Write an update to the ledger; FXP518 if it differs from its earlier execution."""
        if self._journal is not None:
            self._journal.update(
                LedgerUpdate(
                    step=done.step, epoch=done.epoch, first=done.first, batches=done.batches,
                    rows=done.rows, digest=done.digest,
                    loss=loss if math.isfinite(loss) else cast(Any, repr(loss)),
                )
            )  # fmt: skip

    def stop(self) -> str:
        """Save if a checkpoint is due after an update; return why to end, or "". Equal on all
        ranks.
        """
        number, rank = self._fit.trainer.request.first
        due = self._fit.step % self.options.every == 0
        if number:
            self.save(wait=True)
            return f"{get_signal_name(number)} to rank {rank}"
        if due:
            self.save()
        return ""

    def save(self, *, wait: bool = False) -> None:
        """Save a checkpoint unless there is one of this step; every rank calls it. FXP513 if
        strict.
        """
        assert self._saver is not None
        fit = self._fit
        fit.settle()
        if self._saved_step != fit.step:
            extra = capture_run_state(fit)
            extra[REQUEST] = to_json_value(self._request)
            extra[FINITE] = self._is_finite()
            if self._journal is not None:
                fit.guarded("the run's ledger", partial(self._journal.sync, fit.step))
                extra[LEDGER] = self._journal.chain
            self._saved_step, self._rollbacks = fit.step, 0
            fit.trainer.events.put("saving a checkpoint")
            self._saver.save(fit.step, extra, wait=wait)
        elif wait:
            self._saver.wait()
        self._warn_failed_saves()

    def _is_finite(self) -> bool:
        """Return whether no rank has non-finite state, or a last update with such a gradient."""
        guard, transport = self._fit.guard, self._fit.transport
        applied = guard is not None and guard.applied
        mine = not applied and not find_nonfinite_state(self._fit.trainer)
        with convert_transport_errors(transport, "saving a checkpoint"):
            return all(row[0] for row in transport.exchange([int(mine)]))

    def _warn_failed_saves(self) -> None:
        """Warn of checkpoints that were not written; equal on every rank."""
        assert self._saver is not None
        for failure in self._saver.problems[self._reported_saves :]:
            if failure.code == "FXP521":
                raise failure
            warnings.warn(str(failure), stacklevel=4)
        self._reported_saves = len(self._saver.problems)
        if self._replicas is not None:
            self._warn_missing_replicas(self._replicas)

    def _warn_missing_replicas(self, copies: CheckpointReplicas) -> None:
        """Warn of missing memory replicas of any rank."""
        mine = [str(failure) for failure in copies.problems[self._reported_replicas :]]
        self._reported_replicas += len(mine)
        transport = self._fit.transport
        with convert_transport_errors(transport, "sharing problems of memory replicas"):
            raw = transport.exchange_bytes(msgspec.json.encode(mine))
        texts = [text for each in raw for text in msgspec.json.decode(each, type=list[str])]
        for text in dict.fromkeys(texts):
            warnings.warn(text, stacklevel=5)

    # -- the end --------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """End the run normally, with a last checkpoint that is read back from the disk."""
        assert self._saver is not None
        self.save(wait=True)
        self.saved = self._saver.confirm(self._fit.step)
        if not self.saved:  # removed since it was saved, or there is room now
            self._saved_step = -1
            self.save(wait=True)
            self.saved = self._saver.confirm(self._fit.step)
        if self._replicas is not None and self.saved:
            self._replicas.remove()  # the disk has all of it
        if self._journal is not None:
            how = why if self.saved else generations.UNSAVED
            self._journal.end(self.generation, step=self._fit.step, how=how)
        self._fit.trainer.events.put(LEFT, "end")

    def fail(self, cause: BaseException) -> None:
        """Record a failure of the run without waiting for other ranks."""
        from fxpart.diagnostics.failure_record import record_failure

        if not self.generation or (isinstance(cause, FxpartError) and cause.code == "FXP521"):
            return  # nothing was begun, or the run belongs to another process now
        line = describe_exception(cause).splitlines()[0]
        if isinstance(cause, FxpartError):
            first = cause.problems[0]
            line = f"{first.code} {first.where}: {first.why}"
        rank = self._fit.trainer.rank
        record_failure(
            self._run.failure(self.generation, rank), cause, rank=rank,
            generation=self.generation, events=self._fit.trainer.events,
        )  # fmt: skip
        if self._journal is not None:
            text = f"rank {rank}: {line}"
            with contextlib.suppress(FxpartError):  # do not hide the failure that ends the run
                self._journal.end(
                    self.generation, step=self._fit.step, how=generations.FAILED, why=text
                )

    def close(self) -> None:
        """Restore signal handlers and close files."""
        self._signals.__exit__(None, None, None)
        if self._replicas is not None:
            self._replicas.close()
        if self._journal is not None:
            self._journal.close()
