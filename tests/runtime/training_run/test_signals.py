"""Signals are noted while a run goes, and are whose they were afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from fxpart.launch.launcher import forward_signals_to_ranks
from fxpart.launch.rank_processes import RankProcesses
from fxpart.runtime.training_run import stop_signals
from fxpart.runtime.training_run.stop_signals import KINDS, StopSignals, get_signal_name
from fxpart.runtime.transport.rank_request import RankRequest


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_is_noted(kind: signal.Signals) -> None:
    if kind is signal.SIGHUP and signal.getsignal(kind) is signal.SIG_IGN:
        pytest.skip("nohup ignores it, and so does a run")
    before = [signal.getsignal(each) for each in KINDS]
    asks = RankRequest(alone=True)
    with StopSignals(asks):
        os.kill(os.getpid(), kind)
        assert asks.first == (kind, 0) and get_signal_name(asks.first[0]) == kind.name
        os.kill(os.getpid(), signal.SIGUSR1)
        assert asks.first == (kind, 0), "the first is told"
    assert [signal.getsignal(each) for each in KINDS] == before


def test_a_second_interrupt_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for one that comes with the first: a terminal interrupts the launcher and its ranks."""
    with StopSignals(RankRequest(alone=True)), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(stop_signals, "_SAME_SIGNAL_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SIGTERM", "SIGHUP"])
def test_a_second_signal_ends_at_once(kind: str) -> None:
    """But for one that comes with the first, and SIGUSR1, which is the launcher's."""
    code = (
        "import os, signal, time\n"
        "from fxpart.runtime.training_run.stop_signals import StopSignals\n"
        "from fxpart.runtime.transport.rank_request import RankRequest\n"
        "with StopSignals(RankRequest(alone=True)):\n"
        f"    for kind in ('SIGUSR1', '{kind}', '{kind}', 'SIGUSR1'):\n"
        "        os.kill(os.getpid(), getattr(signal, kind))\n"
        "    time.sleep(1.1)\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    print('alive', flush=True)\n"
        f"    os.kill(os.getpid(), signal.{kind})\n"
        "    print('too late')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("alive\n", -getattr(signal, kind)), done.stderr


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asks = RankRequest(alone=True)
        with StopSignals(asks), forward_signals_to_ranks(RankProcesses()):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and asks.first == (0, 0)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_launcher_kills_at_the_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once for SIGINT; a hangup or SIGTERM that comes twice at once is one."""
    sent: list[int] = []
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    for first, second, pause, kills in (
        ("SIGINT", "SIGINT", 0.0, True), ("SIGHUP", "SIGHUP", 0.0, False),
        ("SIGTERM", "SIGTERM", 0.1, False), ("SIGTERM", "SIGTERM", 2.0, True),
        ("SIGHUP", "SIGTERM", 2.0, True), ("SIGUSR1", "SIGTERM", 2.0, False),
    ):  # fmt: skip
        running = RankProcesses()
        running.send = sent.append  # type: ignore[method-assign]
        running.handle(getattr(signal, first))
        clock[0] += pause
        running.handle(getattr(signal, second))
        assert (sent[-1] == signal.SIGKILL) == kills, (first, second, pause)
        assert running.asked == getattr(signal, first)


def test_another_thread_leaves_signals_alone() -> None:
    before = [signal.getsignal(each) for each in KINDS]

    def enter() -> None:
        with StopSignals(RankRequest(alone=True)):
            assert [signal.getsignal(each) for each in KINDS] == before

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()


def test_what_was_asked_first_is_heard() -> None:
    asks = RankRequest(alone=False)
    asks.mine = 15
    assert asks.first == (0, 0), "until the ranks compare"
    asks.store([0, 0, 10, 15])
    asks.store([2, 0, 0, 0])
    assert asks.first == (10, 2)
    asks.clear()
    assert asks.first == (0, 0) and asks.mine == 0
