"""Generations of a run (one per start): how each began and ended, and when to stop restarting."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fxpart.errors import FxpartError, error
from fxpart.runtime.checkpointing.shared_folder import wait_until_shared
from fxpart.runtime.training_run.json_lines import JsonLinesAppender, read_lines

FAILED = "failed"
_MOST_CHARS = 2000  # of the description of a failure
UNSAVED = "not saved"  # the run has ended, but its last checkpoint could not be written


class GenerationStart(msgspec.Struct, frozen=True, kw_only=True, tag="began", tag_field="line"):
    """Start of a generation: time (seconds since 1970), number of ranks, step of its checkpoint.

    reached: last step in the ledger then, possibly behind the checkpoint. plan: digest of the plan.
    writer: random word of the job that runs the generation.
    """

    generation: int
    began: float
    world: int
    step: int
    reached: int
    plan: str = ""
    writer: str = ""


class GenerationEnd(msgspec.Struct, frozen=True, kw_only=True, tag="ended", tag_field="line"):
    """End of a generation, if rank 0 could record it.

    how: reason that fit ended ("steps", "data", "SIGTERM", ...), or "failed". why: the failure in
    one line.
    """

    generation: int
    ended: float
    step: int
    how: str
    why: str = ""


@dataclass(frozen=True)
class Generation:
    """Start and end of a generation. ended: None if it was killed."""

    began: GenerationStart
    ended: GenerationEnd | None = None

    @property
    def how(self) -> str:
        """Description of how it ended."""
        if self.ended is None:
            return "killed (at least rank 0)"
        return self.ended.why or self.ended.how

    @property
    def in_order(self) -> bool:
        """Whether it ended normally."""
        return self.ended is not None and self.ended.how != FAILED


def load_generations(path: Path) -> list[Generation]:
    """Return the generations in order; FXP520 if the file cannot be read."""
    found: dict[int, Generation] = {}
    for line in read_lines(path, GenerationStart | GenerationEnd):
        if isinstance(line, GenerationStart):
            found[line.generation] = Generation(line)
        elif line.generation in found:
            found[line.generation] = Generation(found[line.generation].began, line)
    return list(found.values())


def check_restart_progress(
    path: Path, earlier: Sequence[Generation], step: int, reached: int, allowed: int
) -> FxpartError | None:
    """Return FXP517 if more than ``allowed`` restarts in a row made no progress.

    path: of the run. step: of the newest checkpoint. reached: last step ever done. A generation
    that ended normally resets the count.
    """
    attempts: list[Generation] = []
    for generation in reversed(earlier):
        began = generation.began
        if generation.in_order or began.reached < reached or began.step < step:
            break
        attempts.append(generation)
    attempts.reverse()
    first = not attempts or attempts[0] is earlier[0] or earlier[-len(attempts) - 1].in_order
    restarts = attempts[1:] if first else attempts
    if len(restarts) < allowed:
        return None
    ends = "; ".join(dict.fromkeys(generation.how for generation in restarts[-allowed:]))
    return error(
        "FXP517", where=f"{path}, generation {earlier[-1].began.generation + 1}",
        why=f"{len(restarts)} restarts since step {step} did not pass step {reached}; they "
        f"ended with: {ends}",
        fix="fix the cause, then run the same command again",
    )  # fmt: skip


class GenerationFence:
    """Refuses the writes of a process once another job has begun a newer generation of the run.

    So a process that was stopped, and wakes up after the run has been resumed elsewhere, writes
    nothing. The check costs one system call while the file is unchanged.
    """

    def __init__(self, path: Path, generation: int, writer: str) -> None:
        """path: the run's file of generations. generation, writer: those of this job."""
        self._path, self._own = path, (generation, writer)
        self._seen: tuple[int, int, int] | None = None

    def check(self) -> None:
        """Raise FXP521 if the newest generation is of another job."""
        try:
            found = self._path.stat()
            seen = (found.st_ino, found.st_size, found.st_mtime_ns)
            if seen == self._seen:
                return
            starts = self._read_starts()
        except (OSError, FxpartError):
            return  # removed or not readable: no other job is known
        if starts and starts[-1] != self._own:
            raise error(
                "FXP521", where=f"{self._path.parent}, generation {self._own[0]}",
                why=f"another process has resumed the run as generation {starts[-1][0]}",
                fix="this process has written nothing since then; let the other one train",
            )  # fmt: skip
        self._seen = seen

    def check_shared(self, rank: int) -> None:
        """Raise FXP501 if this process has another folder than rank 0, which began the generation.

        Paths may differ between ranks: mounts, links, or relative to another folder.
        """
        why = f"rank 0 has begun generation {self._own[0]} of the run in another folder"
        wait_until_shared(lambda: self._own in self._read_starts(), rank, self._path.parent, why)

    def _read_starts(self) -> list[tuple[int, str]]:
        return [
            (line.generation, line.writer)
            for line in read_lines(self._path, GenerationStart | GenerationEnd)
            if isinstance(line, GenerationStart)
        ]


class GenerationWriter:
    """Writes the lines of a generation, on rank 0."""

    def __init__(self, path: Path) -> None:
        """Open the file; FXP603."""
        self._path = path
        self._file = JsonLinesAppender(path)
        self._start: GenerationStart | None = None

    def begin(
        self, generation: int, *, world: int, step: int, reached: int, plan: str, writer: str = ""
    ) -> None:
        """Record the start; FXP603."""
        self._start = GenerationStart(
            generation=generation, began=time.time(), world=world, step=step, reached=reached,
            plan=plan, writer=writer,
        )  # fmt: skip
        self._file.write(self._start)
        self._file.sync()

    def reopen(self) -> None:
        """Write the start into a new file, where the old one was removed; FXP603."""
        if not self._file.is_attached:
            made = JsonLinesAppender(self._path)
            made.write(self._start)
            self._file.close()
            self._file = made

    def end(self, generation: int, *, step: int, how: str, why: str = "") -> None:
        """Record the end; FXP603. why: truncated if it is long."""
        text = why[:_MOST_CHARS].encode("utf-8", "backslashreplace").decode()
        self._file.write(
            GenerationEnd(generation=generation, ended=time.time(), step=step, how=how, why=text)
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()
