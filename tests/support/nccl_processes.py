"""NCCL's ordering rules among processes, over gloo: the runtime's own transport, its own start.

:func:`under_rules` runs a program of another module of tests/support in this rank process, with
the device channels of the transport replaced by ones that carry tensors on the CPU by the rules of
:mod:`nccl_rules`: one queue for each communicator, and a transfer ends when it was received.
"""

from __future__ import annotations

import importlib
import queue
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fxpart.runtime.transport import process_group
from fxpart.runtime.transport.device_channels import DeviceChannels
from fxpart.runtime.transport.interface import Route
from fxpart.runtime.transport.process_group_transport import ProcessGroupTransport

LIMIT = timedelta(seconds=20)
_DATA, _RECEIVED = 41, 42  # tags


class QueuedWork:
    """An operation on a communicator's queue."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.failure: Exception | None = None

    def wait(self) -> None:
        """Block until the operation has run."""
        if not self.ended.wait(LIMIT.total_seconds()):
            raise RuntimeError("timed out behind another transfer of the communicator")
        if self.failure is not None:
            raise RuntimeError(str(self.failure))

    def is_completed(self) -> bool:
        """Whether the operation has run."""
        return self.ended.is_set()


class CommunicatorQueue:
    """The operations of one communicator on this rank, run one after the other."""

    def __init__(self) -> None:
        self._operations: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, operation: Any) -> QueuedWork:
        """Append a call."""
        work = QueuedWork()
        self._operations.put((operation, work))
        return work

    def close(self) -> None:
        """End the thread."""
        self._operations.put(None)
        self._thread.join(LIMIT.total_seconds())

    def _run(self) -> None:
        while (item := self._operations.get()) is not None:
            operation, work = item
            try:
                operation()
            except Exception as cause:  # raised by the wait
                work.failure = cause
            work.ended.set()


class GlooChannels(DeviceChannels):
    """The runtime's channels for tensors on the CPU. mode: of :mod:`nccl_rules`."""

    device_type = "cpu"

    def __init__(self, rank: int, mode: str) -> None:
        super().__init__(rank)
        self._mode, self._queues = mode, dict[Hashable, CommunicatorQueue]()
        self.transfers = 0

    def send(self, route: Route, tensor: torch.Tensor) -> QueuedWork:
        group, peer = self._groups[route], route.target

        def operation() -> None:
            dist.send(tensor, peer, group=group, tag=_DATA)
            dist.recv(torch.empty(1), peer, group=group, tag=_RECEIVED)

        return self._find_queue(route, peer).add(operation)

    def receive(self, route: Route, tensor: torch.Tensor) -> QueuedWork:
        group, peer = self._groups[route], route.source

        def operation() -> None:
            dist.recv(tensor, peer, group=group, tag=_DATA)
            dist.send(torch.ones(1), peer, group=group, tag=_RECEIVED)

        return self._find_queue(route, peer).add(operation)

    def close(self) -> None:
        for each in self._queues.values():
            each.close()
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()

    def _find_queue(self, route: Route, peer: int) -> CommunicatorQueue:
        self.transfers += 1
        group = self._groups[route]
        pair = sorted((self._rank, peer))
        key: Hashable = (id(group),) if self._mode == "group" else (id(group), *pair)
        if key not in self._queues:
            if self._mode == "lazy":
                self._meet(f"{group.group_name}/{pair}", peer)
            self._queues[key] = CommunicatorQueue()
        return self._queues[key]

    def _meet(self, name: str, peer: int) -> None:
        """Block until the peer comes to the same communicator, too."""
        store = dist.distributed_c10d._get_default_store()
        store.set(f"nccl/{name}/{self._rank}", "1")
        store.wait([f"nccl/{name}/{peer}"], LIMIT)

    def _make_group(self, route: Route) -> Any:
        return dist.new_group(sorted((route.source, route.target)))

    def _connect_all(self) -> None:
        """Do nothing: collectives go over gloo."""

    def _synchronize(self) -> None:
        """Do nothing: a wait has blocked the host."""


@contextmanager
def nccl_rules(mode: str) -> Iterator[list[GlooChannels]]:
    """Let new transports of this process transfer by the rules; yields their channels."""
    made: list[GlooChannels] = []

    class Transport(ProcessGroupTransport):
        def __init__(self, **given: Any) -> None:
            super().__init__(**{**given, "shared_memory": False})
            self._channels = GlooChannels(self.local[0], mode)
            made.append(self._channels)

    process_group.ProcessGroupTransport = Transport  # type: ignore[misc]
    try:
        yield made
    finally:
        process_group.ProcessGroupTransport = ProcessGroupTransport  # type: ignore[misc]


def under_rules(mode: str, module: str, function: str, args: tuple[Any, ...]) -> Any:
    """Call a rank program under the rules; it must have made transfers over its channels.

    Queues send tensors over sockets of their own, and so over no channel.
    """
    with nccl_rules(mode) as made:
        found = getattr(importlib.import_module(module), function)(*args)
    used = bool(sum(channels.transfers for channels in made))
    assert used != function.endswith("from_queues"), "transfers over channels"
    return found
