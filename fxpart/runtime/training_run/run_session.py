"""What fit does with a run's folder: goes on from it, keeps its ledger, saves, and says its end."""

from __future__ import annotations

import contextlib
import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch

from fxpart.checkpoint import folder
from fxpart.checkpoint.reader import Checkpoint
from fxpart.diagnostics.rank_event import LEFT
from fxpart.errors import FxpartError, Problem
from fxpart.runtime import heartbeat
from fxpart.runtime.training_run import generations
from fxpart.runtime.training_run.batch_digest import digest_batches
from fxpart.runtime.training_run.ledger import Ledger, LedgerGeneration, LedgerUpdate
from fxpart.runtime.training_run.options import Checkpoints
from fxpart.runtime.training_run.run_state import capture_run_state, restore_run_state
from fxpart.runtime.training_run.stop_signals import StopSignals, get_signal_name
from fxpart.runtime.transport.agreement import agree, convert_transport_errors

if TYPE_CHECKING:
    from fxpart.runtime.checkpointing.memory_replicas import CheckpointReplicas
    from fxpart.runtime.checkpointing.saver import Saver
    from fxpart.runtime.fit import FitLoop


class _RunStart(msgspec.Struct, frozen=True):
    """What rank 0 found in the folder, for all. newest: the step of the newest checkpoint."""

    generation: int
    newest: int


@dataclass(frozen=True)
class CompletedUpdate:
    """An update, for the ledger: which batches of the epoch it had, and their digest."""

    step: int
    epoch: int
    first: int
    batches: int
    rows: int
    digest: str


