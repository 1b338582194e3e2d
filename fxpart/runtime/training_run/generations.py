"""The generations of a run: when each began and how it ended; when starting again is no use."""

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
    """A generation: when it began (seconds since 1970), of how many ranks, after which step.

    reached: the farthest step of the ledger then, which may lie behind the checkpoint. plan: the
    digest of its plan.
    """

    generation: int
    began: float
    world: int
    step: int
    reached: int
    plan: str = ""


class GenerationEnd(msgspec.Struct, frozen=True, kw_only=True, tag="ended", tag_field="line"):
    """How a generation ended, if rank 0 could still say so.

    how: why fit ended ("steps", "data", "SIGTERM", ...), or "failed"; why: the failure, a line.
    """

    generation: int
    ended: float
    step: int
    how: str
    why: str = ""


@dataclass(frozen=True)
class Generation:
    """Both together. ended: None where it was killed."""

    began: GenerationStart
    ended: GenerationEnd | None = None

    @property
    def how(self) -> str:
        """How it ended, in words."""
        if self.ended is None:
            return "killed, or rank 0 was"
        return self.ended.why or self.ended.how

    @property
    def in_order(self) -> bool:
        """Whether it ended as it should."""
        return self.ended is not None and self.ended.how != FAILED


def load_generations(path: Path) -> list[Generation]:
    """The generations in order; FXP520 where the file cannot be read."""
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
    """FXP517 where more than ``allowed`` restarts in a row brought the run no further.

    path: of the run. step: of the newest checkpoint. reached: the farthest step that was ever
    done. A run that ended in order, by a signal or as it was told, begins to count anew.
    """
    tries: list[Generation] = []
    for generation in reversed(earlier):
        began = generation.began
        if generation.in_order or began.reached < reached or began.step < step:
            break
        tries.append(generation)
    tries.reverse()
    first = not tries or tries[0] is earlier[0] or earlier[-len(tries) - 1].in_order
    restarts = tries[1:] if first else tries
    if len(restarts) < allowed:
        return None
    ends = "; ".join(dict.fromkeys(generation.how for generation in restarts[-allowed:]))
    return error(
        "FXP517", where=f"{path}, generation {earlier[-1].began.generation + 1}",
        why=f"{len(restarts)} restarts since step {step} came to step {reached} at most; each "
        f"ended with: {ends}",
        fix="mend the cause, then run the same command again",
    )  # fmt: skip


class GenerationWriter:
    """Writes a generation's lines; rank 0 does."""

    def __init__(self, path: Path) -> None:
        """Nothing is written yet."""
        self._file = JsonLinesAppender(path)

    def begin(self, generation: int, *, world: int, step: int, reached: int, plan: str) -> None:
        """It begins."""
        self._file.write(
            GenerationStart(
                generation=generation, began=time.time(), world=world, step=step, reached=reached,
                plan=plan,
            )
        )  # fmt: skip
        self._file.sync()

    def end(self, generation: int, *, step: int, how: str, why: str = "") -> None:
        """It ends."""
        self._file.write(
            GenerationEnd(generation=generation, ended=time.time(), step=step, how=how, why=why)
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()
