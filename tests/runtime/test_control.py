"""Loopback connections: order, strangers, a lost and a silent end, falling back."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fxpart.runtime.transport.control_channel import ControlChannel, connect_control_channel
from fxpart.runtime.transport.interface import PeerLostError, TransferTimeoutError


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


def mesh(
    ranks: int, work: Callable[[int, ControlChannel | None], Any], **options: Any
) -> list[Any]:
    board = Board(ranks, options.pop("disturb", None))
    timeout = options.pop("timeout", 10.0)

    def play(rank: int) -> Any:
        control = connect_control_channel(rank, ranks, board.spread(rank), timeout)
        try:
            return work(rank, control)
        finally:
            if control is not None:
                control.close()

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(play, range(ranks)))


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_rank_gets_every_row_in_order(ranks: int) -> None:
    def work(rank: int, control: ControlChannel | None) -> list[list[list[int]]]:
        assert control is not None
        first = control.end(control.begin([rank, -rank, 2**62 + rank]))
        second = control.end(control.begin([100 + rank]))
        return [first, second]

    expected = [[[r, -r, 2**62 + r] for r in range(ranks)], [[100 + r] for r in range(ranks)]]
    assert mesh(ranks, work) == [expected] * ranks


def test_a_stranger_is_turned_away() -> None:
    """Who does not know the token is closed, and the ranks still find each other."""
    answers = []

    def stranger(offer: bytes) -> None:
        (port,) = struct.unpack("<H", offer[-2:])
        peer = socket.create_connection(("127.0.0.1", port), 10)
        peer.sendall(b"\0" * 32 + struct.pack("<I", 1))
        answers.append(peer)

    rows = mesh(2, lambda r, c: c and c.end(c.begin([r])), disturb=stranger)
    assert rows == [[[0], [1]]] * 2
    answers[0].settimeout(10)
    assert answers[0].recv(32) == b""
    answers[0].close()


def test_a_lost_end_is_noticed() -> None:
    def work(rank: int, control: ControlChannel | None) -> str:
        assert control is not None
        if rank == 1:
            control.close()
            return ""
        with pytest.raises(PeerLostError) as caught:
            control.end(control.begin([0]))
        return str(caught.value)

    assert "rank 1 closed the connection" in mesh(2, work)[0]


def test_a_silent_end_is_noticed_in_time() -> None:
    done = threading.Event()

    def work(rank: int, control: ControlChannel | None) -> float:
        assert control is not None
        if rank == 1:
            assert done.wait(20)
            return 0.0
        with pytest.raises(TransferTimeoutError) as caught:
            control.end(control.begin([0]))
        done.set()
        return caught.value.seconds

    assert mesh(2, work, timeout=0.2)[0] == 0.2


def test_without_a_listener_all_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has no loopback to offer: no rank uses them."""

    def refuse(*args: Any, **options: Any) -> socket.socket:
        raise OSError("no loopback")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert mesh(3, lambda rank, control: control) == [None] * 3
