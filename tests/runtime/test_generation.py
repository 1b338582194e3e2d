"""Ranks meet again after every restart, and never one of an earlier life."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fxpart.environment import Launch
from fxpart.errors import FxpartError
from fxpart.launch.rendezvous import loopback_store
from fxpart.runtime.transport.rendezvous import JobRendezvous, join_rendezvous


@pytest.fixture
def port() -> Iterator[int]:
    """Where a launcher's store listens."""
    store = loopback_store()
    yield store.port


def process(rank: int, world: int, port: int) -> Launch:
    return Launch(rank, world, rank, world, "127.0.0.1", port, keeps_store=True, supervised=True)


class Process(threading.Thread):
    """A process that comes to the meeting; result: what it found, or the error."""

    def __init__(self, found: Launch, timeout: float, after: int = 0) -> None:
        super().__init__(daemon=True)
        self.result: JobRendezvous | FxpartError | None = None
        self._given = found, timeout, after
        self.start()

    def run(self) -> None:
        found, timeout, after = self._given
        try:
            self.result = join_rendezvous(found, timeout, after=after)
        except FxpartError as fault:
            self.result = fault


def life(world: int, port: int, seed: int, timeout: float = 20.0, **more: Any) -> set[int]:
    """All ranks come in some order; the generations that they found."""
    draw, made = random.Random(seed), []
    for rank in draw.sample(range(world), world):
        made.append(Process(process(rank, world, port), timeout, **more))
        time.sleep(draw.choice((0, 0, 0.02)))
    for each in made:
        each.join(timeout)
    assert all(isinstance(each.result, JobRendezvous) for each in made), [
        each.result for each in made
    ]
    return {each.result.generation for each in made if isinstance(each.result, JobRendezvous)}


@pytest.mark.slow
def test_every_life_has_a_number_of_its_own(port: int) -> None:
    found = [life(4, port, seed) for seed in range(6)]
    assert found == [{1}, {2}, {3}, {4}, {5}, {6}]


def test_numbers_go_on_from_an_earlier_store(port: int) -> None:
    assert life(2, port, 0, after=7) == {8}
    assert life(2, port, 0, after=7) == {9}


@pytest.mark.slow
def test_an_earlier_life_that_never_met(port: int) -> None:
    """Of four ranks two came, and died; their words are in the store."""
    dead = [Process(process(rank, 4, port), 0.3) for rank in (0, 2)]
    for each in dead:
        each.join(10)
        assert isinstance(each.result, FxpartError) and each.result.code == "FXP516"
    assert "ranks 1, 3 did not connect within 0.3 s" in str(dead[0].result)
    assert life(4, port, 1) == {2}


@pytest.mark.slow
def test_others_come_before_rank_0_has_counted(port: int) -> None:
    """They find the earlier life's number, wait in it, and leave it for the new one."""
    life(3, port, 0)
    early = [Process(process(rank, 3, port), 20) for rank in (1, 2)]
    time.sleep(0.3)
    assert all(each.is_alive() for each in early)
    first = Process(process(0, 3, port), 20)
    for each in (*early, first):
        each.join(20)
        assert isinstance(each.result, JobRendezvous) and each.result.generation == 2


@pytest.mark.slow
def test_one_of_an_earlier_life_is_sent_away(port: int) -> None:
    """Rank 1 waits twice, as if its machine's launcher had not yet ended the first."""
    stale = Process(process(1, 3, port), 1.5)
    time.sleep(0.1)
    first = Process(process(0, 3, port), 20)
    time.sleep(0.3)
    fresh = Process(process(1, 3, port), 20)
    time.sleep(0.2)
    last = Process(process(2, 3, port), 20)
    for each in (stale, first, fresh, last):
        each.join(20)
    assert isinstance(stale.result, FxpartError), stale.result
    assert len({each.result.generation for each in (first, fresh, last)}) == 1  # type: ignore[union-attr]


def test_rank_0_may_own_the_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = [replace(process(rank, 3, port), keeps_store=False) for rank in range(3)]
    found = [Process(each, 20) for each in given]
    for each in found:
        each.join(20)
        assert isinstance(each.result, JobRendezvous), each.result
    stores = [each.result.store for each in found if isinstance(each.result, JobRendezvous)]
    stores[2].set("word", b"yes")
    assert stores[1].get("word") == b"yes"


@pytest.mark.slow
def test_no_store_is_said_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(FxpartError, match=f"FXP516[\\s\\S]*127.0.0.1:{port}"):
        join_rendezvous(process(1, 2, port), 1.0)
    assert time.monotonic() - began < 6
