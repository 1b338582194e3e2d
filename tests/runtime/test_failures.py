"""A failure on one rank is told on every rank, promptly, and hangs none."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Pool, RankError
from runtime_programs import fail, mismatch, other_options, out_of_step, wrong_world


@pytest.mark.parametrize("what", ["raise", "backward", "shape"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_in_process_a_failed_stage_is_named(stage: int, what: str) -> None:
    found = fail(4, stage, what, 2, 60.0)
    code, where, _ = found["problems"][0]
    assert code == ("FXP900" if what == "shape" else "FXP504")
    assert f"rank {stage}, stage {stage}, action {stage}" in where
    assert "microbatch 1" in where
    assert found["unchanged"] and found["gradients"] == 0
    assert found["next"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "what"),
    [(s, w) for s in range(4) for w in ("raise", "backward", "shape") if (s, w) != (3, "shape")],
)
def test_a_failed_stage_is_told_everywhere(pool: Pool, stage: int, what: str) -> None:
    """The same error on every rank, nothing updated, and the next step works; over both ways."""
    memory = (stage + len(what)) % 2 == 0
    results = pool.run(fail, 4, stage, what, 3, 20.0, memory, ranks=4)
    assert len({str(r["problems"]) for r in results}) == 1
    assert f"rank {stage}, stage {stage}" in results[0]["problems"][0][1]
    for found in results:
        assert found["problems"] and found["unchanged"] and found["gradients"] == 0
        assert found["next"] == results[0]["next"]
        assert found["seconds"] < 15


@pytest.mark.slow
@pytest.mark.parametrize("memory", [True, False])
def test_a_stopped_rank_is_noticed_in_time(pool: Pool, memory: bool) -> None:
    """FXP503 names rank, stage, action, microbatch and seconds; afterwards no call hangs."""
    results = pool.run(fail, 2, 0, "sleep", 2, 2.0, memory, ranks=2)
    code, where, why = results[1]["problems"][0]
    assert code == "FXP503"
    assert where == "rank 1, stage 1, action 1F1, microbatch 1, waiting for rank 0 (stage 0)"
    assert "2 seconds" in why
    assert results[1]["seconds"] < 6
    assert results[0]["problems"][0][0] in ("FXP503", "FXP504")
    assert {r["again"] for r in results} <= {"FXP503", "FXP504"}


@pytest.mark.slow
@pytest.mark.parametrize("memory", [True, False])
def test_a_killed_rank_ends_the_others(pool: Pool, memory: bool) -> None:
    """The survivors get FXP504 at once, long before the timeout."""
    with pytest.raises(RankError, match="ended with status -9") as caught:
        pool.run(fail_elsewhere, memory, ranks=4)
    assert str(caught.value).count("--- rank") == 1
    # The pool comes back by itself.
    assert pool.run(wrong_world, 2, ranks=2) == ["", ""]


def fail_elsewhere(memory: bool) -> None:
    """Rank 2 is killed; the others must not take long to fail."""
    found = fail(4, 2, "kill", 2, 25.0, memory)
    assert found["problems"][0][0] == "FXP504", found
    assert found["seconds"] < 15, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("missing", "missing"), {"batch['labels']"}),
        (("good", "missing"), {"batch['labels']"}),
        (("good", "good", "dtype", "good"), {"batch['mask']"}),
        (("good", "good", "dtype", "missing"), {"batch['labels']", "batch['mask']"}),
        # Only the last stage needs the labels, so that the others may do without.
        (("missing", "good"), set()),
        (("missing", "good", "dtype", "good"), {"batch['mask']"}),
    ],
)
def test_a_bad_batch_on_any_rank_is_refused_on_all(
    pool: Pool, kinds: tuple[str, ...], expected: set[str]
) -> None:
    results = pool.run(mismatch, kinds, ranks=len(kinds))
    assert all(found == results[0] for found in results)
    assert {code for code, _, _ in results[0]} == ({"FXP105"} if expected else set())
    assert {where for _, where, _ in results[0]} == expected


@pytest.mark.slow
def test_ranks_with_different_batches_say_so(pool: Pool) -> None:
    results = pool.run(mismatch, ("good", "rows"), ranks=2)
    assert results[0] == results[1]
    ((code, where, why),) = results[0]
    assert (code, where) == ("FXP501", "the batches")
    assert "rank 0: ..." in why and "rank 1: ..." in why
    assert "ids:int64(8, 5)" in why and "ids:int64(6, 5)" in why


@pytest.mark.slow
def test_ranks_with_different_options_say_so(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(other_options, str(tmp_path), ranks=2)
    assert first == second
    assert "FXP501" in first[0] and "seed 0" in first[0] and "seed 1" in first[0]
    for text, part in zip(
        first[1:],
        ("rank 1, sed", "rank 0, fit", "'step'", "patience 2", "in another folder", "gamma 1.5"),
        strict=True,
    ):
        assert part in text


@pytest.mark.slow
def test_the_wrong_number_of_processes_is_refused_everywhere(pool: Pool) -> None:
    for text in pool.run(wrong_world, 3, ranks=2):
        assert "FXP502" in text and "3 ranks" in text


@pytest.mark.slow
@pytest.mark.parametrize("number", [4763463945535899677, -1])
def test_a_number_of_another_place_is_no_length(pool: Pool, number: int) -> None:
    """A rank that has waited too long is a step further while others tell what went wrong."""
    found = pool.run(out_of_step, number, ranks=2, timeout=60.0)
    assert found == ["the ranks are no longer at the same exchange", ""]