class RunSession:
    """One fit with a folder. generation: this one's number, known after :meth:`begin`."""

    def __init__(self, fit: FitLoop, options: Checkpoints) -> None:
        """Nothing is read or written yet."""
        self.options = options
        self.generation = 0
        self.resumed = False
        self._fit = fit
        self._run = options.run
        self._first = 0 in fit.transport.local
        self._signals = StopSignals(fit.trainer.request)
        self._saver: Saver | None = None
        self._ledger: Ledger | None = None
        self._book: generations.GenerationWriter | None = None
        self._copies: CheckpointReplicas | None = None
        self._told = 0  # problems of the saver that were told
        self._heard = 0  # and of the copies
        self._saved = -1

    # -- the beginning --------------------------------------------------------------------------

    def begin(self) -> None:
        """Go on from the newest checkpoint that is whole; every rank calls it.

        FXP517 where starting again is no use, FXP511 where none can be loaded, FXP512.
        """
        from fxpart.runtime.checkpointing.loader import restore_newest
        from fxpart.runtime.checkpointing.saver import Saver

        if self.options.signals:
            self._signals.__enter__()
        fit = self._fit
        start = self._look()
        self.generation = start.generation
        agree(fit.transport, "the ring of events", self._note)
        if self.options.copies:
            self._copies = self._make_copies()
        extra = self._from_memory(start.newest)
        if extra is None and start.newest >= 0:
            checkpoint, extra = restore_newest(fit.trainer, self._run.checkpoints, random=False)
            for problem in checkpoint.skipped:
                warnings.warn(str(problem), stacklevel=4)
        if extra is not None:
            agree(fit.transport, "what a run goes on from", partial(_back, fit, extra))
            self.resumed, self._saved = True, fit.step
        self._saver = Saver(
            fit.trainer, self._run.checkpoints, keep=self.options.keep,
            generation=start.generation, strict=self.options.strict, copies=self._copies,
        )  # fmt: skip
        agree(fit.transport, "the run's ledger", self._open)
        if not self.resumed:
            # What is drawn without a seed, weights too, is then the same after a restart.
            self.save(wait=True)

    def _make_copies(self) -> CheckpointReplicas:
        """The run's place in the machines' memory."""
        from fxpart.runtime.checkpointing.memory_replicas import CheckpointReplicas

        given = self.options.copies
        root = None if given is True else Path(cast(Any, given))
        return CheckpointReplicas.of(self._run, self._fit.transport, root=root)

    def _from_memory(self, newest: int) -> dict[str, Any] | None:
        """What was saved as extra, if a checkpoint in memory is as new as the disk's, and whole."""
        from fxpart.runtime.checkpointing.loader import restore

        fit, tried = self._fit, list[str]()
        problems: list[Problem] = []
        while self._copies is not None and (path := self._copies.gather(newest, tried)):
            try:
                found = agree(fit.transport, "the copies", partial(_opened, path))
                return restore(fit.trainer, found, random=False)
            except FxpartError as failure:
                if failure.code != "FXP510":
                    raise
                problems += failure.problems
                tried.append(path.name)
        if problems and newest < 0:  # and what the trainer holds is no beginning
            raise FxpartError(problems)
        for problem in problems:
            warnings.warn(str(problem), stacklevel=5)
        return None

    def _look(self) -> _RunStart:
        """What is there, by rank 0."""
        transport = self._fit.transport
        found = agree(transport, "the run's folder", lambda: (self._found(), ""))
        with convert_transport_errors(transport, "sharing what the run's folder has"):
            raw = transport.exchange_bytes(b"" if found is None else msgspec.json.encode(found))[0]
        return msgspec.json.decode(raw, type=_RunStart)

    def _found(self) -> _RunStart | None:
        """Of rank 0; its generation is written down, so that it counts however it ends."""
        if not self._first:
            return None
        earlier = generations.load_generations(self._run.generations)
        there = folder.list_complete(self._run.checkpoints)
        step = folder.step_of(there[0]) if there else -1
        ledger = Ledger(self._run.ledger, check=self.options.check)
        self._ledger, reached = ledger, ledger.reached
        self._book = generations.GenerationWriter(self._run.generations)
        number = max((g.began.generation for g in earlier), default=0) + 1
        useless = generations.check_restart_progress(
            self._run.path, earlier, max(step, 0), reached, self.options.restarts
        )
        self._book.begin(
            number, world=self._fit.transport.ranks, step=max(step, 0), reached=reached,
            plan=_short(self._fit.trainer.plan_text),
        )  # fmt: skip
        if useless is not None:
            self._book.end(number, step=max(step, 0), how=useless.code)
            raise useless
        return _RunStart(number, step)

    def _note(self) -> tuple[None, str]:
        """What this process does stands in the run's folder from now on."""
        rank, events = self._fit.trainer.rank, self._fit.trainer.events
        path = self._run.events(self.generation, rank)
        events.keep(path, rank=rank, generation=self.generation)
        heartbeat.set_exit_callback(self.fail)
        return None, ""

    def _open(self) -> tuple[None, str]:
        fit = self._fit
        if self._ledger is not None:
            begin = LedgerGeneration(
                generation=self.generation, after=fit.step, world=fit.transport.ranks,
                same=_same(fit), own=fit.run.local,
                stream=fit.trainer.is_asynchronous,
            )  # fmt: skip
            self._ledger.begin(begin)
            _write(self._run.plan, fit.trainer.plan_text)
        return None, ""

    # -- meanwhile ------------------------------------------------------------------------------

    def digest(self, batches: Sequence[Any]) -> str:
        """Of an update's batches, where the ledger is."""
        return "" if self._ledger is None else digest_batches(batches)

    def updated(self, done: CompletedUpdate, loss: float) -> None:
        """A line of the ledger; FXP518."""
        if self._ledger is not None:
            self._ledger.write(
                LedgerUpdate(
                    step=done.step, epoch=done.epoch, first=done.first, batches=done.batches,
                    rows=done.rows, digest=done.digest,
                    loss=loss if math.isfinite(loss) else cast(Any, repr(loss)),
                )
            )  # fmt: skip

    def stop(self) -> str:
        """After an update: save where that is due; why to end, "" to go on. Equal on all ranks."""
        number, rank = self._fit.trainer.request.first
        due = self._fit.step % self.options.every == 0
        if number:
            self.save(wait=True)
            return f"{get_signal_name(number)} to rank {rank}"
        if due:
            self.save()
        return ""

    def save(self, *, wait: bool = False) -> None:
        """A checkpoint of now, if there is none; every rank calls it. FXP513 where it is strict."""
        assert self._saver is not None
        fit = self._fit
        fit.settle()
        if self._saved != fit.step:
            if self._ledger is not None:
                fit.guarded("the run's ledger", self._ledger.sync)
            extra = capture_run_state(fit)
            self._saved = fit.step
            fit.trainer.events.put("saving a checkpoint")
            self._saver.save(fit.step, extra, wait=wait)
        elif wait:
            self._saver.finish()
            agree(fit.transport, "the last checkpoint", self._failed)
        self._tell()

    def _failed(self) -> tuple[None, str]:
        """FXP513 where the save that was under way has failed, and that ends the run."""
        assert self._saver is not None
        if self.options.strict and len(self._saver.problems) > self._told:
            raise self._saver.problems[-1]
        return None, ""

    def _tell(self) -> None:
        """Warn of checkpoints that were not written; every rank knows of the same."""
        assert self._saver is not None
        for failure in self._saver.problems[self._told :]:
            warnings.warn(str(failure), stacklevel=4)
        self._told = len(self._saver.problems)
        if self._copies is not None:
            self._tell_of(self._copies)

    def _tell_of(self, copies: CheckpointReplicas) -> None:
        """Warn of copies that are not there, whichever rank's they are."""
        mine = [str(failure) for failure in copies.problems[self._heard :]]
        self._heard += len(mine)
        transport = self._fit.transport
        with convert_transport_errors(transport, "hearing of copies in memory"):
            raw = transport.exchange_bytes(msgspec.json.encode(mine))
        told = [text for each in raw for text in msgspec.json.decode(each, type=list[str])]
        for text in dict.fromkeys(told):
            warnings.warn(text, stacklevel=5)

    # -- the end --------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """The run ends in order: a last checkpoint."""
        self.save(wait=True)
        if self._copies is not None:
            self._copies.remove()  # all of it is on the disk
        if self._book is not None:
            self._book.end(self.generation, step=self._fit.step, how=why)
        self._fit.trainer.events.put(LEFT, "end")

    def fail(self, cause: BaseException) -> None:
        """The run ends by a failure: it is written down, and nobody is waited for."""
        from fxpart.diagnostics.failure_record import record_failure

        if not self.generation:
            return
        line = next(iter(str(cause).splitlines()), "")
        if isinstance(cause, FxpartError):
            first = cause.problems[0]
            line = f"{first.code} {first.where}: {first.why}"
        rank = self._fit.trainer.rank
        record_failure(
            self._run.failure(self.generation, rank), cause, rank=rank,
            generation=self.generation, events=self._fit.trainer.events,
        )  # fmt: skip
        if self._book is not None:
            text = f"rank {rank}: {line or type(cause).__name__}"
            with contextlib.suppress(FxpartError):  # what ends the run must not be hidden
                self._book.end(
                    self.generation, step=self._fit.step, how=generations.FAILED, why=text
                )

    def close(self) -> None:
        """Give signals and files back."""
        self._signals.__exit__(None, None, None)
        if self._copies is not None:
            self._copies.close()
        for file in (self._ledger, self._book):
            if file is not None:
                file.close()


def _opened(path: Path) -> tuple[Checkpoint, str]:
    """A checkpoint, and what the ranks compare."""
    return Checkpoint.open(path), path.name


def _back(fit: FitLoop, extra: Mapping[str, Any]) -> tuple[None, str]:
    restore_run_state(fit, extra)
    return None, f"step {fit.step} epoch {fit.position.epoch}"


def _same(fit: FitLoop) -> str:
    """Runs of equal ones give equal bits: plan, ranks, options, machine, version; "": none do."""
    trainer = fit.trainer
    if not trainer.repeats:
        return ""
    kinds = sorted({device.type for device in trainer._devices.values()})
    exact = kinds == ["cpu"] or torch.are_deterministic_algorithms_enabled()
    text = (
        f"{trainer.plan_text} {fit.transport.ranks} {len(fit.transport.local)} "
        f"{trainer.options.describe()} {torch.__version__} {torch.get_num_threads()} {kinds} "
        f"{fit.run.describe()}"
    )
    return _short(text) if exact else ""


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest() if text else ""


def _write(path: Path, text: str) -> None:
    """Beside, and renamed: it is whole or it is the one before."""
    if text:
        beside = path.with_name(f".{path.name}")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
