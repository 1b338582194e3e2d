"""Files of a run that rank 0 writes: its lock, its generations, its ledger and its plan.

While the run trains, a file that cannot be written is reported by a warning and training continues
(unless ``strict``). The next line that can be written marks the missing updates. A folder that is
removed or moved away is reported, too, and created again.
"""

from __future__ import annotations

import contextlib
import secrets
import warnings
from collections.abc import Callable

import msgspec

from fxpart.checkpoint.files import create_file, write
from fxpart.checkpoint.run_directory import make_unwritable_error
from fxpart.checkpoint.run_lock import PATIENCE, RunLock, lock_folder
from fxpart.errors import FxpartError, error
from fxpart.runtime.training_run import generations
from fxpart.runtime.training_run.generations import GenerationFence, GenerationWriter
from fxpart.runtime.training_run.ledger import (
    Ledger,
    LedgerGeneration,
    LedgerRollback,
    LedgerUpdate,
)
from fxpart.runtime.training_run.options import Checkpoints

_UNWRITABLE = "FXP603"
# A killed process of an earlier start may take so long to end.
RESTART_PATIENCE = 10.0


class RunStart(msgspec.Struct, frozen=True):
    """The folder as rank 0 has found it.

    newest: step of the newest checkpoint, or -1. writer: see
    :class:`~fxpart.runtime.training_run.generations.GenerationStart`.
    """

    generation: int
    newest: int
    writer: str


