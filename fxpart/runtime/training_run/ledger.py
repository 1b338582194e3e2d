"""Ledger of a run: one line per update, to prove that none is lost, repeated or different.

The file is append-only. When a run resumes from a checkpoint, a line records the step; the updates
behind that step are set aside, and compared when their steps are repeated. Updates that could not
be written are marked by a line, too.
"""

from __future__ import annotations

import contextlib
import secrets
import warnings
from pathlib import Path

from fxpart.errors import FxpartError, error
from fxpart.runtime.training_run.json_lines import JsonLinesAppender, read_lines
from fxpart.runtime.training_run.ledger_replay import (
    LedgerGap,
    LedgerGeneration,
    LedgerRollback,
    LedgerSummary,
    LedgerUpdate,
    Line,
    extend_chain,
    replay_file,
)

__all__ = [
    "Ledger",
    "LedgerGap",
    "LedgerGeneration",
    "LedgerRollback",
    "LedgerSummary",
    "LedgerUpdate",
    "check_ledger",
    "read_ledger_generations",
    "read_updates",
]


def check_ledger(path: str | Path) -> LedgerSummary:
    """Check that each step and batch occurs once, and that repeated steps are equal.

    FXP520 if the file cannot be read.
    """
    return replay_file(Path(path)).summary()


def read_updates(path: str | Path) -> list[LedgerUpdate]:
    """Return the valid updates in order; FXP520 if the file cannot be read."""
    return [entry.update for entry in replay_file(Path(path)).done]


def read_ledger_generations(path: str | Path) -> list[LedgerGeneration]:
    """Return the start of each generation in order; FXP520 if the file cannot be read."""
    return [line for line in read_lines(Path(path), Line) if isinstance(line, LedgerGeneration)]


class Ledger:
    """Ledger of a run, written by rank 0. reached: last step in it before."""

    def __init__(self, path: Path, *, check: bool = True) -> None:
        """Open the file. check: compare repeated steps."""
        self._path, self._check = path, check
        self._replay = replay_file(path)
        self._file = JsonLinesAppender(path)
        self._missing = 0  # first update that could not be written
        self._chain = ""

    @property
    def reached(self) -> int:
        """Last step ever done."""
        return self._replay.reached

    @property
    def newest_generation(self) -> int:
        """Largest number of a generation in the file; 0 without one."""
        return self._replay.newest

    @property
    def is_attached(self) -> bool:
        """Whether the path still leads to the open file."""
        return self._file.is_attached

    @property
    def chain(self) -> str:
        """Digest of the history up to the newest update; "" if that is not in the file."""
        return "" if self._missing else self._chain

    def chain_at(self, step: int) -> str:
        """Return the digest of the history up to a step, before :meth:`begin`; "" if unknown."""
        found = [entry.chain for entry in self._replay.done if entry.update.step == step]
        return found[-1] if found else ""

    def check_history(self, step: int, chain: str) -> None:
        """Compare the history up to a step with the digest in its checkpoint, before :meth:`begin`.

        Raises FXP520 if it is another one, and warns if the file lacks the step. chain: "" if the
        checkpoint was saved while the file lacked updates.
        """
        if not chain or any(first <= step <= last for first, last in self._replay.gaps):
            return
        found = self.chain_at(step)
        if found and found != chain:
            raise error(
                "FXP520", where=str(self._path),
                why=f"its updates up to step {step} are not those of the checkpoint of that step: "
                "the file was replaced or changed",
                fix="restore the run's own file, or remove this one: the gap is then marked",
            )  # fmt: skip
        if not found:
            warnings.warn(
                f"{self._path} lacks step {step}, which it had when the checkpoint was saved: it "
                "was removed, replaced or cut; the gap is marked",
                stacklevel=6,
            )

    def most_rows(self, step: int) -> int:
        """Return the largest rows of an update up to a step, before :meth:`begin`; 0 if unknown."""
        done = self._replay.done
        return max((e.update.rows for e in done if e.update.step <= step), default=0)

    def begin(self, line: LedgerGeneration) -> None:
        """Record the start of a generation, and updates before it that the file lacks."""
        last = self._replay.last_step
        if line.after > last:
            self._replay.gap(self._write_gap(last + 1, line.after))
        self._replay.begin(line)
        self._replay.forget_history()
        self._chain = self._replay.chain
        self._file.write(line)

    def reopen(self, line: LedgerGeneration) -> None:
        """Begin a new file, where the old one was removed, moved away or replaced; FXP603.

        line: the generation, whose ``after`` is the last update. A file that has taken the place of
        the old one is renamed.
        """
        with contextlib.suppress(OSError):
            self._path.replace(self._path.with_suffix(".replaced.jsonl"))
        made = JsonLinesAppender(self._path)
        try:
            if line.after:
                made.write(_make_gap(1, line.after))
            made.write(line)
        except FxpartError:
            made.close()
            self._path.unlink(missing_ok=True)  # so that it is begun again
            raise
        self._file.close()
        self._file, self._chain, self._missing = made, "", 0

    def write(self, line: LedgerUpdate) -> None:
        """Record an update; FXP518 if it is a repetition with another result, FXP603.

        A different result is not written, so that the next generation is compared with the first
        one again. After FXP603 the next update that can be written marks the gap.
        """
        difference = self._replay.update(line)
        if difference and self._check:
            raise error(
                "FXP518", where=f"{self._path}, step {line.step}", why=difference,
                fix="compare data order, code and library versions; "
                "Checkpoints(check=False) continues anyway",
            )  # fmt: skip
        self._missing = self._missing or line.step
        self.mark_gap(line.step - 1)
        self._missing = line.step
        self._append(line)
        self._missing = 0

    def mark_gap(self, last: int) -> None:
        """Record that updates up to ``last`` are missing, if any are; FXP603."""
        if self._missing and self._missing <= last:
            self._write_gap(self._missing, last)
            self._missing = 0

    def roll_back(self, line: LedgerRollback) -> None:
        """Record that the run goes back to a checkpoint, with later data."""
        self._replay.roll_back(line)
        self._append(line)

    def sync(self) -> None:
        """Flush the file to disk."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_gap(self, first: int, last: int) -> LedgerGap:
        line = _make_gap(first, last)
        self._append(line)
        return line

    def _append(self, line: LedgerUpdate | LedgerGap | LedgerRollback) -> None:
        self._file.write(line)
        self._chain = extend_chain(self._chain, line)


def _make_gap(first: int, last: int) -> LedgerGap:
    return LedgerGap(first=first, last=last, mark=secrets.token_hex(8))
