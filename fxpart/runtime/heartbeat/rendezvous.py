"""How the watches of all ranks find each other, before anything else connects them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from fxpart.collectives.failures import waiting
from fxpart.environment import Launch
from fxpart.errors import error
from fxpart.runtime.heartbeat.monitor import HeartbeatMonitor
from fxpart.runtime.heartbeat.monitored_peer import MonitoredPeer, RankIdentity
from fxpart.runtime.heartbeat.process_monitor import install_monitor
from fxpart.runtime.transport.handshake import (
    LoopbackSockets,
    NetworkSockets,
    SocketKind,
    Spread,
    connect_all_pairs,
)

_ALL = 64  # ranks up to which each watches all others


def connect_monitor(
    found: Launch,
    spread: Spread,
    *,
    silence: Callable[[], float],
    busy: Callable[[], float] | None = None,
    kind: SocketKind | None = None,
) -> HeartbeatMonitor | None:
    """The watch of this process, connected to those of the other ranks; None where it cannot be.

    spread: gives a message to all and returns everybody's, see
    :func:`fxpart.runtime.transport.handshake.connect_all_pairs`. Called by all ranks at the same
    time. Of more than 64 ranks each watches a few, and what one finds out goes round.
    """
    if found.world < 2:
        return None
    me = RankIdentity.here(found.host)
    people = [
        msgspec.json.decode(text, type=RankIdentity) for text in spread(msgspec.json.encode(me))
    ]
    way = kind or (LoopbackSockets() if found.one_machine else NetworkSockets(own_address(found)))
    others = partners(found.rank, found.world)
    connections = connect_all_pairs(found.rank, found.world, spread, way, others)
    if connections is None:
        return None
    now = time.monotonic()
    peers = {
        rank: MonitoredPeer(rank, people[rank], made, now) for rank, made in connections.items()
    }
    made = HeartbeatMonitor(found.rank, peers, me, waiting, silence=silence, busy=busy)
    install_monitor(made)
    return made


def partners(rank: int, ranks: int) -> tuple[int, ...]:
    """The ranks that a rank watches: all, or those at distances of powers of two both ways."""
    if ranks <= _ALL:
        return tuple(other for other in range(ranks) if other != rank)
    far = [1 << power for power in range((ranks - 1).bit_length())]
    found = {(rank + way * distance) % ranks for distance in far for way in (1, -1)}
    return tuple(sorted(found - {rank}))


def own_address(found: Launch) -> str:
    """The address of this machine from which it reaches the job's store."""
    family, kind, _, _, target = socket.getaddrinfo(
        found.address, found.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as asking:
        asking.connect(target)  # sends nothing
        return str(asking.getsockname()[0])


def exchange_through_store(store: Any, rank: int, ranks: int, timeout: float) -> Spread:
    """Spreads messages through a store that all ranks share; for a few small ones."""
    turn = 0

    def spread(message: bytes) -> list[bytes]:
        nonlocal turn
        turn += 1
        names = [f"spread/{turn}/{other}" for other in range(ranks)]
        store.set(names[rank], message or b"\0")
        try:
            store.wait(names, timedelta(seconds=timeout))
            found: Sequence[bytes] = store.multi_get(names)
        except RuntimeError as cause:
            raise error(
                "FXP516",
                where=f"rank {rank} of {ranks}",
                why=f"not all ranks went on within {timeout:g} s",
                fix="look at the other ranks' messages: one of them ended",
            ) from cause
        return [b"" if text == b"\0" else text for text in found]

    return spread
