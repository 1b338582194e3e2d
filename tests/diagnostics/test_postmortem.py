"""Who stopped first: from rings and failures as ranks leave them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.checkpoint.run_directory import RunDir
from fxpart.cli import run
from fxpart.diagnostics.failure_record import record_failure
from fxpart.diagnostics.flight_recorder import FlightRecorder
from fxpart.diagnostics.postmortem import examine
from fxpart.diagnostics.postmortem_text import cause, format_end, headline
from fxpart.diagnostics.rank_event import ALL, LEFT, PHASES
from fxpart.errors import FxpartError, Problem


class Left:
    """What the ranks of a generation leave, rank by rank, in the order of time."""

    def __init__(self, path: Path, generation: int = 1) -> None:
        self.run, self.generation = RunDir(path), generation

    def ring(self, rank: int, what: str, phase: str = "begin", peer: int = -1) -> FlightRecorder:
        path = self.run.events(self.generation, rank)
        made = FlightRecorder.create(path, rank, 16, generation=self.generation)
        made.step = 118
        made.put("the step", "end")
        made.put(what, phase, peer=peer)  # type: ignore[arg-type]
        return made

    def failed(self, ring: FlightRecorder, *problem: str) -> None:
        rank = ring.rank
        fault = FxpartError(Problem(*problem, ""))
        path = self.run.failure(self.generation, rank)
        assert record_failure(path, fault, rank=rank, generation=self.generation, events=ring)

    def first(self) -> tuple[int, ...]:
        return examine(self.run.path).first


def test_a_killed_rank_that_the_others_saw_end(tmp_path: Path) -> None:
    left = Left(tmp_path)
    waits = {0: 1, 1: 2, 3: 2}
    rings = {rank: left.ring(rank, "0B3", "wait", peer) for rank, peer in waits.items()}
    left.ring(2, "2F5", "wait", 1)  # it was killed while it waited
    for rank, ring in rings.items():
        left.failed(
            ring, "FXP514", f"rank {rank}, stage {rank}", "rank 2 (stage 2) ended 0.2 s ago"
        )
    found = examine(tmp_path)
    assert found.first == (2,) and found.votes == {2: 4}
    assert headline(found) == (
        "rank 2 stopped first: it ended abruptly: killed, out of memory, or its host was lost"
    )
    assert found.ranks[2].last is not None
    assert found.ranks[2].last.words == "2F5 of step 118 waits for rank 1"


def test_a_stopped_rank(tmp_path: Path) -> None:
    left = Left(tmp_path)
    one, _, three = left.ring(0, "0F1"), left.ring(1, "1F4"), left.ring(2, "2F0", "wait", 1)
    left.failed(
        three, "FXP515", "rank 2", "rank 1 (stage 1, process 4711) has been silent for 30 s"
    )
    left.failed(one, "FXP515", "rank 0", "rank 1 (stage 1, process 4711) has been silent for 30 s")
    found = examine(tmp_path)
    assert found.first == (1,) and "stopped or blocked" in headline(found)


def test_those_that_followed_are_followed(tmp_path: Path) -> None:
    """Without a watch: each knows only whom it waited for, or who closed its connection."""
    left = Left(tmp_path)
    rings = [left.ring(r, f"{r}B0", "wait", r + 1) for r in range(3)]
    left.ring(3, "3F0")
    lost = "the connection to another rank was lost: rank {} closed the connection"
    left.failed(rings[2], "FXP504", "rank 2, action 2B0, waiting for rank 3", lost.format(3))
    left.failed(rings[1], "FXP504", "rank 1, action 1B0, waiting for rank 2", lost.format(2))
    left.failed(rings[0], "FXP503", "rank 0, action 0B0, waiting for rank 1", "nothing for 30 s")
    found = examine(tmp_path)
    assert found.first == (3,) and found.votes == {3: 4}
    assert "recorded no failure; other ranks timed out" in headline(found)


def test_a_rank_that_raised_is_told_by_all(tmp_path: Path) -> None:
    left = Left(tmp_path)
    for rank in range(4):
        ring = left.ring(rank, "the end of the pass", "wait", ALL)
        left.failed(ring, "FXP504", "rank 1, stage 1, action 1F0, microbatch 0", "ValueError: bad")
    found = examine(tmp_path)
    assert found.first == (1,)
    assert cause(found, 1) == "FXP504: rank 1, stage 1, action 1F0, microbatch 0: ValueError: bad"


def test_an_exception_of_the_users_own(tmp_path: Path) -> None:
    left = Left(tmp_path)
    ring = left.ring(1, "the step", "end")
    record_failure(left.run.failure(1, 1), KeyError("row"), rank=1, events=ring)
    other = left.ring(0, "0B0", "wait", 1)
    left.failed(other, "FXP514", "rank 0", "rank 1 (stage 1) ended 0.1 s ago")
    found = examine(tmp_path)
    assert found.first == (1,) and "KeyError: 'row'" in headline(found)


def test_no_word_at_all(tmp_path: Path) -> None:
    """All were killed at once: the waits lead to the one that computed."""
    left = Left(tmp_path)
    left.ring(2, "2F5")
    left.ring(1, "1B0", "wait", 2)
    left.ring(0, "gradient reduction", "wait", ALL)
    left.ring(3, "3F6", "wait", 2)
    found = examine(tmp_path)
    assert found.first == (2,) and found.votes == {2: 4}


def test_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.ring(0, "0B0", "wait", 1)
    left.ring(1, "1F0", "wait", 0)
    assert left.first() == (0,)


def test_of_a_circle_only_its_members_can_be_the_first(tmp_path: Path) -> None:
    """All were ended before they could say a word; the eldest one's wait only leads to it."""
    left = Left(tmp_path)
    left.ring(0, "0B0", "wait", 1)
    left.ring(1, "1B0", "wait", 2)  # killed
    left.ring(2, "2F2", "wait", 1)
    found = examine(tmp_path)
    assert found.first == (1,) and found.votes == {1: 3}


