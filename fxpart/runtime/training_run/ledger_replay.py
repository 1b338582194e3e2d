"""Lines of a run's ledger, and their replay: what is lost, repeated or different.

The lines up to a step form a digest chain, which identifies the history of a run by its content.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from fxpart.runtime.training_run.json_lines import read_lines

_TOLERANCE = 1e-5  # relative tolerance of losses if plan, ranks or host differ
_STRUCTURE_CHARS = 8  # characters of a digest that describe the structure


class LedgerUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="update", tag_field="line"):
    """One update. Its data: batches ``first`` to before ``first + batches`` of the epoch.

    loss: exact, as text if it is not finite. digest: of rank 0's batches
    (:func:`fxpart.runtime.training_run.run_digests.digest_batches`).
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


class LedgerGap(msgspec.Struct, frozen=True, kw_only=True, tag="gap", tag_field="line"):
    """Updates ``first`` to ``last`` were done, but not written. mark: unique to the gap."""

    first: int
    last: int
    mark: str = ""


class LedgerRollback(msgspec.Struct, frozen=True, kw_only=True, tag="rollback", tag_field="line"):
    """After update ``step`` the run went back to the checkpoint after ``after``, with later data.

    The updates in between are dropped, and their numbers are used again.
    """

    step: int
    after: int


Line = LedgerUpdate | LedgerGeneration | LedgerGap | LedgerRollback


@dataclass(frozen=True)
class _Entry:
    """A valid update. by: its generation. chain: of the ledger up to it. rolled: step of the last
    rollback before it, or -1.
    """

    update: LedgerUpdate
    by: LedgerGeneration
    chain: str
    rolled: int = -1


@dataclass(frozen=True)
class LedgerSummary:
    """Summary of a ledger. steps: valid updates. rows: their rows. epochs: batches per epoch.

    generations: number of starts. redone: repeated updates. problems: lost, repeated or different
    updates; empty if there are none. gaps: first and last of updates that could not be written.
    """

    steps: int
    rows: int
    epochs: tuple[int, ...]
    generations: int
    redone: int
    problems: tuple[str, ...]
    gaps: tuple[tuple[int, int], ...] = ()


class LedgerReplay:
    """Replays the lines. done: valid updates. chain: digest of the history up to the last line.
    newest: largest number of a generation.
    """

    def __init__(self) -> None:
        self.done: list[_Entry] = []
        self.reached = self.redone = self.newest = 0
        self.problems: list[str] = []
        self.gaps: list[tuple[int, int]] = []
        self.chain = ""
        self._set_aside: dict[int, _Entry] = {}
        self._generation: LedgerGeneration | None = None
        self._generations = 0
        self._after_gap = 0  # last step of a gap that no update has followed yet
        self._rolled = -1
        self._keeps = True

    @property
    def last_step(self) -> int:
        """The last valid update, or the end of a gap behind it."""
        return max(self.done[-1].update.step if self.done else 0, self._after_gap)

    def forget_history(self) -> None:
        """Keep only the last update from now on, in the process that writes the file."""
        self.done, self._keeps = self.done[-1:], False

    def begin(self, line: LedgerGeneration) -> None:
        """Begin a generation: set aside the updates behind its step."""
        last = self.last_step
        if line.after > last:
            self.problems.append(
                f"generation {line.generation} resumed after step {line.after}, but the ledger "
                f"ends with step {last}"
            )
        self._after_gap = 0 if self._after_gap > line.after else self._after_gap
        while self.done and self.done[-1].update.step > line.after:
            entry = self.done.pop()
            if entry.rolled <= line.after:  # else it followed a rollback that is not repeated yet
                self._set_aside[entry.update.step] = entry
        self._rolled = self.done[-1].rolled if self.done else -1
        self.chain = self.done[-1].chain if self.done else ""
        self._generation = line
        self._generations += 1
        self.newest = max(self.newest, line.generation)

    def gap(self, line: LedgerGap) -> None:
        """Note updates that could not be written."""
        first = line.first
        if self.gaps and self.gaps[-1][1] + 1 == first:
            first, _ = self.gaps.pop()
        self.gaps.append((first, line.last))
        self._after_gap = line.last
        self.reached = max(self.reached, line.last)
        self.chain = extend_chain(self.chain, line)

    def roll_back(self, line: LedgerRollback) -> None:
        """Drop the updates behind a step; the next one has later data."""
        while self.done and self.done[-1].update.step > line.after:
            self.done.pop()
        self._set_aside = {}
        self._rolled, self._after_gap = line.step, line.after
        self.chain = extend_chain(self.chain, line)

    def update(self, line: LedgerUpdate) -> str:
        """Add an update; return how it differs from its earlier execution, or ""."""
        difference = ""
        if self._generation is None:
            self.problems.append(f"step {line.step} before any generation")
            self._generation = LedgerGeneration(generation=0, after=0, world=0, same="")
        before = self.done[-1].update if self.done else None
        if self._after_gap:
            expected = self._after_gap + 1
            gap = "" if line.step == expected else f"step {line.step} instead of step {expected}"
        else:
            gap = _describe_gap(before, line, self._generation)
        if gap:
            self.problems.append(gap)
        self._after_gap = 0
        earlier = self._set_aside.pop(line.step, None)
        if earlier is not None:
            self.redone += 1
            difference = _describe_difference(earlier.update, earlier.by, line, self._generation)
            if difference:
                self.problems.append(f"step {line.step}: {difference}")
        self.chain = extend_chain(self.chain, line)
        entry = _Entry(line, self._generation, self.chain, self._rolled)
        if not self._keeps:
            self.done.clear()
        self.done.append(entry)
        self.reached = max(self.reached, line.step)
        return difference

    def summary(self) -> LedgerSummary:
        """Return the summary."""
        epochs: dict[int, int] = {}
        for entry in self.done:
            epoch = entry.update.epoch
            epochs[epoch] = epochs.get(epoch, 0) + entry.update.batches
        return LedgerSummary(
            len(self.done), sum(entry.update.rows for entry in self.done), tuple(epochs.values()),
            self._generations, self.redone, tuple(self.problems), tuple(self.gaps),
        )  # fmt: skip


def replay_file(path: Path) -> LedgerReplay:
    """Replay a file; FXP520 if it cannot be read."""
    replay = LedgerReplay()
    for line in read_lines(path, Line):
        if isinstance(line, LedgerGeneration):
            replay.begin(line)
        elif isinstance(line, LedgerUpdate):
            replay.update(line)
        elif isinstance(line, LedgerGap):
            replay.gap(line)
        else:
            replay.roll_back(line)
    return replay


def extend_chain(chain: str, line: LedgerUpdate | LedgerGap | LedgerRollback) -> str:
    """Return the digest of a history that is continued by a line."""
    content = chain.encode() + msgspec.json.encode(line)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


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
