"""How long a rank waits: what the user said, or by the steps."""

from __future__ import annotations

import pytest

from fxpart.runtime.transport import deadline
from fxpart.runtime.transport.deadline import Deadline


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(deadline, "time", made)
    return made


def steps(made: Deadline, clock: Clock, seconds: float, count: int) -> None:
    """So many steps, of two laps each."""
    for _ in range(count):
        made.lap()
        made.lap()
        clock.now += seconds


def test_a_number_of_the_user_stays(clock: Clock) -> None:
    made = Deadline(7.0, predicted=100.0)
    steps(made, clock, 50.0, 10)
    assert (made.seconds, made.silence) == (7.0, 7.0)


@pytest.mark.parametrize("predicted", [0.0, 0.01, float("inf"), float("nan")])
def test_floors_and_the_first_steps(clock: Clock, predicted: float) -> None:
    made = Deadline(None, predicted)
    assert (made.seconds, made.silence) == (300.0, 120.0)
    steps(made, clock, 0.1, 5)
    assert (made.seconds, made.silence) == (300.0, 30.0)


def test_long_steps(clock: Clock) -> None:
    made = Deadline(None, predicted=10.0)
    assert (made.seconds, made.silence) == (1000.0, 300.0)
    steps(made, clock, 20.0, 5)
    assert (made.seconds, made.silence) == (600.0, 600.0)
    steps(made, clock, 20.1, 5)
    assert made.seconds == 600.0  # not for every little change
    steps(made, clock, 1.0, 200)  # and what was long ago counts no more
    assert (made.seconds, made.silence) == (300.0, 30.0)
