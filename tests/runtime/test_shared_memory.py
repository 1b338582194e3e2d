"""Transfers through shared memory: order, floods, lost and silent ends, falling back."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Pool, RankError

from fxpart.runtime.transport import shared_memory_peer
from fxpart.runtime.transport.interface import (
    BACKWARD,
    FORWARD,
    STATE,
    PeerLostError,
    TransferTimeoutError,
)
from fxpart.runtime.transport.process_group_transport import ProcessGroupTransport
from fxpart.runtime.transport.shared_memory import SharedMemory, connect_shared_memory
from fxpart.runtime.transport.shared_memory_peer import AHEAD

CPU = torch.device("cpu")
F32 = torch.float32


class Board:
    """What spreads messages between threads that play ranks."""

    def __init__(self, ranks: int, disturb: Callable[[bytes], None] | None = None) -> None:
        self.barrier = threading.Barrier(ranks, timeout=30)
        self.messages = [b""] * ranks
        self.disturb = disturb

    def spread(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def give(message: bytes) -> list[bytes]:
            self.messages[rank] = message
            self.barrier.wait()
            found = list(self.messages)
            if rank == 0 and len(message) > 1 and self.disturb is not None:
                self.disturb(message)
            self.barrier.wait()
            return found

        return give


def play(
    ranks: int,
    work: Callable[[int, SharedMemory], Any],
    *,
    timeout: float = 10.0,
    disturb: Callable[[bytes], None] | None = None,
) -> list[Any]:
    """Each rank's work in a thread of its own."""
    board = Board(ranks, disturb)

    def one(rank: int) -> Any:
        memory = connect_shared_memory(rank, ranks, board.spread(rank), timeout)
        if memory is None:
            return None
        try:
            return work(rank, memory)
        finally:
            memory.close()

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(one, range(ranks)))


@pytest.mark.slow
@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.sampled_from([FORWARD, BACKWARD, STATE]), st.integers(1, 5000)),
             min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_each_channel_keeps_its_order(plan: list[tuple[int, int]], draw: Any) -> None:
    """Posted before or after it comes, waited for in any order."""
    order = list(range(len(plan)))
    draw.shuffle(order)
    early = draw.randint(0, len(plan))

    def work(rank: int, memory: SharedMemory) -> None:
        other, posted = 1 - rank, []
        for index, (channel, size) in enumerate(plan):
            if index == early:
                for number, (where, count) in enumerate(plan):
                    memory.send(other, where, torch.full((count,), 100.0 * rank + number))
            posted.append(memory.post(other, channel, (size,), F32))
        if early == len(plan):
            for number, (where, count) in enumerate(plan):
                memory.send(other, where, torch.full((count,), 100.0 * rank + number))
        for index in order:
            found = memory.wait(posted[index])
            assert torch.equal(found, torch.full((plan[index][1],), 100.0 * other + index))
            assert memory.wait(posted[index]) is found

    play(2, work)


def test_several_told_of_at_once_keep_their_order() -> None:
    """Though memory for some of them has to be made, and told of, in between."""
    sizes = (3, 300_000, 1, 400_000, 2, 3)
    values = [torch.full((size,), float(place)) for place, size in enumerate(sizes)]

    def work(rank: int, memory: SharedMemory) -> bool:
        if rank == 1:
            posted = [memory.post(0, FORWARD, (size,), F32) for size in (*sizes, 4)]
            found = [memory.wait(handle) for handle in posted]
            return all(map(torch.equal, found, [*values, torch.ones(4)]))
        for handle in [
            *memory.send_all(1, FORWARD, values),
            memory.send(1, FORWARD, torch.ones(4)),
        ]:
            memory.wait(handle)
        return True

    assert play(2, work) == [True, True]


def test_a_send_is_waited_for_while_its_receiver_is_far_behind() -> None:
    behind = threading.Event()

    def work(rank: int, memory: SharedMemory) -> Any:
        if rank == 1:
            assert behind.wait(10)
            return [
                memory.wait(memory.post(0, FORWARD, (1,), F32)).item() for _ in range(AHEAD + 1)
            ]
        sends = [memory.send(1, FORWARD, torch.tensor([float(n)])) for n in range(AHEAD + 1)]
        for handle in sends[:-1]:
            memory.wait(handle)
        assert not sends[-1].done
        behind.set()
        memory.wait(sends[-1])
        return True

    assert play(2, work) == [True, [float(n) for n in range(AHEAD + 1)]]


