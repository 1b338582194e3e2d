"""The ledger of a run: a line for each update, so that nothing is lost, repeated or different.

The file only grows. Where a run goes on from a checkpoint, a line says after which step; the lines
behind that step stand aside then, and each of their steps that is done again is compared with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from fxpart.errors import error
from fxpart.runtime.training_run.json_lines import JsonLinesAppender, read_lines

_CLOSE = 1e-5  # relative, where plan, ranks or machine are others
_WHAT = 8  # the letters of a digest that say what was looked at


class LedgerUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="update", tag_field="line"):
    """One update. Of the data: batches ``first`` to before ``first + batches`` of the epoch.

    loss: exact; the text of a number that is not finite. digest: of what rank 0 was given of the
    batches (:func:`fxpart.runtime.training_run.batch_digest.digest_batches`).
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
        """The loss."""
        return float(self.loss)


class LedgerGeneration(msgspec.Struct, frozen=True, kw_only=True, tag="begin", tag_field="line"):
    """A generation goes on after a step. same: alike where losses have to be equal to the bit, ""
    where they need not be.

    own: rank 0 is given its own rows only, so that digests are those of this world. stream: stages
    do not wait for each other, so that losses are those of their number and cuts.
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
    """What a ledger says. steps: updates that count; rows: their rows; epochs: batches of each.

    generations: how often the run was started. redone: updates that were done again. problems: what
    was lost, repeated or different; none where all is well.
    """

    steps: int
    rows: int
    epochs: tuple[int, ...]
    generations: int
    redone: int
    problems: tuple[str, ...]


def check_ledger(path: str | Path) -> LedgerSummary:
    """Go through a ledger: every step once, every batch once, steps done again as they were.

    FXP520 where it cannot be read.
    """
    return _walked(Path(path)).summary()


def read_updates(path: str | Path) -> list[LedgerUpdate]:
    """The updates that count, in order; FXP520 where the file cannot be read."""
    return [update for update, _ in _walked(Path(path)).done]


def read_ledger_generations(path: str | Path) -> list[LedgerGeneration]:
    """How each generation began, in order; FXP520 where the file cannot be read."""
    return [line for line in read_lines(Path(path), Line) if isinstance(line, LedgerGeneration)]


class Ledger:
    """A run's ledger, written by rank 0. reached: the farthest step that it had before."""

    def __init__(self, path: Path, *, check: bool = True) -> None:
        """Nothing is written yet. check: compare steps that are done again."""
        self._path, self._check = path, check
        self._walk = _walked(path)
        self._file = JsonLinesAppender(path)

    @property
    def reached(self) -> int:
        """The farthest step that was ever done."""
        return self._walk.reached

    def begin(self, line: LedgerGeneration) -> None:
        """A generation begins."""
        self._walk.begin(line)
        self._file.write(line)

    def write(self, line: LedgerUpdate) -> None:
        """An update was done; FXP518 where it was done before and gave something else.

        That is not written then, so that the next generation is compared with the first again.
        """
        told = self._walk.update(line)
        if told and self._check:
            raise error(
                "FXP518", where=f"{self._path}, step {line.step}", why=told,
                fix="see what differs: data order, code, library versions; "
                "Checkpoints(check=False) goes on",
            )  # fmt: skip
        self._file.write(line)

    def sync(self) -> None:
        """What was written stands on the disk."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _LedgerReplay:
    """Goes through the lines. done: updates that count, with the generation that did each."""

    def __init__(self) -> None:
        self.done: list[tuple[LedgerUpdate, LedgerGeneration]] = []
        self.reached = self.redone = 0
        self.problems: list[str] = []
        self._aside: dict[int, tuple[LedgerUpdate, LedgerGeneration]] = {}
        self._now: LedgerGeneration | None = None
        self._generations = 0

    def begin(self, line: LedgerGeneration) -> None:
        """A generation begins: what is behind its step stands aside."""
        last = self.done[-1][0].step if self.done else 0
        if line.after > last:
            self.problems.append(
                f"generation {line.generation} went on after step {line.after}, and the ledger "
                f"ends with step {last}"
            )
        while self.done and self.done[-1][0].step > line.after:
            update, by = self.done.pop()
            self._aside[update.step] = update, by
        self._now = line
        self._generations += 1

    def update(self, line: LedgerUpdate) -> str:
        """An update; what is different from when it was done before, "" where nothing is."""
        told = ""
        if self._now is None:
            self.problems.append(f"step {line.step} before any generation")
            self._now = LedgerGeneration(generation=0, after=0, world=0, same="")
        before = self.done[-1][0] if self.done else None
        if wrong := _misplaced(before, line, self._now):
            self.problems.append(wrong)
        earlier = self._aside.pop(line.step, None)
        if earlier is not None:
            self.redone += 1
            told = _different(*earlier, line, self._now)
            if told:
                self.problems.append(f"step {line.step}: {told}")
        self.done.append((line, self._now))
        self.reached = max(self.reached, line.step)
        return told

    def summary(self) -> LedgerSummary:
        """What was found."""
        epochs: dict[int, int] = {}
        for update, _ in self.done:
            epochs[update.epoch] = epochs.get(update.epoch, 0) + update.batches
        return LedgerSummary(
            len(self.done), sum(update.rows for update, _ in self.done), tuple(epochs.values()),
            self._generations, self.redone, tuple(self.problems),
        )  # fmt: skip


def _walked(path: Path) -> _LedgerReplay:
    walk = _LedgerReplay()
    for line in read_lines(path, Line):
        if isinstance(line, LedgerGeneration):
            walk.begin(line)
        else:
            walk.update(line)
    return walk


def _misplaced(before: LedgerUpdate | None, line: LedgerUpdate, begin: LedgerGeneration) -> str:
    """Whether a step or a batch was lost or repeated between two updates, in words."""
    step = begin.after + 1 if before is None else before.step + 1
    if line.step != step:
        return f"step {line.step} where step {step} comes next"
    if before is None:
        return "" if begin.after else _first(line, line.epoch == 0)
    if line.epoch == before.epoch:
        expected = before.first + before.batches
        if line.first != expected:
            return (
                f"step {line.step}: batch {line.first} of epoch {line.epoch} where batch "
                f"{expected} comes next"
            )
        return ""
    return _first(line, line.epoch == before.epoch + 1)


def _first(line: LedgerUpdate, next_epoch: bool) -> str:
    if line.first or not next_epoch:
        return f"step {line.step}: epoch {line.epoch} begins with batch {line.first}"
    return ""


def _different(
    then: LedgerUpdate, by: LedgerGeneration, now: LedgerUpdate, begin: LedgerGeneration
) -> str:
    """What is not as it was, in words."""
    if (then.epoch, then.first, then.batches, then.rows) != (
        now.epoch, now.first, now.batches, now.rows,
    ):  # fmt: skip
        return f"{_data(then)} then, {_data(now)} now"
    comparable = by.own == begin.own and (not begin.own or by.world == begin.world)
    comparable = comparable and then.digest[:_WHAT] == now.digest[:_WHAT]
    if comparable and then.digest != now.digest:
        return f"{_data(then)}: other numbers in it than then"
    exact = bool(by.same) and by.same == begin.same
    if not exact and (by.stream or begin.stream):
        return ""
    if not _alike(then.number, now.number, exact=exact):
        how = "" if exact else f", more than {_CLOSE:g} apart"
        return f"loss {then.loss!r} then, {now.loss!r} now{how}"
    return ""


def _data(update: LedgerUpdate) -> str:
    last = update.first + update.batches - 1
    batches = f"batch {last}" if update.batches == 1 else f"batches {update.first} to {last}"
    return f"{batches} of epoch {update.epoch}, {update.rows} rows"


def _alike(a: float, b: float, *, exact: bool) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b if exact else math.isclose(a, b, rel_tol=_CLOSE)
