"""The ledger: what is lost, repeated or different is found, whatever a killed process left."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.errors import FxpartError
from fxpart.runtime.training_run.ledger import (
    Ledger,
    LedgerGeneration,
    LedgerUpdate,
    check_ledger,
    read_updates,
)

EPOCH = 4  # batches


def line(step: int, **changed: Any) -> LedgerUpdate:
    """The update that belongs there, each of two batches, but for what is changed."""
    batch = 2 * (step - 1)
    right: dict[str, Any] = {
        "step": step, "epoch": batch // EPOCH, "first": batch % EPOCH, "batches": 2, "rows": 16,
        "loss": 1 / step, "digest": f"{step:08d}aa",
    }  # fmt: skip
    return LedgerUpdate(**{**right, **changed})


def begin(generation: int, after: int, same: str = "a", **more: Any) -> LedgerGeneration:
    return LedgerGeneration(
        generation=generation, after=after, world=more.pop("world", 2), same=same, **more
    )


def written(path: Path, *lines: LedgerUpdate | LedgerGeneration) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in lines))
    return path


@pytest.mark.slow
@given(stops=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=6))
def test_any_run_that_goes_on_is_whole(
    tmp_path_factory: pytest.TempPathFactory, stops: list[tuple[int, int]]
) -> None:
    """stops: how many steps a generation comes forward, and how far back the next one begins."""
    path = tmp_path_factory.mktemp("run") / "steps.jsonl"
    at, farthest, redone = 0, 0, 0
    for generation, (forward, back) in enumerate([*stops, (3, 0)], start=1):
        ledger = Ledger(path)
        assert ledger.reached == farthest
        ledger.begin(begin(generation, at))
        for step in range(at + 1, at + forward + 1):
            redone += step <= farthest
            ledger.write(line(step))
        ledger.close()
        at += forward
        farthest = max(farthest, at)
        last, at = at, max(0, at - back)
    found = check_ledger(path)
    assert found.problems == () and found.redone == redone
    assert (found.steps, found.generations, found.rows) == (last, len(stops) + 1, 16 * last)
    assert read_updates(path) == [line(step) for step in range(1, last + 1)]
    assert sum(found.epochs) == 2 * last


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([begin(1, 0), line(1), line(3)], "step 3 instead of step 2"),
        ([begin(1, 0), line(1), line(1)], "step 1 instead of step 2"),
        ([begin(1, 0), line(2)], "step 2 instead of step 1"),
        ([line(1)], "step 1 before any generation"),
        ([begin(1, 0), line(1), line(2, first=1)], "batch 1 of epoch 0 instead of batch 2"),
        ([begin(1, 0), line(1), line(2), line(3, first=2)], "epoch 1 begins with batch 2"),
        ([begin(1, 0), line(1), line(2), line(3, epoch=2)], "epoch 2 begins with batch 0"),
        ([begin(1, 0), line(1), begin(2, 3)], "resumed after step 3"),
        ([begin(1, 0), line(1), begin(2, 0), line(1, rows=8)], "16 rows before, batches 0 to 1"),
        (
            [begin(1, 0), line(1), begin(2, 0), line(1, digest="00000001bb")],
            "values differ from before",
        ),
        ([begin(1, 0), line(1), begin(2, 0), line(1, loss=1 + 1e-9)], "loss 1.0 before, 1.00000"),
        ([begin(1, 0), line(1), begin(2, 0), line(1, loss="nan")], "loss 1.0 before, 'nan' now"),
        ([begin(1, 0), line(1), begin(2, 0, "b"), line(1, loss=1.1)], "more than 1e-05 apart"),
    ],
)
def test_what_is_wrong_is_found(lines: list[Any], why: str, tmp_path: Path) -> None:
    problems = check_ledger(written(tmp_path / "steps.jsonl", *lines)).problems
    assert len(problems) == 1 and why in problems[0]


def test_a_stream_of_the_same_plan_is_done_again_to_the_bit(tmp_path: Path) -> None:
    again = [begin(2, 0, stream=True), line(1, loss=1 + 1e-9)]
    found = check_ledger(written(tmp_path / "a.jsonl", begin(1, 0, stream=True), line(1), *again))
    assert len(found.problems) == 1 and "loss" in found.problems[0]


@pytest.mark.parametrize(
    "lines",
    [
        [begin(1, 0), line(1), begin(2, 0, "b"), line(1, loss=1 + 1e-9)],
        [begin(1, 0), line(1, loss="nan"), begin(2, 0), line(1, loss="nan")],
        # A device whose operations do not give equal bits.
        [begin(1, 0, ""), line(1), begin(2, 0, ""), line(1, loss=1 + 1e-9)],
        # Rank 0 had other inputs, or its own rows among fewer ranks.
        [begin(1, 0), line(1), begin(2, 0, "b"), line(1, digest="00000009bb")],
        [begin(1, 0, own=True), line(1), begin(2, 0, own=True, world=3), line(1, digest="0" * 10)],
        # Stages that do not wait miss another number of updates, where there are others of them.
        [begin(1, 0, stream=True), line(1), begin(2, 0, "b", stream=True), line(1, loss=2.0)],
    ],
)
def test_what_may_differ(lines: list[Any], tmp_path: Path) -> None:
    assert check_ledger(written(tmp_path / "steps.jsonl", *lines)).problems == ()


def test_a_step_done_again_is_compared_at_once(tmp_path: Path) -> None:
    path = written(tmp_path / "steps.jsonl", begin(1, 0), line(1), line(2))
    for compared in (True, False):
        ledger = Ledger(path, check=compared)
        ledger.begin(begin(2, 1))
        if compared:
            with pytest.raises(FxpartError, match="FXP518") as caught:
                ledger.write(line(2, loss=2.0))
            assert caught.value.problems[0].where == f"{path}, step 2"
            assert caught.value.problems[0].why == "loss 0.5 before, 2.0 now"
        else:
            ledger.write(line(2, loss=3.0))
        ledger.close()


@given(cut=st.integers(2, 80))
def test_a_line_that_was_cut_short(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """A process was killed in the middle of it; the next one ends it, and goes on."""
    path = tmp_path_factory.mktemp("run") / "steps.jsonl"
    written(path, begin(1, 0), line(1), line(2))
    path.write_bytes(path.read_bytes()[:-cut])
    assert check_ledger(path).steps == 1
    ledger = Ledger(path)
    ledger.begin(begin(2, 1))
    ledger.write(line(2))
    ledger.close()
    assert check_ledger(path).problems == () and check_ledger(path).steps == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.replace(b'"update"', b'"upsidedown"'),
        lambda raw: raw.replace(b'"step":1', b'"step":"one"'),
        lambda raw: b"[" * 100_000 + raw,
        lambda raw: b"\xff\xfe" + raw,
        lambda raw: b"x" * (2 << 20),
    ],
)
def test_what_is_no_ledger(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = written(tmp_path / "steps.jsonl", begin(1, 0), line(1))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(FxpartError, match="FXP520"):
        check_ledger(path)


def test_losses_are_exact(tmp_path: Path) -> None:
    losses = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0]
    ledger = Ledger(tmp_path / "steps.jsonl")
    ledger.begin(begin(1, 0))
    for step, loss in enumerate(losses, start=1):
        ledger.write(line(step, loss=loss))
    ledger.write(line(len(losses) + 1, loss="inf"))
    ledger.close()
    found = [update.number for update in read_updates(tmp_path / "steps.jsonl")]
    assert found == [*losses, math.inf] and math.copysign(1, found[4]) == -1


def test_nothing_there(tmp_path: Path) -> None:
    assert check_ledger(tmp_path / "none.jsonl").steps == 0
    with pytest.raises(FxpartError, match="FXP520"):
        check_ledger(tmp_path)
