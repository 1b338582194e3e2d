"""How the ranks of a job meet, again after every restart, and take no one else for one of them.

torchrun keeps one store over all restarts, and what an earlier life of the job wrote is still in
it: addresses of dead processes. So each life has a number that the store counts, and keys of its
own below it. Rank 0 counts; the others look for its newest number, say who they are (a random word
for each process), and go on once rank 0 has listed all words and everybody has found its own there.
A number whose rank 0 has died is left as soon as there is a newer one. Of two processes that are
the same rank, as one of an earlier life has not been ended yet, the one that came later stays.

    rank 0                        rank r
    g = count + 1                 g = the newest count
    word of 0 ->                  word of r ->
    waits for all words
    list of words ->              finds its own in the list (else: objects)
                                  found ->
    waits for all found,
    nobody objecting
    go ->                         goes
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from fxpart.environment import Launch
from fxpart.errors import FxpartError, error

_COUNT = "fxpart/generation"
_LIST, _FOUND, _OBJECTION, _GO = "list", "found", "objection", "go"
_FIRST, _LONGEST = 0.002, 0.05  # seconds between looks
_PORT_FREE = 5.0  # seconds for an earlier owner of the store's port to end


@dataclass(frozen=True)
class JobRendezvous:
    """All ranks of a job are there. store: with keys that no other generation has.

    generation: from 1, and never twice in one store.
    """

    store: Any
    generation: int


def join_rendezvous(found: Launch, timeout: float, *, after: int = 0) -> JobRendezvous:
    """Wait for all ranks of the job, at most ``timeout`` seconds.

    after: a generation that was there before this store; rank 0's word counts. Raises FXP516 on
    every rank that waits in vain, naming the ranks that rank 0 has not seen.
    """
    limit = time.monotonic() + timeout
    store = open_store(found, timeout)
    waiting = _RendezvousMember(found, store, limit, timeout)
    try:
        number = waiting.lead(after) if found.rank == 0 else waiting.follow()
    except RuntimeError as cause:
        raise _problem(found, f"the store was lost: {_first_line(cause)}") from cause
    return JobRendezvous(PrefixStore(f"fxpart/{number}/group", store), number)


class _RendezvousMember:
    """A rank that waits for the others."""

    def __init__(self, found: Launch, store: Any, limit: float, timeout: float) -> None:
        self._found, self._store, self._limit, self._timeout = found, store, limit, timeout
        # In order of time, so that of two the later can be told.
        self._word = f"{time.time():018.6f}-{secrets.token_hex(16)}".encode()
        self._pause = max(_LONGEST, found.world / 2000)

    def lead(self, after: int) -> int:
        """Rank 0; the number of the generation that all have come to."""
        while True:
            number = self._store.add(_COUNT, 1)
            if number <= after:
                number = self._store.add(_COUNT, after - number + 1)
            if self._led(number):
                return int(number)

    def _led(self, number: int) -> bool:
        """Whether the generation came together; False: somebody objects."""
        keys, world = self._keys(number), self._found.world
        keys.set("0", self._word)
        names = [str(rank) for rank in range(world)]
        self._until(lambda: keys.check(names), number, lambda: _missing(keys, names))
        keys.set(_LIST, b" ".join(keys.multi_get(names)))

        def settled() -> bool:
            return bool(keys.check([_OBJECTION]) or keys.add(_FOUND, 0) == world - 1)

        self._until(settled, number, lambda: "not all ranks came back to the list of ranks")
        if keys.check([_OBJECTION]):
            return False
        keys.set(_GO, b"1")
        return True

    def follow(self) -> int:
        """Any other rank; the number of the generation that it belongs to."""
        left = 0

        def newer() -> bool:
            return self._newest() > left

        while True:
            self._until(newer, left, lambda: "rank 0 did not come")
            number = self._newest()
            if self._followed(number):
                return number
            left = number

    def _followed(self, number: int) -> bool:
        """Whether the generation has begun, with this process; False: there is a newer one."""
        keys = self._keys(number)
        mine = str(self._found.rank)
        if not keys.check([_LIST]) and not (keys.check([mine]) and keys.get(mine) > self._word):
            keys.set(mine, self._word)
        self._until(
            lambda: keys.check([_LIST]) or self._newest() > number,
            number,
            lambda: "rank 0 has not seen all ranks",
        )
        if not keys.check([_LIST]):
            return False
        there = keys.get(_LIST).split()[self._found.rank]
        if there != self._word:
            # Of an earlier life, which may be all there is of it: then a newer number will come.
            if not keys.check([_GO]):
                if there > self._word:
                    why = f"another process, which came later, is rank {mine}"
                    raise _problem(self._found, why, number)
                keys.set(_OBJECTION, b"1")
            return False
        keys.add(_FOUND, 1)
        self._until(
            lambda: keys.check([_GO]) or self._newest() > number,
            number,
            lambda: "rank 0 has not let the ranks go",
        )
        return bool(keys.check([_GO]))

    def _newest(self) -> int:
        return int(self._store.add(_COUNT, 0))

    def _keys(self, number: int) -> Any:
        return PrefixStore(f"fxpart/{number}", self._store)

    def _until(self, done: Callable[[], bool], number: int, why: Callable[[], str]) -> None:
        """Look now and then; FXP516 with ``why`` after the limit."""
        pause = _FIRST
        while not done():
            if time.monotonic() >= self._limit:
                raise _problem(self._found, f"{why()} within {self._timeout:g} s", number)
            if self._found.rank == 0 and number and self._newest() != number:
                raise _problem(self._found, "another process has begun as rank 0", number)
            time.sleep(pause)
            pause = min(1.5 * pause, self._pause)


def open_store(found: Launch, timeout: float) -> Any:
    """A client of the job's store; where no launcher keeps one, rank 0 is its owner, too.

    timeout: seconds to reach it in. Raises FXP516.
    """
    limit = timedelta(seconds=timeout)
    try:
        if found.rank == 0 and not found.keeps_store:
            return _own(found, limit)
        return TCPStore(
            found.address, found.port, is_master=False, timeout=limit, wait_for_workers=False
        )
    except (RuntimeError, OSError, ValueError) as cause:
        raise _problem(
            found, f"the store at {found.address}:{found.port}: {_first_line(cause)}"
        ) from cause


# The stores that this process owns, by address: a port is listened on once, and for as long as
# the process runs, as others may still ask. Made so that torch's own "env://" finds them, too.
_owned: dict[tuple[str, int], TCPStore] = {}


def _own(found: Launch, limit: timedelta) -> Any:
    """The job's store in this process: on one machine by loopback only, if the address is that."""
    at = found.address, found.port
    if at not in _owned:
        _owned[at] = _made(found, limit)
    return _owned[at]


