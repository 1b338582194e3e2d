"""Which call each rank is in: what is compared while one waits, and a rank that is only busy."""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fxpart.collectives.failures import NO_RANK, RankWaitState
from fxpart.errors import error
from fxpart.launch.process_status import start_time
from fxpart.runtime.heartbeat.call_tracker import TrainerCallTracker
from fxpart.runtime.heartbeat.message import HeartbeatMessage, encode_message
from fxpart.runtime.heartbeat.monitor import HeartbeatMonitor
from fxpart.runtime.heartbeat.monitored_peer import MonitoredPeer, RankIdentity
from fxpart.runtime.heartbeat.peer_diagnosis import diagnose_diverged_call, diagnose_silent_peer

NOW = 100.0


def peer(rank: int, **more: Any) -> MonitoredPeer:
    return MonitoredPeer(
        rank, RankIdentity(0, 4000 + rank, 1), socket.socket(), **{"last_message": NOW, **more}
    )


def inside(name: str, number: int) -> TrainerCallTracker:
    found = TrainerCallTracker()
    for _ in range(number - 1):
        found.begin("trainer.step")
        found.end()
    found.begin(name)
    return found


def test_the_same_call_or_one_that_is_behind_is_no_reason() -> None:
    mine = inside("trainer.step", 5)
    for beat in (
        HeartbeatMessage(call="trainer.step", number=5),
        HeartbeatMessage(call="trainer.evaluate", number=4),  # it is late
        HeartbeatMessage(call="trainer.evaluate", number=6),
        HeartbeatMessage(number=4),  # outside of all calls
        HeartbeatMessage(number=4, failed=3, code="FXP105", problem="FXP105"),  # and went on since
    ):
        assert diagnose_diverged_call([peer(1, beat=beat)], mine) is None


def test_another_call_of_the_same_number() -> None:
    beat = HeartbeatMessage(call="trainer.evaluate", number=5)
    found = diagnose_diverged_call([peer(1), peer(2, beat=beat)], inside("trainer.step", 5))
    assert found is not None and (found.code, found.rank) == ("FXP501", 2)
    assert "called trainer.evaluate() while this rank called trainer.step()" in found.why


@pytest.mark.parametrize("behind", [0, 1])
def test_a_call_that_raised_on_another_rank_alone(behind: int) -> None:
    theirs = inside("trainer.step", 5)
    theirs.fail(KeyError("lr"))
    theirs.end()
    beat = HeartbeatMessage(
        "", 0.0, NO_RANK, 0.0, "", theirs.number, theirs.failed, theirs.code, theirs.problem
    )
    found = diagnose_diverged_call([peer(1, beat=beat)], inside("trainer.step", 5 + behind))
    assert found is not None and (found.code, found.rank) == ("FXP507", 1)
    assert found.why.endswith("raised KeyError: 'lr' in trainer.step()")


def test_a_call_that_raised_on_this_rank_too_is_no_reason() -> None:
    mine, theirs = inside("trainer.step", 5), inside("trainer.step", 5)
    for each in (mine, theirs):
        each.fail(error("FXP116", where="trainer.step", why="torch.no_grad is active"))
        each.end()
    assert theirs.code == "FXP116" and "torch.no_grad is active" in theirs.problem
    mine.begin("trainer.step")
    beat = HeartbeatMessage(
        "", 0.0, NO_RANK, 0.0, "", theirs.number, theirs.failed, theirs.code, theirs.problem
    )
    assert diagnose_diverged_call([peer(1, beat=beat)], mine) is None  # it is in code of its own


def test_a_silent_rank_whose_process_runs_has_the_longer_limit() -> None:
    peers = [peer(1, last_message=NOW - 60, alive=NOW - 1)]
    assert diagnose_silent_peer(peers, NOW, 30.0, 300.0) is None
    assert diagnose_silent_peer(peers, NOW, 30.0, 50.0) is not None
    assert diagnose_silent_peer(peers, NOW, 30.0) is not None
    peers = [peer(1, last_message=NOW - 60, alive=NOW - 31)]  # stopped since
    found = diagnose_silent_peer(peers, NOW, 30.0, 300.0)
    assert found is not None and found.code == "FXP515"


@contextmanager
def watching(
    host: int,
) -> Iterator[tuple[HeartbeatMonitor, socket.socket, subprocess.Popen[bytes]]]:
    """Rank 0's watch, which waits for a process that says nothing; its end of the connection."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ours, theirs = socket.socketpair()
    now = time.monotonic()
    them = MonitoredPeer(1, RankIdentity(host, process.pid, start_time(process.pid)), ours, now)
    waiting = RankWaitState()
    waiting.rank, waiting.since = 1, now
    watch = HeartbeatMonitor(
        0, {1: them}, RankIdentity.here(0), waiting, silence=lambda: 1.5, busy=lambda: math.inf,
        calls=TrainerCallTracker(),
    )  # fmt: skip
    watch._reported = True  # nobody ends this process
    try:
        yield watch, theirs, process
    finally:
        watch.close()
        theirs.close()
        process.kill()
        process.wait()


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def found_within(watch: HeartbeatMonitor, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while watch.found is None and time.monotonic() < limit:
        time.sleep(0.05)
    return watch.found is not None


@linux
def test_a_busy_process_is_waited_for_and_a_stopped_one_is_killed() -> None:
    with watching(0) as (watch, _, process):
        assert not found_within(watch, 3.5)
        process.send_signal(signal.SIGSTOP)
        assert found_within(watch, 4.0)
        assert watch.found is not None and watch.found.code == "FXP515"
        assert process.wait(5) == -signal.SIGKILL


@linux
def test_a_process_of_another_machine_needs_somebody_who_sees_it() -> None:
    with watching(7) as (watch, _, _):
        assert found_within(watch, 4.0)


@pytest.mark.slow
@linux
def test_a_rank_of_the_same_machine_answers_for_a_busy_one() -> None:
    with watching(7) as (watch, theirs, _):
        until = time.monotonic() + 4.0
        ours, other = socket.socketpair()
        ours.setblocking(False)
        watch._peers[2] = MonitoredPeer(2, RankIdentity(7, 1, 1), ours, time.monotonic())
        watch._poll.register(ours)
        while time.monotonic() < until:
            other.sendall(encode_message(HeartbeatMessage(alive=(1,))))
            time.sleep(0.3)
        assert watch.found is None
        other.close()
        assert theirs.fileno() >= 0
