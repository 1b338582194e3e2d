"""Ledger of a run: one line per update, to prove that none is lost, repeated or different.

The file is append-only. When a run resumes from a checkpoint, a line records the step; the updates
behind that step are set aside, and compared when their steps are repeated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from fxpart.errors import error
from fxpart.runtime.training_run.json_lines import JsonLinesAppender, read_lines

_TOLERANCE = 1e-5  # relative tolerance of losses if plan, ranks or host differ
_STRUCTURE_CHARS = 8  # characters of a digest that describe the structure


class LedgerUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="update", tag_field="line"):
    """One update. Its data: batches ``first`` to before ``first + batches`` of the epoch.

    loss: exact, as text if it is not finite. digest: of rank 0's batches
    (:func:`fxpart.runtime.training_run.run_session.digest_batches`).
    """

    step: int
    epoch: int
    first: int
    batches: int
    rows: int
    loss: float | Literal["nan", "inf", "-inf"]
    digest: str

    @property
    def number(self) -> float:
        """The loss as a float."""
        return float(self.loss)


class LedgerGeneration(msgspec.Struct, frozen=True, kw_only=True, tag="begin", tag_field="line"):
    """A generation that resumes after a step. same: digest of all that losses depend on, or "".

    Losses must be bit-equal between generations with equal ``same``. own: rank 0 receives its own
    rows only, so digests depend on the number of ranks. ``stream``: asynchronous training, whose
    losses depend on the number of stages and their boundaries.
    """

    generation: int
    after: int
    world: int
    same: str
    own: bool = False
    stream: bool = False


Line = LedgerUpdate | LedgerGeneration


@dataclass(frozen=True)
class LedgerSummary:
    """Summary of a ledger. steps: valid updates. rows: their rows. epochs: batches per epoch.

    generations: number of starts. redone: repeated updates. problems: lost, repeated or different
    updates; empty if there are none.
    """

    steps: int
    rows: int
    epochs: tuple[int, ...]
    generations: int
    redone: int
    problems: tuple[str, ...]


def check_ledger(path: str | Path) -> LedgerSummary:
    """Check that each step and batch occurs once, and that repeated steps are equal.

    FXP520 if the file cannot be read.
    """
    return _replay_file(Path(path)).summary()


def read_updates(path: str | Path) -> list[LedgerUpdate]:
    """Return the valid updates in order; FXP520 if the file cannot be read."""
    return [update for update, _ in _replay_file(Path(path)).done]


def read_ledger_generations(path: str | Path) -> list[LedgerGeneration]:
    """Return the start of each generation in order; FXP520 if the file cannot be read."""
    return [line for line in read_lines(Path(path), Line) if isinstance(line, LedgerGeneration)]


class Ledger:
    """Ledger of a run, written by rank 0. reached: last step in it before."""

    def __init__(self, path: Path, *, check: bool = True) -> None:
        """Open the file. check: compare repeated steps."""
        self._path, self._check = path, check
        self._replay = _replay_file(path)
        self._file = JsonLinesAppender(path)

    @property
    def reached(self) -> int:
        """Last step ever done."""
        return self._replay.reached

    def begin(self, line: LedgerGeneration) -> None:
        """Record the start of a generation."""
        self._replay.begin(line)
        self._file.write(line)

    def write(self, line: LedgerUpdate) -> None:
        """Record an update; FXP518 if it is a repetition with another result.

        A different result is not written, so that the next generation is compared with the first
        one again.
        """
        difference = self._replay.update(line)
        if difference and self._check:
            raise error(
                "FXP518", where=f"{self._path}, step {line.step}", why=difference,
                fix="compare data order, code and library versions; "
                "Checkpoints(check=False) continues anyway",
            )  # fmt: skip
        self._file.write(line)

    def sync(self) -> None:
        """Flush the file to disk."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _LedgerReplay:
    """Replays the lines. done: valid updates with their generations."""

    def __init__(self) -> None:
        self.done: list[tuple[LedgerUpdate, LedgerGeneration]] = []
        self.reached = self.redone = 0
        self.problems: list[str] = []
        self._set_aside: dict[int, tuple[LedgerUpdate, LedgerGeneration]] = {}
        self._generation: LedgerGeneration | None = None
        self._generations = 0

    def begin(self, line: LedgerGeneration) -> None:
        """Begin a generation: set aside the updates behind its step."""
        last = self.done[-1][0].step if self.done else 0
        if line.after > last:
            self.problems.append(
                f"generation {line.generation} resumed after step {line.after}, but the ledger "
                f"ends with step {last}"
            )
        while self.done and self.done[-1][0].step > line.after:
            update, by = self.done.pop()
            self._set_aside[update.step] = update, by
        self._generation = line
        self._generations += 1

    def update(self, line: LedgerUpdate) -> str:
        """Add an update; return how it differs from its earlier execution, or ""."""
        difference = ""
        if self._generation is None:
            self.problems.append(f"step {line.step} before any generation")
            self._generation = LedgerGeneration(generation=0, after=0, world=0, same="")
        before = self.done[-1][0] if self.done else None
        if gap := _describe_gap(before, line, self._generation):
            self.problems.append(gap)
        earlier = self._set_aside.pop(line.step, None)
        if earlier is not None:
            self.redone += 1
            difference = _describe_difference(*earlier, line, self._generation)
            if difference:
                self.problems.append(f"step {line.step}: {difference}")
        self.done.append((line, self._generation))
        self.reached = max(self.reached, line.step)
        return difference

    def summary(self) -> LedgerSummary:
        """Return the summary."""
        epochs: dict[int, int] = {}
        for update, _ in self.done:
            epochs[update.epoch] = epochs.get(update.epoch, 0) + update.batches
        return LedgerSummary(
            len(self.done), sum(update.rows for update, _ in self.done), tuple(epochs.values()),
            self._generations, self.redone, tuple(self.problems),
        )  # fmt: skip