def _made(found: Launch, limit: timedelta) -> TCPStore:
    addresses = {str(info[4][0]) for info in socket.getaddrinfo(found.address, None)}
    if not found.one_machine or not all(a.startswith("127.") or a == "::1" for a in addresses):
        return TCPStore(
            found.address, found.port, is_master=True, timeout=limit, wait_for_workers=False,
            multi_tenant=True,
        )  # fmt: skip
    host = next((a for a in sorted(addresses) if a.startswith("127.")), "::1")
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    until = time.monotonic() + _PORT_FREE
    while True:
        try:
            listener = socket.create_server((host, found.port), family=family, backlog=128)
            break
        except OSError:
            if time.monotonic() >= until:
                raise
            time.sleep(_LONGEST)
    return TCPStore(
        host, found.port, is_master=True, timeout=limit, wait_for_workers=False,
        master_listen_fd=listener.detach(), multi_tenant=True,
    )  # fmt: skip


def _missing(keys: Any, names: Sequence[str]) -> str:
    ranks = [name for name in names if not keys.check([name])]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} did not come"


def _problem(found: Launch, why: str, number: int = 0) -> FxpartError:
    where = f"rank {found.rank} of {found.world}"
    return error(
        "FXP516",
        where=f"{where}, generation {number}" if number else where,
        why=why,
        fix="see that every process was started, and that each machine can reach "
        f"{found.address}:{found.port}",
    )


def _first_line(cause: BaseException) -> str:
    return str(cause).splitlines()[0] if str(cause) else type(cause).__name__