@pytest.mark.parametrize(
    ("sent", "first"),
    [
        ("0SEND_F0", 1),
        ("0SEND_F0>1", 1),
        ("0SEND_F0>3", 0),  # another stage of the same rank
        ("0SEND_F1", 0),  # another microbatch
        ("2SEND_B0", 0),  # the other way
    ],
)
def test_who_waits_for_what_was_sent_is_the_first(tmp_path: Path, sent: str, first: int) -> None:
    left = Left(tmp_path)
    zero = left.ring(0, sent, "send", 1)
    zero.put("0B0", "wait", peer=1)
    left.ring(1, "1F0", "wait", 0)
    left.ring(2, "2F0", "wait", 1)
    assert left.first() == (first,)
    zero.step += 1  # what was sent in an earlier step is not what is waited for
    zero.put("0B0", "wait", peer=1)
    left.ring(1, "1F0", "wait", 0).step = 119
    ring = left.ring(1, "the step", "end")
    ring.step = 119
    ring.put("1F0", "wait", peer=0)
    assert left.first() == (0,)


def test_nobody_failed(tmp_path: Path) -> None:
    left = Left(tmp_path)
    for rank in range(2):
        left.ring(rank, LEFT, "end")
    found = examine(tmp_path)
    assert found.first == () and headline(found).endswith("all ended normally")


