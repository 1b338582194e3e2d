"""Streams over gloo: the bits of one process, and failures that every rank hears of."""

from __future__ import annotations

import json
from typing import Any

import pytest
import stream_programs
import torch
from benchmarks.stalebench import rotations
from ranks import Pool

from fxpart.schedule.weight_modes import MODES

PLAIN = [name for name in MODES if name not in ("2bw", "2bw-ef", "nadam-stash")]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_ties_skips_batch_statistics_and_dropout(pool: Pool, stages: int) -> None:
    cut = (2, 2) if stages == 2 else (1, 1, 1, 1)
    for options in (
        {"weights": "spectrain", "microbatches": 1, "optimizer": "adamw"},
        {"weights": "stash", "microbatches": 3, "clip_norm": 0.1, "clip": "delayed"},
        {"weights": "naive", "microbatches": 2, "warm_up": 3},
    ):
        given: tuple[Any, ...] = (cut, 7, {"tied": stages == 4}, options)
        expected = stream_programs.train(*given, True)
        found = pool.run(stream_programs.train, *given, False, ranks=stages, timeout=240.0)
        assert found == [expected] * stages, options


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "gpt"])
@pytest.mark.parametrize("stages", [2, 4])
def test_every_mode_has_the_emulators_bits(pool: Pool, model: str, stages: int) -> None:
    """Losses and weights, for momentum SGD and AdamW."""
    both = [(mode, optimizer) for mode in PLAIN for optimizer in ("sgd", "adamw")]
    for count, runs in (
        (1, [*both, ("nadam-stash", "nadam")]),
        (stages, [("2bw", "sgd"), ("2bw-ef", "adamw"), ("xpipe", "adamw")]),
    ):
        given = (model, stages, count, runs)
        expected = stream_programs.compiled(*given, True)
        assert len(set(expected)) > len(runs) // 2, "modes differ from one another"
        found = pool.run(stream_programs.compiled, *given, False, ranks=stages, timeout=240.0)
        assert found == [expected] * stages


ROTATIONS = list(rotations.list_settings())


