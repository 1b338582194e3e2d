"""The watchdog of device transfers names who did not come; it never waits for them itself."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fxpart.collectives.failures import NO_RANK, waiting
from fxpart.errors import FxpartError
from fxpart.runtime import InProcess
from fxpart.runtime.transport import transfer_watchdog
from fxpart.runtime.transport.agreement import convert_transport_errors
from fxpart.runtime.transport.interface import BACKWARD, FORWARD, Route, TransferTimeoutError
from fxpart.runtime.transport.transfer_watchdog import TransferWatchdog


class Work:
    def __init__(self, done: bool = False) -> None:
        self.done = done

    def is_completed(self) -> bool:
        return self.done


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_watchdog, "_PERIOD", 0.002)
    monkeypatch.setattr(transfer_watchdog, "_LONG", 0.01)


def until(done: Any) -> None:
    end = time.monotonic() + 5
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("rank", "route", "text"),
    [
        (1, Route(0, 1, FORWARD), "Rank 0 did not send activations within 0.05 seconds."),
        (1, Route(1, 0, BACKWARD), "Rank 0 did not receive gradients within 0.05 seconds."),
    ],
)
def test_the_oldest_transfer_is_named(rank: int, route: Route, text: str) -> None:
    ended: list[bool] = []
    watchdog = TransferWatchdog(rank, lambda: 0.05, lambda: ended.append(True))
    watchdog.watch(Work(done=True), Route(2, 1, FORWARD))
    watchdog.watch(Work(), route)
    watchdog.watch(Work(), Route(2, 1, FORWARD))
    until(lambda: ended)
    with pytest.raises(TransferTimeoutError, match=text):
        watchdog.check()
    with (
        pytest.raises(FxpartError, match="FXP503") as found,
        convert_transport_errors(InProcess(1), "a step"),
    ):
        watchdog.check()
    assert found.value.problems[0].why == text
    watchdog.close()
    waiting.rank = NO_RANK


def test_the_limit_counts_from_the_transfer_before() -> None:
    """A long step of many transfers is no hang."""
    watchdog = TransferWatchdog(0, lambda: 0.2, lambda: None)
    works = [Work() for _ in range(6)]
    for work in works:
        watchdog.watch(work, Route(1, 0, FORWARD))
    for work in works:
        time.sleep(0.08)
        work.done = True
    until(lambda: not watchdog._watched)
    watchdog.check()
    watchdog.close()


def test_the_monitor_sees_whom_the_device_waits_for() -> None:
    watchdog = TransferWatchdog(0, lambda: 60.0, lambda: None)
    work = Work()
    watchdog.watch(work, Route(3, 0, FORWARD))
    until(lambda: waiting.rank == 3)
    work.done = True
    until(lambda: waiting.rank == NO_RANK)
    waiting.rank = 2  # A wait of the host is not overwritten.
    watchdog.watch(Work(), Route(3, 0, FORWARD))
    time.sleep(0.05)
    assert waiting.rank == 2
    waiting.rank = NO_RANK
    watchdog.close()
    waiting.rank = NO_RANK