def test_a_rank_that_left_while_others_waited(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.ring(1, LEFT, "end")
    ring = left.ring(0, "0B0", "wait", 1)
    left.failed(ring, "FXP514", "rank 0", "rank 1 (process 7) had ended normally")
    found = examine(tmp_path)
    assert found.first == (1,)
    assert cause(found, 1) == "it ended normally while others waited for it"


def test_a_failure_that_only_the_ring_has(tmp_path: Path) -> None:
    left = Left(tmp_path)
    ring = left.ring(1, "1F0", "failed")
    ring.put(LEFT, "end")  # the script closed its trainer on the way out
    left.ring(0, "0B0", "wait", 1).put(LEFT, "end")
    assert left.first() == (1,)
    ring.put("the step", "end")  # it has gone on since
    ring.put(LEFT, "end")
    assert left.first() == ()


@pytest.mark.parametrize(
    ("code", "why", "gone"),
    [
        ("FXP514", "rank 0 (stage 0) ended 0.2 s ago", True),
        ("FXP504", "the connection to another rank was lost: rank 0 closed the connection", False),
    ],
)
def test_followers_that_only_the_rings_have(
    tmp_path: Path, code: str, why: str, gone: bool
) -> None:
    """The launcher ended them before they had written their failures down: those are in no file."""
    left = Left(tmp_path)
    left.ring(0, "0B3", "wait", 1) if gone else left.ring(0, "0F9")
    for rank in (2, 1):
        left.failed(left.ring(rank, f"{rank}F5", "wait", 0), code, f"rank {rank}", why)
        left.run.failure(1, rank).unlink()
    found = examine(tmp_path)
    assert found.first == (0,) and found.votes == {0: 3}
    assert [found.ranks[rank].how for rank in range(3)] == ["silent", "followed", "followed"]
    assert ("killed, out of memory" if gone else "lost their connection") in headline(found)
    assert format_end(found.ranks[1]) == f"{code} because of rank 0"
    assert found.ranks[1].newest(1)[0].words == (
        f"{code} of step 118 "
        + ("failed: rank 0 has ended" if gone else "failed because of rank 0")
    )


def test_all_failed_alike(tmp_path: Path) -> None:
    left = Left(tmp_path)
    for rank in range(3):
        left.failed(left.ring(rank, "the step", "end"), "FXP507", "callback f.on_step", "oh")
    found = examine(tmp_path)
    assert found.first == (0, 1, 2) and headline(found).startswith(
        "ranks 0, 1, 2 failed with the same error"
    )


def test_ranks_that_left_nothing(tmp_path: Path) -> None:
    left = Left(tmp_path)
    ring = left.ring(0, "the store", "begin")
    left.failed(ring, "FXP516", "rank 0 of 4", "ranks 2, 3 did not connect within 60 s")
    found = examine(tmp_path)
    assert found.first == (2,) and "rendezvous" in cause(found, 2)


def _call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = run(["postmortem", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Left(tmp_path, 1).ring(0, "an earlier life")
    left = Left(tmp_path, 3)
    left.ring(1, "1F4")
    ring = left.ring(0, "0B0", "wait", 1)
    left.failed(ring, "FXP514", "rank 0", "rank 1 (stage 1, process 7) ended\x1b[2J 0.1 s ago")
    status, out, err = _call(capsys, tmp_path, "--last", 2)
    assert (status, err) == (0, "")
    assert "generation 3 of 3: 2 ranks" in out
    assert "rank 1 stopped first: it ended abruptly" in out
    assert "0B0 of step 118 waits for rank 1" in out and "\x1b" not in out
    assert out.count("of step 118 ended") == 1  # of rank 1; rank 0 failed after its wait
    status, out, _ = _call(capsys, tmp_path, "--json", "--last", 0)
    data = json.loads(out)
    assert (data["first"], data["generation"], data["generations"]) == ([1], 3, [1, 3])
    assert data["ranks"][0]["waited_for"] == "rank 1" and data["ranks"][0]["events"] == []
    assert data["ranks"][0]["failure"]["problems"][0]["code"] == "FXP514"
    status, out, _ = _call(capsys, tmp_path, "--generation", 1)
    assert status == 0 and "rank 0 stopped first: it recorded no failure" in out
    status, _, err = _call(capsys, tmp_path, "--generation", 2)
    assert (
        status == 2
        and "FXP520" in err
        and "generation 2 does not exist; existing generations: 1, 3" in err
    )


def test_folders_that_are_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = tmp_path / "events"
    for make in (lambda: None, events.mkdir, (events / "generation-1").mkdir):
        make()
        status, _, err = _call(capsys, tmp_path)
        assert status == 2 and "FXP520" in err
    (events / "generation-1" / "rank-0.ring").write_bytes(b"x")
    (events / "generation-1" / "rank-1.failure.json").mkdir()
    os.symlink("/nonexistent", events / "generation-1" / "rank-2.ring")
    os.mkfifo(events / "generation-1" / "rank-3.ring")
    status, _, err = _call(capsys, tmp_path)
    assert status == 2 and "FXP520" in err
    # One that can be read is told of, and beside it what cannot be.
    Left(tmp_path).ring(4, "0F0")
    status, out, _ = _call(capsys, tmp_path)
    assert status == 0 and "rank-0.ring: it is not a flight recorder file" in out
    os.rename(events / "generation-1" / "rank-4.ring", events / "generation-1" / "rank-5.ring")
    status, _, err = _call(capsys, tmp_path)
    assert status == 2


_WORDS = st.sampled_from(
    ["rank 1", "ranks 2, 3 did not connect", "waiting for rank 0", "rank 999999999", "rank -1", "",
     "the connection to another rank was lost: rank 2 closed the connection", "rank 2, stage 2"]
)  # fmt: skip


@pytest.mark.slow
@given(st.data())
@settings(max_examples=80, deadline=None)
def test_whatever_was_left_is_told(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """No rings and failures, however they contradict each other, end in an exception or a loop."""
    left = Left(tmp_path_factory.mktemp("run"))
    ranks = data.draw(st.integers(1, 4))
    for rank in range(ranks):
        phase = data.draw(st.sampled_from(PHASES))
        what = data.draw(st.sampled_from(["0F0", LEFT, "the step"]))
        ring = left.ring(rank, what, phase, data.draw(st.integers(ALL, 5)))
        if data.draw(st.booleans()):
            code = data.draw(
                st.sampled_from(["FXP503", "FXP504", "FXP514", "FXP515", "FXP516", "FXP507"])
            )
            left.failed(ring, code, data.draw(_WORDS), data.draw(_WORDS))
    found = examine(left.run.path)
    assert headline(found)
    found.timeline(5)
    status = run(["postmortem", str(left.run.path)])
    assert status == 0