class RunJournal:
    """Writes the files of one generation of a run; see the module."""

    def __init__(self, options: Checkpoints, *, restarted: bool = False) -> None:
        """Lock the folder and open its files; FXP521, FXP520, FXP603.

        restarted: a launcher has started this process again, so an earlier one may still be ending.
        """
        self._run, self._strict, self._restarts = options.run, options.strict, options.restarts
        self._begin: LedgerGeneration | None = None
        self._plan = ""
        self._failing = False  # the last write has failed, which was reported
        self._is_gone = False  # the folder was removed, which was reported
        self._rows: list[int] = []  # most of an update before this start; of the first ones since
        patience = RESTART_PATIENCE if restarted else PATIENCE
        self._lock: RunLock = lock_folder(self._run, patience=patience)
        try:
            self._earlier = generations.load_generations(self._run.generations)
            self._ledger = Ledger(self._run.ledger, check=options.check)
            self._writer = GenerationWriter(self._run.generations)
        except BaseException:
            self._lock.close()
            raise

    def begin_generation(self, newest: int, *, world: int, plan: str) -> RunStart:
        """Record this start, however it ends; FXP517 if restarts make no progress."""
        step, reached = max(newest, 0), self._ledger.reached
        known = [generation.began.generation for generation in self._earlier]
        number = max([self._ledger.newest_generation, *known]) + 1  # either file may be lost
        start = RunStart(number, newest, secrets.token_hex(8))
        no_progress = generations.check_restart_progress(
            self._run.path, self._earlier, step, reached, self._restarts
        )
        self._lock.publish(world, world, world, "trainer")
        self._writer.begin(
            number, world=world, step=step, reached=reached, plan=plan, writer=start.writer
        )
        self._fence = GenerationFence(self._run.generations, number, start.writer)
        if no_progress is not None:
            self._writer.end(number, step=step, how=no_progress.code)
            raise no_progress
        return start

    def begin_ledger(self, line: LedgerGeneration, plan: str) -> None:
        """Record after which step this generation resumes, and its plan; FXP603."""
        self._begin, self._plan = line, plan
        self._rows = [self._ledger.most_rows(line.after)] if line.after else []
        self._ledger.begin(line)
        self._write_plan()

    @property
    def reached(self) -> int:
        """The last step in the ledger, 0 before the first."""
        return self._ledger.reached

    @property
    def chain(self) -> str:
        """Digest of the run's history up to now; "" if the ledger lacks a part of it."""
        return self._ledger.chain

    def check_history(self, step: int, chain: str) -> None:
        """Compare the ledger with a checkpoint's digest, before :meth:`begin_ledger`; FXP520."""
        self._ledger.check_history(step, chain)

    def chain_at(self, step: int) -> str:
        """Return the digest of the history up to a step, before :meth:`begin_ledger`; or ""."""
        return self._ledger.chain_at(step)

    def update(self, line: LedgerUpdate) -> None:
        """Record an update; FXP518 if it differs from its earlier execution, FXP521."""

        def record() -> None:
            self._restore_folder(line.step - 1)
            self._ledger.write(line)

        self._attempt(record)
        self._compare_rows(line)

    def _compare_rows(self, line: LedgerUpdate) -> None:
        """Warn if the first two updates after a resumption have other rows than full ones before.

        One of them may be the last one of an epoch, which is smaller.
        """
        if not self._rows or not self._rows[0]:
            return
        self._rows.append(line.rows)
        before, *now = self._rows
        if before in now:
            self._rows = []
        elif len(now) == 2:
            self._rows = []
            warnings.warn(
                f"updates have {line.rows} rows since the run was resumed after step "
                f"{line.step - 2}, and had {before} before: the batch size has changed",
                stacklevel=5,
            )

    def roll_back(self, line: LedgerRollback) -> None:
        """Record that the run goes back to a checkpoint; FXP521."""
        self._attempt(lambda: self._ledger.roll_back(line))

    def sync(self, step: int) -> None:
        """Flush the ledger to disk, with a mark for updates that it lacks."""

        def flush() -> None:
            self._restore_folder(step)
            self._ledger.mark_gap(step)
            self._ledger.sync()

        self._attempt(flush, ends_row=False)  # old lines may be flushed while no new one fits

    def end(self, generation: int, *, step: int, how: str, why: str = "") -> None:
        """Record the end of the generation; FXP521."""
        self._attempt(lambda: self._writer.end(generation, step=step, how=how, why=why))

    def close(self) -> None:
        """Close the files and release the lock."""
        self._ledger.close()
        self._writer.close()
        self._lock.close()

    # -- inner ----------------------------------------------------------------------------------

    def _attempt(self, do: Callable[[], object], *, ends_row: bool = True) -> None:
        """Call ``do``; report FXP603 once for failures in a row, or raise it if strict.

        Every write while the run trains goes through here: FXP521 where another process has resumed
        the run. ends_row: success ends a row of failures.
        """
        self._fence.check()
        try:
            do()
        except FxpartError as failure:
            if failure.code != _UNWRITABLE or self._strict:
                raise
            if not self._failing:
                warnings.warn(f"{failure}\n{'':9} training continues", stacklevel=5)
            self._failing = True
        else:
            self._failing = self._failing and not ends_row

    def _restore_folder(self, step: int) -> None:
        """Create the files again after ``step`` if the folder was removed or moved away."""
        if self._ledger.is_attached:
            return
        assert self._begin is not None, "the ledger has begun"
        gone = error(
            _UNWRITABLE, where=str(self._run.path),
            why="the folder or its files were replaced, removed or moved away before step "
            f"{step + 1}: earlier steps and checkpoints are not there any more",
            fix="do not change the folder of a run that trains; it is created again",
        )  # fmt: skip
        if self._strict:
            raise gone
        if not self._is_gone:
            warnings.warn(str(gone), stacklevel=6)
        self._is_gone = self._failing = True
        self._lock.renew()
        self._writer.reopen()
        self._write_plan()
        self._ledger.reopen(msgspec.structs.replace(self._begin, after=step))
        self._is_gone = False

    def _write_plan(self) -> None:
        """Write the plan by renaming a temporary file; FXP603."""
        if not self._plan:
            return
        beside = self._run.plan.with_name(f".{self._run.plan.name}")
        try:
            with create_file(beside) as file:
                write(file, self._plan.encode())
            beside.replace(self._run.plan)
        except OSError as cause:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            raise make_unwritable_error(self._run.plan, cause) from cause
