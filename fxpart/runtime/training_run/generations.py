"""Generations of a run (one per start): how each began and ended, and when to stop restarting."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fxpart.errors import FxpartError, error
from fxpart.runtime.training_run.json_lines import JsonLinesAppender, read_lines

FAILED = "failed"


class GenerationStart(msgspec.Struct, frozen=True, kw_only=True, tag="began", tag_field="line"):
    """Start of a generation: time (seconds since 1970), number of ranks, step of its checkpoint.

    reached: last step in the ledger then, possibly behind the checkpoint. plan: digest of the plan.
    """

    generation: int
    began: float
    world: int
    step: int
    reached: int
    plan: str = ""


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


class GenerationWriter:
    """Writes the lines of a generation, on rank 0."""

    def __init__(self, path: Path) -> None:
        """Open the file."""
        self._file = JsonLinesAppender(path)

    def begin(self, generation: int, *, world: int, step: int, reached: int, plan: str) -> None:
        """Record the start."""
        self._file.write(
            GenerationStart(
                generation=generation, began=time.time(), world=world, step=step, reached=reached,
                plan=plan,
            )
        )  # fmt: skip
        self._file.sync()

    def end(self, generation: int, *, step: int, how: str, why: str = "") -> None:
        """Record the end."""
        self._file.write(
            GenerationEnd(generation=generation, ended=time.time(), step=step, how=how, why=why)
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()
