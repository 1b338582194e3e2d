"""Where the ranks of one machine meet: a store on the loopback interface, and nowhere else.

torch's own store listens on every interface even where all ranks are on one machine.
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
    """A store that listens on 127.0.0.1 at a free port: it is given a socket that does."""
    listener = socket.create_server((_HOST, 0), backlog=128)
    port = listener.getsockname()[1]
    return TCPStore(
        _HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class LoopbackRendezvous(RendezvousHandler):
    """One agent that meets nobody: it is the whole job, again and again.

    The agent asks :meth:`next_rendezvous` before it starts the ranks, first or again, and
    :meth:`num_nodes_waiting` ten times a second while they run, both in its own thread.
    """

    def __init__(
        self, name: str, begin: Callable[[int], object], tick: Callable[[], object]
    ) -> None:
        """begin: is told how often ranks were started before; may raise. tick: while they run."""
        self._name = name
        self._begin = begin
        self._tick = tick
        self._starts = 0
        self._store = loopback_store()

    def get_backend(self) -> str:
        """The name of this kind."""
        return "fxpart-loopback"

    @property
    def use_agent_store(self) -> bool:
        """Ranks are clients of this store, so that it outlives every one of them."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The store with keys of this start's own, for the agent; ranks number their own."""
        self._begin(self._starts)
        self._starts += 1
        keys = PrefixStore(f"agent-{self._starts}", self._store)
        return RendezvousInfo(keys, 0, 1, RendezvousStoreInfo(_HOST, self._store.port))

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nothing: nobody else is there."""

    def num_nodes_waiting(self) -> int:
        """None."""
        self._tick()
        return 0

    def get_run_id(self) -> str:
        """The job's name."""
        return self._name

    def shutdown(self) -> bool:
        """Nothing: the store goes with this object."""
        return True
