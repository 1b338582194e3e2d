"""What rank processes run to see whether a slow one is noticed.

Their clocks are made: they go on while a stage computes, by as much as the test says, and not while
other processes have the machine's cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from hand_stages import batch, language
from stream_programs import make

from fxpart.runtime import connect
from fxpart.runtime.callbacks import Callback, Event
from fxpart.runtime.monitor.straggler_detector import Straggler

CUTS = {2: (2, 2), 3: (1, 1, 2), 4: (1, 1, 1, 1)}
FORWARD = 2_000_000  # nanoseconds of each


class Clock:
    """Nanoseconds; every look at it takes one of them."""

    def __init__(self) -> None:
        self.now = 10**9

    def __call__(self) -> int:
        self.now += 1
        return self.now


@contextmanager
def _trainer(ranks: int, weights: str, lasts: Callable[[Any], float]) -> Iterator[Any]:
    """A trainer whose forwards take ``lasts(trainer)`` times their time, by its own clock."""
    options: dict[str, Any] = {"weights": weights} if weights else {}
    trainer = make(language(CUTS[ranks]), connect(ranks), microbatches=4, **options)
    clock = trainer.events._clock = Clock()

    def lasting(forward: Callable[..., Any]) -> Callable[..., Any]:
        def computes(*given: Any) -> Any:
            clock.now += int(FORWARD * lasts(trainer))
            return forward(*given)

        return computes

    for module in trainer.parts.mesh_ranks[0].modules.values():
        module.forward = lasting(module.forward)
    with patch("fxpart.runtime.executor.executor.monotonic_ns", clock):
        yield trainer
        trainer.close()


def paces(
    ranks: int, steps: int, slow: int, since: int, weights: str, pause: float = 0.0
) -> tuple[list[tuple[Any, ...]], list[str], dict[int, float]]:
    """What this rank is told of slow ones, in numbers and words; and the seconds of all.

    slow: the rank whose forwards take three times as long from the step ``since`` on; -1: none.
    pause: forwards' times for which each rank, now and then, does nothing.
    """
    told: list[Straggler] = []
    calls = [0]

    def lasts(trainer: Any) -> float:
        calls[0] += 1
        paused = pause if calls[0] % 29 == 7 * trainer.rank else 0.0
        return (3 if trainer.calls >= since and trainer.rank == slow else 1) + paused

    with _trainer(ranks, weights, lasts) as trainer:
        trainer.pace.listeners[:] = [told.append]
        for number in range(steps):
            trainer.step(batch(8, 5, number))
        found = trainer.pace.seconds()
    numbers = [(s.rank, s.stage, s.over, s.step, s.seconds, s.before, s.times) for s in told]
    return numbers, [str(each) for each in told], found


def fitted(steps: int, slow: int, since: int, weights: str) -> list[tuple[str, int]]:
    """What a callback is told of a slow rank in a run: in words, after which update."""
    told: list[tuple[str, int]] = []

    class Slowness(Callback):
        def on_event(self, event: Event) -> None:
            if event.kind == "slow":
                told.append((event.why, event.step))

    def lasts(trainer: Any) -> float:
        return 3 if trainer.calls >= since and trainer.rank == slow else 1

    with _trainer(2, weights, lasts) as trainer:
        batches = [batch(8, 5, number) for number in range(steps)]
        trainer.fit(batches, callbacks=[Slowness()])
        assert len(trainer.pace.listeners) == int(trainer.rank == 0), "a run takes its own away"
    return told
