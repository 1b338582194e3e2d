"""Rendezvous of the ranks of one host: a store on the loopback interface only.

torch's own store listens on every interface even if all ranks are on one host.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

_HOST = "127.0.0.1"


def loopback_store() -> TCPStore:
    """Return a store that listens on a free port of 127.0.0.1, through a socket passed to it."""
    listener = socket.create_server((_HOST, 0), backlog=128)
    port = listener.getsockname()[1]
    return TCPStore(
        _HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class LoopbackRendezvous(RendezvousHandler):
    """Rendezvous of a single agent, for every restart.

    The agent calls :meth:`next_rendezvous` before it starts or restarts the ranks, and
    :meth:`num_nodes_waiting` ten times per second while they run, both in its own thread.
    """

    def __init__(
        self, name: str, begin: Callable[[int], object], tick: Callable[[], object]
    ) -> None:
        """Create it. begin: receives the number of earlier starts; may raise. tick: while they
        run.
        """
        self._name = name
        self._begin = begin
        self._tick = tick
        self._starts = 0
        self._store = loopback_store()

    def get_backend(self) -> str:
        """Return the name of this rendezvous backend."""
        return "fxpart-loopback"

    @property
    def use_agent_store(self) -> bool:
        """Return True: ranks are clients of this store, which survives all of them."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store with keys of this start for the agent; ranks number their own."""
        self._begin(self._starts)
        self._starts += 1
        keys = PrefixStore(f"agent-{self._starts}", self._store)
        return RendezvousInfo(keys, 0, 1, RendezvousStoreInfo(_HOST, self._store.port))

    def is_closed(self) -> bool:
        """Return False: it is never closed."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there are no other agents."""

    def num_nodes_waiting(self) -> int:
        """Return 0, after calling ``tick``."""
        self._tick()
        return 0

    def get_run_id(self) -> str:
        """Return the job's name."""
        return self._name

    def shutdown(self) -> bool:
        """Return True: the store is closed with this object."""
        return True