def test_a_rank_that_does_not_look_holds_up_nobody() -> None:
    """What it has posted receives for is sent, though it is in a collective, say."""
    through, count = threading.Event(), AHEAD + 20

    def work(rank: int, memory: SharedMemory) -> float:
        if rank == 1:
            posted = [memory.post(0, FORWARD, (3,), F32) for _ in range(20)]
            assert through.wait(10)
            posted += [memory.post(0, FORWARD, (3,), F32) for _ in range(AHEAD)]
            return sum(float(memory.wait(handle)[0]) for handle in posted)
        for handle in [memory.send(1, FORWARD, torch.ones(3)) for _ in range(count)]:
            memory.wait(handle)
        through.set()
        return 0.0

    assert play(2, work) == [0.0, float(count)]


def test_a_stranger_is_turned_away() -> None:
    """Who finds the name of a socket, and does not know the token, is closed."""
    answers = []

    def stranger(offer: bytes) -> None:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.connect(b"\0" + offer[32:])
        peer.sendall(b"\0" * 32 + struct.pack("<I", 1))
        answers.append(peer)

    def work(rank: int, memory: SharedMemory) -> float:
        memory.send(1 - rank, FORWARD, torch.full((2,), float(rank)))
        return float(memory.wait(memory.post(1 - rank, FORWARD, (2,), F32))[0])

    assert play(2, work, disturb=stranger) == [1.0, 0.0]
    answers[0].settimeout(10)
    assert answers[0].recv(32) == b""
    answers[0].close()


@pytest.mark.slow
def test_more_messages_than_a_socket_holds() -> None:
    """Both ends send thousands before either receives any."""

    def work(rank: int, memory: SharedMemory) -> int:
        other, count = 1 - rank, 3000
        for number in range(count):
            memory.send(other, FORWARD, torch.tensor([number]))
        return sum(
            int(memory.wait(memory.post(other, FORWARD, (1,), torch.int64))) == number
            for number in range(count)
        )

    assert play(2, work) == [3000, 3000]


def test_a_closed_end_is_noticed() -> None:
    """What it had sent arrives all the same."""

    def work(rank: int, memory: SharedMemory) -> str:
        if rank == 1:
            memory.send(0, FORWARD, torch.ones(2))
            return ""
        posted = [memory.post(1, FORWARD, (2,), F32) for _ in range(2)]
        assert memory.wait(posted[0]).tolist() == [1.0, 1.0]
        with pytest.raises(PeerLostError) as caught:
            memory.wait(posted[1])
        with pytest.raises(PeerLostError):
            for _ in range(10):
                memory.send(1, FORWARD, torch.ones(2))
        return str(caught.value)

    assert "rank 1 closed the connection" in play(2, work)[0]


def test_a_failed_transfer_is_noticed_by_all() -> None:
    """Rank 2 leaves; rank 1 waits for it, and rank 0 for rank 1."""
    done = threading.Event()

    def work(rank: int, memory: SharedMemory) -> float:
        start = time.monotonic()
        if rank < 2:
            with pytest.raises(PeerLostError):
                memory.wait(memory.post(rank + 1, FORWARD, (2,), F32))
            if rank == 0:
                done.set()
            assert done.wait(10)
        return time.monotonic() - start

    assert max(play(3, work)) < 5


def test_a_silent_end_is_noticed_in_time() -> None:
    done = threading.Event()

    def work(rank: int, memory: SharedMemory) -> float:
        if rank == 1:
            assert done.wait(20)
            return 0.0
        with pytest.raises(TransferTimeoutError) as caught:
            memory.wait(memory.post(1, FORWARD, (2,), F32))
        done.set()
        return caught.value.seconds

    assert play(2, work, timeout=0.2)[0] == 0.2


def test_a_receiver_that_never_comes_is_noticed_in_time() -> None:
    done = threading.Event()

    def work(rank: int, memory: SharedMemory) -> None:
        if rank == 1:
            assert done.wait(20)
            return
        with pytest.raises(TransferTimeoutError):
            for handle in [memory.send(1, FORWARD, torch.ones(1)) for _ in range(AHEAD + 1)]:
                memory.wait(handle)
        done.set()

    play(2, work, timeout=0.2)


