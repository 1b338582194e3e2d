"""Ranks meet whoever else connects, and only processes of the same user are admitted."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fxpart.runtime.transport import handshake
from fxpart.runtime.transport.handshake import (
    AbstractUnixSockets,
    LoopbackSockets,
    accept_ranks,
    connect_to_rank,
    is_same_user,
    open_listener,
)

KINDS = [LoopbackSockets(), AbstractUnixSockets()]
IDS = ["tcp", "unix"]


def meet(
    kind: Any, disturb: Any, ranks: tuple[int, ...] = (1, 2), seconds: float = 10.0
) -> tuple[dict[int, socket.socket], float]:
    """Accept ranks after a disturbance; return the connections and the seconds that it took."""
    listener, token, offer = open_listener(kind, 8)
    limit = time.monotonic() + seconds
    strangers = disturb(kind, offer)
    made: list[socket.socket] = []

    def call(rank: int) -> None:
        made.append(connect_to_rank(kind, rank, offer, limit))

    callers = [threading.Thread(target=call, args=(rank,)) for rank in ranks]
    began = time.monotonic()
    for caller in callers:
        caller.start()
    peers: dict[int, socket.socket] = {}
    try:
        accept_ranks(listener, ranks, token, peers, limit)
    finally:
        took = time.monotonic() - began
        for caller in callers:
            caller.join()
        for each in (*strangers, *made, listener):
            each.close()
    return peers, took


def send_nothing(kind: Any, offer: bytes) -> list[socket.socket]:
    return [kind.call(offer[32:], 5.0) for _ in range(6)]


def send_a_part(kind: Any, offer: bytes) -> list[socket.socket]:
    made = send_nothing(kind, offer)
    for each in made:
        each.sendall(b"\0" * 20)
    return made


def send_a_wrong_proof(kind: Any, offer: bytes) -> list[socket.socket]:
    made = send_nothing(kind, offer)
    for each in made:
        each.sendall(b"\1" * 36)
    return made


def hang_up(kind: Any, offer: bytes) -> list[socket.socket]:
    for each in send_nothing(kind, offer):
        each.close()
    return []


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
@pytest.mark.parametrize("disturb", [send_nothing, send_a_part, send_a_wrong_proof, hang_up])
def test_strangers_do_not_delay_a_meeting(kind: Any, disturb: Any) -> None:
    peers, took = meet(kind, disturb)
    assert sorted(peers) == [1, 2] and took < 5.0
    for peer in peers.values():
        peer.close()


def test_many_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest that have said nothing are given up."""
    monkeypatch.setattr(handshake, "_MOST_CALLERS", 4)
    peers, took = meet(LoopbackSockets(), send_nothing)
    assert sorted(peers) == [1, 2] and took < 5.0
    for peer in peers.values():
        peer.close()


def test_a_rank_that_does_not_come() -> None:
    listener, token, offer = open_listener(LoopbackSockets(), 8)
    strangers = send_a_part(LoopbackSockets(), offer)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        accept_ranks(listener, [1], token, {}, began + 0.3)
    assert time.monotonic() - began < 3.0
    for each in (*strangers, listener):
        each.close()


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_the_user_of_a_connection(kind: Any) -> None:
    listener, address = kind.listen(1)
    caller = kind.call(address, 5.0)
    peer, _ = listener.accept()
    assert is_same_user(peer)
    if isinstance(kind, LoopbackSockets):
        found = handshake._find_loopback_user(peer.getpeername(), peer.getsockname())
        assert found == os.getuid()
        assert handshake._find_loopback_user(("127.0.0.1", 1), peer.getsockname()) is None
    for each in (caller, peer, listener):
        each.close()


CALL = """
import os, sys, time
sys.path.insert(0, {root!r})
from fxpart.runtime.transport.handshake import (
    AbstractUnixSockets, LoopbackSockets, connect_to_rank
)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
kind = dict(tcp=LoopbackSockets, unix=AbstractUnixSockets)[sys.argv[1]]()
try:
    connect_to_rank(kind, 1, bytes.fromhex(sys.argv[2]), time.monotonic() + 5)
except OSError as cause:
    print("rejected", type(cause).__name__)
else:
    print("admitted")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only the superuser can be somebody else")
@pytest.mark.parametrize("name", IDS)
def test_another_user_who_knows_the_token(name: str) -> None:
    kind = KINDS[IDS.index(name)]
    listener, token, offer = open_listener(kind, 8)
    root = str(Path(__file__).resolve().parents[2])
    code = CALL.format(root=root).replace("os.setgroups", "import encodings.idna; os.setgroups", 1)
    child = subprocess.Popen(
        [sys.executable, "-c", code, name, offer.hex()], stdout=subprocess.PIPE, text=True
    )
    peers: dict[int, socket.socket] = {}
    failures: list[BaseException] = []

    def accept() -> None:
        try:
            accept_ranks(listener, [1], token, peers, time.monotonic() + 60)
        except OSError as cause:
            failures.append(cause)

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    out, _ = child.communicate(timeout=60)
    assert out.startswith("rejected") and not peers
    own = connect_to_rank(kind, 1, offer, time.monotonic() + 10)
    acceptor.join()
    assert sorted(peers) == [1] and not failures
    for each in (own, *peers.values(), listener):
        each.close()
