"""Connection of the monitors of all ranks, before any other connection exists."""

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

_ALL = 64  # up to this many ranks, each monitors all others


def connect_monitor(
    found: Launch,
    spread: Spread,
    *,
    silence: Callable[[], float],
    busy: Callable[[], float] | None = None,
    kind: SocketKind | None = None,
) -> HeartbeatMonitor | None:
    """Start the monitor of this process, connected to the other ranks; None if it cannot connect.

    spread: all-gathers a message, see :func:`fxpart.runtime.transport.handshake.connect_all_pairs`.
    Called by all ranks at the same time. With more than 64 ranks each monitors a few, and diagnoses
    are forwarded.
    """
    if found.world < 2:
        return None
    me = RankIdentity.here(found.host)
    identities = [
        msgspec.json.decode(text, type=RankIdentity) for text in spread(msgspec.json.encode(me))
    ]
    direction = kind or (
        LoopbackSockets() if found.one_machine else NetworkSockets(own_address(found))
    )
    others = partners(found.rank, found.world)
    connections = connect_all_pairs(found.rank, found.world, spread, direction, others)
    if connections is None:
        return None
    now = time.monotonic()
    peers = {
        rank: MonitoredPeer(rank, identities[rank], made, now) for rank, made in connections.items()
    }
    made = HeartbeatMonitor(found.rank, peers, me, waiting, silence=silence, busy=busy)
    install_monitor(made)
    return made


def partners(rank: int, ranks: int) -> tuple[int, ...]:
    """Return the ranks that a rank monitors: all, or those at distances of powers of two."""
    if ranks <= _ALL:
        return tuple(other for other in range(ranks) if other != rank)
    distances = [1 << power for power in range((ranks - 1).bit_length())]
    found = {
        (rank + direction * distance) % ranks for distance in distances for direction in (1, -1)
    }
    return tuple(sorted(found - {rank}))


def own_address(found: Launch) -> str:
    """Return the address of this host that reaches the job's store."""
    family, kind, _, _, target = socket.getaddrinfo(
        found.address, found.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


def exchange_through_store(store: Any, rank: int, ranks: int, timeout: float) -> Spread:
    """Return a function that all-gathers small messages through a store shared by all ranks."""
    exchange = 0

    def spread(message: bytes) -> list[bytes]:
        nonlocal exchange
        exchange += 1
        names = [f"spread/{exchange}/{other}" for other in range(ranks)]
        store.set(names[rank], message or b"\0")
        try:
            store.wait(names, timedelta(seconds=timeout))
            found: Sequence[bytes] = store.multi_get(names)
        except RuntimeError as cause:
            raise error(
                "FXP516",
                where=f"rank {rank} of {ranks}",
                why=f"not all ranks responded within {timeout:g} s",
                fix="see the messages of the other ranks; one of them has ended",
            ) from cause
        return [b"" if text == b"\0" else text for text in found]

    return spread