def test_a_message_of_another_size_is_refused() -> None:
    def work(rank: int, memory: SharedMemory) -> None:
        if rank == 1:
            memory.send(0, FORWARD, torch.ones(3))
        else:
            with pytest.raises(PeerLostError, match="rank 1 sent 12 bytes instead of 8"):
                memory.wait(memory.post(1, FORWARD, (2,), F32))

    play(2, work)


@pytest.mark.parametrize("lack", ["memfd_create", "map", "one"])
def test_without_shared_memory_all_fall_back(monkeypatch: pytest.MonkeyPatch, lack: str) -> None:
    """A system without it, or one rank that cannot map what the others give."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError("none")

    if lack == "memfd_create":
        monkeypatch.delattr(os, "memfd_create")
    elif lack == "map":
        monkeypatch.setattr(mmap, "mmap", refuse)
    else:
        kept, count = shared_memory_peer.map_region, iter(range(100))
        monkeypatch.setattr(
            shared_memory_peer, "map_region", lambda *a: refuse() if next(count) == 2 else kept(*a)
        )
    assert play(3, lambda rank, memory: memory) == [None] * 3


def flood(megabytes: int) -> list[float]:
    """Two ranks send as much to each other at the same time, before either receives."""
    transport = ProcessGroupTransport(timeout=30.0, one_machine=True)
    assert transport.shares_memory
    me, other = dist.get_rank(), 1 - dist.get_rank()
    size = (1 << 20) // 4
    sends = [
        transport.send(me, other, FORWARD, torch.full((size,), float(n))) for n in range(megabytes)
    ]
    found = []
    for _ in range(megabytes):
        posted = transport.post(other, me, FORWARD, (size,), F32, CPU)
        found.append(float(transport.wait(posted).mean()))
    for handle in sends:
        transport.wait(handle)
    transport.close()
    return found


@pytest.mark.slow
def test_two_ranks_send_much_to_each_other_at_once(pool: Pool) -> None:
    assert pool.run(flood, 100, ranks=2) == [[float(n) for n in range(100)]] * 2


def killed() -> float:
    """Rank 1 is killed while its messages are under way; what had come is whole."""
    transport = ProcessGroupTransport(timeout=30.0, one_machine=True)
    me = dist.get_rank()
    if me == 1:
        for _ in range(3):
            transport.send(1, 0, FORWARD, torch.ones(1 << 20))
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    posted = [transport.post(1, 0, FORWARD, (1 << 20,), F32, CPU) for _ in range(4)]
    assert all(bool((transport.wait(handle) == 1).all()) for handle in posted[:3])
    with pytest.raises(PeerLostError):
        transport.wait(posted[3])
    assert time.monotonic() - start < 10
    transport.close()
    return 0.0


@pytest.mark.slow
def test_a_killed_rank_leaves_nothing_behind(pool: Pool) -> None:
    """Its memory has no name, and is gone with the last process that has it."""
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(RankError, match="ended with status -9") as caught:
        pool.run(killed, ranks=2)
    assert "rank 0" not in str(caught.value)
    assert set(os.listdir("/dev/shm")) <= before


def steady(steps: int) -> list[int]:
    """Descriptors and shared bytes after a first and after many further steps."""
    transport = ProcessGroupTransport(timeout=30.0, one_machine=True)
    me, other, found = dist.get_rank(), 1 - dist.get_rank(), []
    for step in range(steps):
        posted = [transport.post(other, me, FORWARD, (500,), F32, CPU) for _ in range(3)]
        sends = [transport.send(me, other, FORWARD, torch.ones(500)) for _ in range(3)]
        received = [transport.wait(handle) for handle in posted]
        for handle in sends:
            transport.wait(handle)
        transport.exchange([step])
        if step in (2, steps - 1):
            memory = transport._memory
            assert memory is not None
            found += [len(os.listdir("/proc/self/fd")), memory.size]
        del received
    transport.close()
    return found


@pytest.mark.slow
def test_many_steps_take_no_more_than_few(pool: Pool) -> None:
    for found in pool.run(steady, 2000, ranks=2):
        assert found[:2] == found[2:]
