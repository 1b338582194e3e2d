"""Generations: numbered once, and stopped where starting again is no use."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxpart.errors import FxpartError
from fxpart.runtime.training_run.generations import (
    FAILED,
    GenerationWriter,
    check_restart_progress,
    load_generations,
)
from fxpart.runtime.training_run.ledger import LedgerGeneration
from fxpart.runtime.training_run.options import Checkpoints
from fxpart.runtime.training_run.run_journal import RunJournal

# Each generation: (its checkpoint, the farthest step before it, how it ended or "").
Made = tuple[int, int, str]
DIED = ""


def written(path: Path, made: list[Made]) -> Path:
    book = GenerationWriter(path)
    for number, (step, reached, how) in enumerate(made, start=1):
        book.begin(number, world=2, step=step, reached=reached, plan="p")
        if how:
            book.end(number, step=step, how=how, why="rank 1: FXP504 x" if how == FAILED else "")
    book.close()
    return path


@pytest.mark.parametrize(
    ("made", "step", "reached", "stops"),
    [
        ([], 0, 0, False),
        ([(0, 0, DIED)] * 3, 0, 0, False),
        ([(0, 0, DIED)] * 4, 0, 0, True),  # the first start, and three restarts
        ([(0, 0, FAILED)] * 4, 0, 0, True),
        ([(0, 0, DIED)] * 4, 0, 3, False),  # the last came to step 3
        ([(0, 0, DIED)] * 4, 5, 0, False),  # or saved
        ([(0, 0, DIED), (0, 7, DIED), (0, 7, DIED)], 0, 7, False),
        ([(0, 0, DIED), (0, 7, DIED), (0, 7, DIED), (0, 7, DIED)], 0, 7, True),
        ([(0, 0, DIED), (5, 7, DIED), (5, 7, DIED), (5, 7, DIED)], 6, 7, False),
        ([(0, 0, DIED)] * 3 + [(0, 0, "SIGTERM to rank 0")], 0, 0, False),
        ([(0, 0, DIED)] * 4 + [(0, 0, "FXP517")] + [(0, 0, DIED)] * 3, 0, 0, False),
        ([(0, 0, DIED)] * 4 + [(0, 0, "FXP517")] + [(0, 0, DIED)] * 4, 0, 0, True),
    ],
)
def test_three_restarts_without_a_step(
    made: list[Made], step: int, reached: int, stops: bool, tmp_path: Path
) -> None:
    earlier = load_generations(written(tmp_path / "generations.jsonl", made))
    assert [g.began.generation for g in earlier] == list(range(1, len(made) + 1))
    found = check_restart_progress(tmp_path, earlier, step, reached, 3)
    assert (found is not None) == stops
    if found is not None:
        assert found.code == "FXP517" and f"generation {len(made) + 1}" in str(found)
        how = "rank 1: FXP504 x" if made[0][2] == FAILED else "killed (at least rank 0)"
        assert f"restarts since step {step}" in str(found) and how in str(found)


@pytest.mark.parametrize("lost", ["generations.jsonl", "steps.jsonl"])
def test_a_number_is_not_used_again(lost: str, tmp_path: Path) -> None:
    """Also where one of the files that have it was removed."""
    for number in (1, 2):
        journal = RunJournal(Checkpoints(tmp_path))
        assert journal.begin_generation(-1, world=1, plan="").generation == number
        begin = LedgerGeneration(generation=number, after=0, world=1, same="")
        journal.begin_ledger(begin, "")
        journal.close()
        (tmp_path / lost).unlink()


def test_a_line_that_was_cut_at_any_byte(tmp_path: Path) -> None:
    """Its text has braces and quotes; a process of a later start has appended, or none."""
    path = tmp_path / "generations.jsonl"
    book = GenerationWriter(path)
    book.begin(1, world=2, step=0, reached=0, plan="p")
    begun = path.read_bytes()
    book.end(1, step=0, how=FAILED, why='KeyError: {"a": {"\u00e9}"}} \\ }')
    whole = path.read_bytes()
    for cut in range(len(begun), len(whole) - 1):
        for left in (whole[:cut], whole[:cut] + bytes(9), begun + bytes(9)):
            path.write_bytes(left)
            later = GenerationWriter(path)
            assert [each.ended for each in load_generations(path)] == [None]
            later.begin(2, world=2, step=0, reached=0, plan="p")
            later.close()
            assert [each.ended for each in load_generations(path)] == [None, None]
    book.close()


@pytest.mark.parametrize("why", ["x" * (2 << 20), "a file \udcff"])
def test_a_failure_with_any_text(why: str, tmp_path: Path) -> None:
    book = GenerationWriter(tmp_path / "generations.jsonl")
    book.begin(1, world=2, step=0, reached=0, plan="p")
    book.end(1, step=0, how=FAILED, why=why)
    book.close()
    assert load_generations(tmp_path / "generations.jsonl")[0].how[:6] == why[:6]


def test_what_is_no_such_file(tmp_path: Path) -> None:
    path = written(tmp_path / "generations.jsonl", [(0, 0, DIED)])
    path.write_bytes(path.read_bytes() + b'{"line":"ended","gen')
    assert len(load_generations(path)) == 1
    path.write_bytes(path.read_bytes() + b'"}\n')
    with pytest.raises(FxpartError, match="FXP520"):
        load_generations(path)
