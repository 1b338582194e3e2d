"""Rank 0's plan is the plan of all ranks, however they meet; so is what it cannot plan."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import one_plan_programs as programs
import pytest
import sample_plans
from ranks import Pool, _environment, torchrun

from fxpart.errors import FxpartError
from fxpart.launch.rendezvous import loopback_store
from fxpart.planner import plan_agreement

SCRIPT = Path(programs.__file__)
STATIC = ("--rdzv-backend=static", "--master-addr=127.0.0.1")
OWNED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def told(text: str) -> list[dict[str, Any]]:
    """The lines of all ranks, in order of rank and of telling."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


def run(*args: str, ranks: int = 2, **options: Any) -> list[dict[str, Any]]:
    """Of the script under torchrun, which all ranks have ended well."""
    done = torchrun(SCRIPT, *args, ranks=ranks, timeout=120, **options)
    assert done.returncode == 0, done.stderr
    return told(done.stdout)


def agree(found: list[dict[str, Any]], ranks: int) -> None:
    """One plan, made once, and the same losses."""
    assert [line["rank"] for line in found] == list(range(ranks))
    assert [line["planned"] for line in found] == [1] + [0] * (ranks - 1)
    assert len({(line["plan"], str(line.get("losses"))) for line in found}) == 1


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def by_hand(*args: str, ranks: int = 2) -> list[dict[str, Any]]:
    """Without any launcher: rank 0 owns the store."""
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *args],
            env={
                **_environment(), "RANK": str(rank), "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    found = [each.communicate(timeout=120) for each in started]
    assert len({each.returncode for each in started}) == 1, found
    return told("".join(out for out, _ in found))


@pytest.mark.slow
def test_under_torchrun_with_no_group_of_the_users() -> None:
    """Each rank alone finds another plan, and all have the one of rank 0; of the next, too."""
    found = run("each", "again", "train")
    assert len({line["own"] for line in found}) == 2
    assert [line["planned"] for line in found] == [3, 1]
    assert len({(line["plan"], line["again"], str(line["losses"])) for line in found}) == 1


@pytest.mark.slow
def test_where_rank_0_owns_the_store() -> None:
    """torchrun says so, or there is none; a group of the user's comes after the plan."""
    agree(run("train", environment=OWNED), 2)
    agree(by_hand("after", "train"), 2)


@pytest.mark.slow
def test_static_rendezvous_and_a_group_from_a_file(tmp_path: Path) -> None:
    agree(run("after", "train", rendezvous=(*STATIC, f"--master-port={free_port()}")), 2)
    agree(by_hand("train", f"file://{tmp_path / 'group'}"), 2)


@pytest.mark.slow
def test_with_a_group_of_the_users(pool: Pool) -> None:
    agree(pool.run(programs.found, "train", ranks=2), 2)


@pytest.mark.slow
def test_started_again_with_the_plan_it_had() -> None:
    """Every life's planner would find another; whoever comes late finds what there is."""
    found = run("train", "fail", restarts=1)
    assert len({(line["plan"], str(line["losses"])) for line in found}) == 1
    assert sorted(line["planned"] for line in found) == [0] * (len(found) - 1) + [1]


@pytest.mark.slow
def test_what_rank_0_cannot_plan_all_say(pool: Pool) -> None:
    for found in (pool.run(programs.found, "refused", ranks=3), by_hand("refused")):
        assert len({line["error"] for line in found}) == 1
        assert "FXP204" in found[0]["error"] and "rank 0" in found[0]["error"]
        assert [line["planned"] for line in found] == [1] + [0] * (len(found) - 1)


@pytest.mark.slow
def test_another_model_is_found_out_by_all(pool: Pool) -> None:
    found = pool.run(programs.found, "other", "train", ranks=2)
    assert [line["planned"] for line in found] == [1, 1]
    assert all("FXP501" in line["error"] for line in found)


@pytest.mark.slow
def test_rank_0_waits_for_nobody(pool: Pool) -> None:
    """One rank may plan for a report, while the others do something else."""
    began = time.monotonic()
    found = pool.run(programs.found, "only-0", ranks=2)
    assert [line["planned"] for line in found] == [1, 0]
    assert time.monotonic() - began < plan_agreement.SILENCE


class Channels:
    """Ranks of one store, as threads of this process."""

    def __init__(self, world: int) -> None:
        self.store = loopback_store()
        self.each = [plan_agreement._PlanChannel(self.store, rank, world) for rank in range(world)]


@pytest.mark.slow
def test_a_wait_without_heartbeats_warns_and_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plan_agreement, "SILENCE", 0.5)
    monkeypatch.setattr(plan_agreement, "_WARN_AFTER", 0.1)
    channel = Channels(2).each[1]
    with caplog.at_level(logging.WARNING, "fxpart"), pytest.raises(FxpartError) as caught:
        channel.wait_for_reply(*channel.next("one"))
    assert caught.value.code == "FXP516" and "not begun to plan" in str(caught.value)
    assert "rank 1 waits for the plan of rank 0" in caplog.text