def test_the_file_of_rotations_is_the_oracles() -> None:
    kept = json.loads(rotations.FILE.read_text("utf-8"))
    assert list(kept) == [rotations.name_of(each) for each in ROTATIONS]
    for each in ROTATIONS:
        found, old = rotations.trace(*each), kept[rotations.name_of(each)]
        assert found["losses"] == pytest.approx(old["losses"], rel=1e-13)
        for mine, theirs in zip(found["weights"], old["weights"], strict=True):  # type: ignore[call-overload]
            assert [*mine[0], *mine[1]] == pytest.approx([*theirs[0], *theirs[1]], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("here", [True, False])
def test_basis_rotation_follows_its_golden_traces(here: bool, request: Any) -> None:
    """Both sources of the basis, and refreshes by staleness: in the emulator and over gloo."""
    for setting in ROTATIONS:
        mode, stages, count, source, aware = setting
        if not here and (stages == 3 or count == 2 < stages):
            continue
        samples = [
            [rotations.sample(t) for t in range(n * count + 1, (n + 1) * count + 1)]
            for n in range(rotations.UPDATES)
        ]
        options = {
            "lr": rotations.RATE, "betas": (rotations.BETA1, rotations.BETA2),
            "eps": rotations.EPSILON, "weight_decay": rotations.DECAY, "refresh": rotations.EVERY,
            "source": source, "stage_aware": aware,
        }  # fmt: skip
        given = [rotations.start(k) for k in range(stages)], samples, mode, options, here
        if here:
            found = [stream_programs.rotated(*given)]
        else:
            pool = request.getfixturevalue("pool")
            found = pool.run(stream_programs.rotated, *given, ranks=stages, timeout=240.0)
        known = rotations.trace(*setting)
        for losses, weights in found:
            assert losses == pytest.approx(known["losses"], rel=1e-12, abs=1e-14)
            torch.testing.assert_close(
                torch.tensor(weights, dtype=torch.float64),
                torch.tensor(known["weights"], dtype=torch.float64), rtol=1e-12, atol=1e-13,
            )  # fmt: skip


@pytest.mark.parametrize("here", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("stages", "stage"), [(2, 0), (2, 1), (4, 1), (4, 3)])
def test_a_stage_that_fails(here: bool, stages: int, stage: int, request: Any) -> None:
    """Every rank raises the same error at the same call, as many calls later as news takes."""
    given = (stages, stage, 4, 20)
    if here:
        found = [stream_programs.fail(*given, True)]
    else:
        pool = request.getfixturevalue("pool")
        found = pool.run(stream_programs.fail, *given, False, ranks=stages, timeout=240.0)
    assert all(one == found[0] for one in found)
    assert found[0]["call"] == 3 + stages, "its call, and the lag"
    ((code, where, why),) = found[0]["problems"]
    assert code == "FXP504" and why.startswith("ValueError: a stage that cannot (")
    assert "runtime_programs.py, line " in why, "the user's own line"
    assert where.startswith(f"rank {stage}, stage {stage}, action {stage}F3, microbatch 3")
    assert found[0]["again"] == "FXP504"


@pytest.mark.parametrize("here", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_fit(here: bool, request: Any) -> None:
    """Steps are told in order with their own losses; evaluations drain."""
    found = ask(here, request, "nothing")
    assert all(one == found[0] for one in found)
    assert found[0]["steps"] == 8 and found[0]["why"] == "epochs"
    assert [(step, rows) for step, rows, _ in found[0]["seen"]] == [(n, 8) for n in range(1, 9)]
    plain = stream_programs.train(
        (1, 1, 1, 1), 6, {}, {"weights": "spectrain", "microbatches": 1}, True
    )
    first = [torch.tensor(loss).numpy().tobytes() for _, _, loss in found[0]["seen"][:6]]
    assert first == plain[0]


@pytest.mark.parametrize("here", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["callback", "data"])
def test_what_raises_in_fit_is_raised_on_every_rank(here: bool, what: str, request: Any) -> None:
    found = ask(here, request, what)
    assert {one["code"] for one in found} == {"FXP507"}
    assert "ValueError" in found[0]["why"]


def ask(here: bool, request: Any, what: str) -> list[Any]:
    if here:
        return [stream_programs.fit(4, what, True)]
    pool: Pool = request.getfixturevalue("pool")
    found: list[Any] = pool.run(stream_programs.fit, 4, what, False, ranks=4, timeout=240.0)
    return found


@pytest.mark.slow
def test_transfers_by_gloo_itself(pool: Pool) -> None:
    """Streams one after another, and a smaller last batch."""
    expected = stream_programs.bare(True)
    assert pool.run(stream_programs.bare, False, ranks=4, timeout=240.0) == [expected] * 4


@pytest.mark.slow
def test_a_trainer_that_is_closed_leaves_nothing_for_the_next(pool: Pool) -> None:
    """Receives that stand ready would take the next trainer's messages."""
    whole = stream_programs.left(True)
    ranks = pool.run(stream_programs.left, False, ranks=4, timeout=240.0)
    for at, (updates, expected) in enumerate(whole):
        assert {updates, *(rank[at][0] for rank in ranks)} == {5}
        assert {name: value for rank in ranks for name, value in rank[at][1].items()} == expected


@pytest.mark.slow
def test_a_rank_that_drains_alone(pool: Pool) -> None:
    """Its neighbours hear of it from the next message; nobody waits for longer than the timeout."""
    found = pool.run(stream_programs.part, "drains", ranks=4, timeout=240.0)
    assert found[3][0] == "FXP501" and found[2][0] == "FXP501"
    assert all(code in ("FXP501", "FXP503", "FXP504") for code, _ in found)


@pytest.mark.slow
def test_a_rank_that_is_gone(pool: Pool) -> None:
    found = pool.run(stream_programs.part, "gone", ranks=4, timeout=240.0)
    assert [code for code, _ in found[1:]] == ["FXP504", "", "FXP504"]
    # Rank 0 waits for rank 1, which lives: on a busy machine for longer than the timeout.
    assert found[0][0] in ("FXP503", "FXP504")
    for rank, (_, where) in enumerate(found):  # by a transfer or by what ranks tell: who is first
        own = (
            f"rank {rank}, stage {rank}, action {rank}",
            f"rank {rank}, sending the status of a call",
        )
        assert rank == 2 or where.startswith(own)
