"""Signals are noted while a run goes, and are whose they were afterwards."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from fxpart.runtime.training_run import stop_signals
from fxpart.runtime.training_run.stop_signals import KINDS, StopSignals, get_signal_name
from fxpart.runtime.transport.rank_request import RankRequest


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_is_noted(kind: signal.Signals) -> None:
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