def _replay_file(path: Path) -> _LedgerReplay:
    replay = _LedgerReplay()
    for line in read_lines(path, Line):
        if isinstance(line, LedgerGeneration):
            replay.begin(line)
        else:
            replay.update(line)
    return replay


def _describe_gap(before: LedgerUpdate | None, line: LedgerUpdate, begin: LedgerGeneration) -> str:
    """Describe a step or batch that was lost or repeated between two updates, or return ""."""
    step = begin.after + 1 if before is None else before.step + 1
    if line.step != step:
        return f"step {line.step} instead of step {step}"
    if before is None:
        return "" if begin.after else _first(line, line.epoch == 0)
    if line.epoch == before.epoch:
        expected = before.first + before.batches
        if line.first != expected:
            return (
                f"step {line.step}: batch {line.first} of epoch {line.epoch} instead of batch "
                f"{expected}"
            )
        return ""
    return _first(line, line.epoch == before.epoch + 1)


def _first(line: LedgerUpdate, next_epoch: bool) -> str:
    if line.first or not next_epoch:
        return f"step {line.step}: epoch {line.epoch} begins with batch {line.first}"
    return ""


def _describe_difference(
    then: LedgerUpdate, by: LedgerGeneration, now: LedgerUpdate, begin: LedgerGeneration
) -> str:
    """Describe the difference between two executions of a step, or return ""."""
    if (then.epoch, then.first, then.batches, then.rows) != (
        now.epoch, now.first, now.batches, now.rows,
    ):  # fmt: skip
        return f"{_data(then)} before, {_data(now)} now"
    comparable = by.own == begin.own and (not begin.own or by.world == begin.world)
    comparable = comparable and then.digest[:_STRUCTURE_CHARS] == now.digest[:_STRUCTURE_CHARS]
    if comparable and then.digest != now.digest:
        return f"{_data(then)}: their values differ from before"
    exact = bool(by.same) and by.same == begin.same
    if not exact and (by.stream or begin.stream):
        return ""
    if not _losses_match(then.number, now.number, exact=exact):
        how = "" if exact else f", more than {_TOLERANCE:g} apart (relative)"
        return f"loss {then.loss!r} before, {now.loss!r} now{how}"
    return ""


def _data(update: LedgerUpdate) -> str:
    last = update.first + update.batches - 1
    batches = f"batch {last}" if update.batches == 1 else f"batches {update.first} to {last}"
    return f"{batches} of epoch {update.epoch}, {update.rows} rows"


def _losses_match(a: float, b: float, *, exact: bool) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b if exact else math.isclose(a, b, rel_tol=_TOLERANCE)
