"""Rendezvous of a job's ranks, repeated after every restart.

torchrun keeps one store over all restarts, and keys of an earlier generation of the job are still
in it, such as addresses of dead processes. So each generation has a number that the store counts,
and its own keys. Rank 0 increments the count. The other ranks read the newest number, write their
identity (a random word per process), and continue once rank 0 has listed all words and each has
found its own there. A number whose rank 0 has died is abandoned when there is a newer one. If two
processes have the same rank, because one of an earlier generation has not ended yet, the later one
stays.

    rank 0                        rank r
    g = count + 1                 g = the newest count
    word of 0 ->                  word of r ->
    waits for all words
    list of words ->              finds its own in the list (else: objects)
                                  found ->
    waits for all found,
    no objection
    go ->                         continues
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from fxpart.environment import Launch
from fxpart.launch.job_store import first_line, open_store, rendezvous_error

_COUNT = "fxpart/generation"
_LIST, _FOUND, _OBJECTION, _GO = "list", "found", "objection", "go"
_FIRST, _LONGEST = 0.002, 0.05  # Seconds between polls.


@dataclass(frozen=True)
class JobRendezvous:
    """A completed rendezvous. store: with keys that no other generation uses.

    generation: from 1, unique within a store.
    """

    store: Any
    generation: int


def join_rendezvous(found: Launch, timeout: float, *, after: int = 0) -> JobRendezvous:
    """Wait for all ranks of the job, at most ``timeout`` seconds.

    after: the last generation of an earlier store; rank 0's value counts. Raises FXP516 on every
    rank that times out, with the ranks that rank 0 has not seen.
    """
    limit = time.monotonic() + timeout
    store = open_store(found, timeout)
    waiting = _RendezvousMember(found, store, limit, timeout)
    try:
        number = waiting.lead(after) if found.rank == 0 else waiting.follow()
    except RuntimeError as cause:
        raise rendezvous_error(found, f"the store was lost: {first_line(cause)}") from cause
    return JobRendezvous(PrefixStore(f"fxpart/{number}/group", store), number)


class _RendezvousMember:
    """A rank that waits for the others."""

    def __init__(self, found: Launch, store: Any, limit: float, timeout: float) -> None:
        self._found, self._store, self._limit, self._timeout = found, store, limit, timeout
        # Sorted by time, so that the later of two processes is known.
        self._word = f"{time.time():018.6f}-{secrets.token_hex(16)}".encode()
        self._pause = max(_LONGEST, found.world / 2000)

    def lead(self, after: int) -> int:
        """Return, on rank 0, the number of the generation that all ranks have joined."""
        while True:
            number = self._store.add(_COUNT, 1)
            if number <= after:
                number = self._store.add(_COUNT, after - number + 1)
            if self._lead_generation(number):
                return int(number)

    def _lead_generation(self, number: int) -> bool:
        """Return whether the generation is complete; False: a rank objects."""
        keys, world = self._get_keys(number), self._found.world
        keys.set("0", self._word)
        names = [str(rank) for rank in range(world)]
        self._wait_until(lambda: keys.check(names), number, lambda: _describe_missing(keys, names))
        keys.set(_LIST, b" ".join(keys.multi_get(names)))

        def settled() -> bool:
            return bool(keys.check([_OBJECTION]) or keys.add(_FOUND, 0) == world - 1)

        self._wait_until(settled, number, lambda: "not all ranks confirmed the list of ranks")
        if keys.check([_OBJECTION]):
            return False
        keys.set(_GO, b"1")
        return True

    def follow(self) -> int:
        """Return, on any other rank, the number of the generation that it has joined."""
        left = 0

        def newer() -> bool:
            return self._read_newest() > left

        while True:
            self._wait_until(newer, left, lambda: "rank 0 did not connect")
            number = self._read_newest()
            if self._follow_generation(number):
                return number
            left = number

    def _follow_generation(self, number: int) -> bool:
        """Return whether the generation has started with this process, and is the newest."""
        keys = self._get_keys(number)
        mine = str(self._found.rank)
        if not keys.check([_LIST]) and not (keys.check([mine]) and keys.get(mine) > self._word):
            keys.set(mine, self._word)
        self._wait_until(
            lambda: keys.check([_LIST]) or self._read_newest() > number,
            number,
            lambda: "rank 0 has not seen all ranks",
        )
        if not keys.check([_LIST]):
            return False
        there = keys.get(_LIST).split()[self._found.rank]
        if there != self._word:
            # It is of an earlier process of this rank. If that has died, a newer number follows.
            if not keys.check([_GO]):
                if there > self._word:
                    why = f"another process that started later has rank {mine}"
                    raise rendezvous_error(self._found, why, number)
                keys.set(_OBJECTION, b"1")
            return False
        keys.add(_FOUND, 1)
        self._wait_until(
            lambda: keys.check([_GO]) or self._read_newest() > number,
            number,
            lambda: "rank 0 has not started the generation",
        )
        return bool(keys.check([_GO]))

    def _read_newest(self) -> int:
        return int(self._store.add(_COUNT, 0))

    def _get_keys(self, number: int) -> Any:
        return PrefixStore(f"fxpart/{number}", self._store)

    def _wait_until(self, done: Callable[[], bool], number: int, why: Callable[[], str]) -> None:
        """Poll until done; FXP516 with ``why`` after the limit."""
        pause = _FIRST
        while not done():
            if time.monotonic() >= self._limit:
                raise rendezvous_error(self._found, f"{why()} within {self._timeout:g} s", number)
            if self._found.rank == 0 and number and self._read_newest() != number:
                raise rendezvous_error(self._found, "another process has started as rank 0", number)
            time.sleep(pause)
            pause = min(1.5 * pause, self._pause)


def _describe_missing(keys: Any, names: Sequence[str]) -> str:
    ranks = [name for name in names if not keys.check([name])]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} did not connect"