@pytest.mark.slow
def test_a_long_search_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the silence: heartbeats extend the wait."""
    monkeypatch.setattr(plan_agreement, "SILENCE", 0.6)
    monkeypatch.setattr(plan_agreement, "_BEAT_INTERVAL", 0.1)
    channels, plan = Channels(2), sample_plans.plan(2)

    def search() -> Any:
        time.sleep(1.5)
        return plan

    heard: list[Any] = []
    other = threading.Thread(
        target=lambda: heard.append(channels.each[1].wait_for_reply(*asked)), daemon=True
    )
    asked = channels.each[1].next("one")
    other.start()
    assert channels.each[0].publish_plan(*channels.each[0].next("one"), search) == plan
    other.join(20)
    assert heard and heard[0].get_plan().dumps() == plan.dumps()


def test_errors_of_rank_0_are_raised_on_other_ranks() -> None:
    channels = Channels(2)

    def broken() -> Any:
        raise ValueError("of the planner's own")

    heard: list[Any] = []
    other = threading.Thread(
        target=lambda: heard.append(channels.each[1].wait_for_reply(*asked)), daemon=True
    )
    asked = channels.each[1].next("one")
    other.start()
    with pytest.raises(ValueError, match="own"):
        channels.each[0].publish_plan(*channels.each[0].next("one"), broken)
    other.join(20)
    with pytest.raises(FxpartError, match="FXP507[\\s\\S]*ValueError: of the planner's own"):
        heard[0].get_plan()


def test_errors_of_rank_0_wait_for_ranks_that_start_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the exit of rank 0, which owns the store; a restarted job does not read them."""
    monkeypatch.setattr(plan_agreement, "_READ_TIMEOUT", 0.1)
    at_exit: list[Any] = []
    monkeypatch.setattr(plan_agreement.atexit, "register", lambda *call: at_exit.append(call))
    store = loopback_store()
    first = plan_agreement._PlanChannel(store, 0, 2, owned=True)

    def broken() -> Any:
        raise ValueError("of the planner's own")

    with pytest.raises(ValueError, match="own"):
        first.publish_plan(*first.next("one"), broken)
    ((wait, name),) = at_exit
    ending = threading.Thread(target=wait, args=(name,), daemon=True)
    ending.start()
    late = plan_agreement._PlanChannel(store, 1, 2)
    reply = late.wait_for_reply(*late.next("one"))
    assert reply is not None and "of the planner's own" in reply.problems[0][2]
    ending.join(20)
    assert not ending.is_alive()
    assert plan_agreement._PlanChannel(store, 1, 2, restarts=1)._get_reply(name) is None


def test_rank_with_another_request_plans_independently() -> None:
    channels = Channels(2)
    channels.each[0].publish_plan(*channels.each[0].next("one"), lambda: sample_plans.plan(2))
    assert channels.each[1].wait_for_reply(*channels.each[1].next("another")) is None


def test_the_same_request_twice_is_two_plans() -> None:
    """So that a second search, of new measurements, is not the first one's plan."""
    first = Channels(2).each[0]
    number, ask = first.next("one")
    assert (first.next("one")[0], number) == (1, 0) and first.next("one")[1] != ask


@pytest.mark.slow
def test_a_plan_larger_than_a_stores_message() -> None:
    """Names repeat, so that the text becomes small."""
    answer = plan_agreement.PlanReply(plan='{"layer": 1}' * 2_000_000)
    assert (
        len(answer.encode()) < 1 << 20
        and plan_agreement.PlanReply.decode(answer.encode()) == answer
    )


@pytest.mark.parametrize("variables", [{}, {"RANK": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_one_process_plans(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    assert plan_agreement.agree_on_plan("one", lambda: sample_plans.plan(2), 8).world == 2
    assert os.environ.get("RANK") == variables.get("RANK")
