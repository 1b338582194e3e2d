"""NCCL's ordering rules among threads: each rank is a thread, and a deadlock is an error at once.

Operations of a communicator run in the order of the calls, one after the other; a transfer needs
its send and its receive at the heads of their queues. Which communicator an operation uses depends
on the mode:

- "lazy": each pair of ranks has one in each group, for both directions. It is created at the first
  call, which blocks the rank until the peer comes to a call of the same communicator.
- "prepared": the same, created without a wait.
- "group": each group has one, whatever the peer (torch's process groups with ``device_id``).

Every wait blocks the host, which is stricter than NCCL. If all ranks wait and nothing can move,
every rank raises :class:`DeadlockError`: no time limit decides, so the result is always the same.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from fxpart.runtime.transport.device_channels import DeviceChannels
from fxpart.runtime.transport.interface import Route

MODES = ("lazy", "prepared", "group")
T = TypeVar("T")


class DeadlockError(AssertionError):
    """All ranks wait for each other."""


@dataclass(eq=False)
class EmulatedWork:
    """One end of a transfer."""

    world: EmulatedWorld
    rank: int
    peer: int
    tensor: torch.Tensor
    is_send: bool
    done: bool = False

    def wait(self) -> None:
        """Block the rank until the transfer has run."""
        what = f"the {'send to' if self.is_send else 'receive from'} rank {self.peer}"
        self.world.block(self.rank, lambda: self.done, what)

    def is_completed(self) -> bool:
        """Whether the transfer has run."""
        return self.done


class EmulatedWorld:
    """What the ranks of a run share."""

    def __init__(self, ranks: int, mode: str) -> None:
        assert mode in MODES
        self.ranks, self.mode = ranks, mode
        self._condition = threading.Condition()
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._alive = set(range(ranks))
        self._deadlock = ""
        self._calling: dict[int, Hashable] = {}  # Communicators whose creation a rank waits for.
        self._created: set[Hashable] = set()
        self._queues: defaultdict[tuple[int, Hashable], deque[EmulatedWork]] = defaultdict(deque)
        self._rounds: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self._round = [0] * ranks
        self.transfers = 0

    def issue(self, group: Hashable, work: EmulatedWork) -> EmulatedWork:
        """Put an operation on the queue of its communicator."""
        pair = sorted((work.rank, work.peer))
        key: Hashable = (group,) if self.mode == "group" else (group, *pair)
        with self._condition:
            if self.mode == "lazy" and key not in self._created:
                self._create(key, work)
            self._queues[work.rank, key].append(work)
            self._run(work.rank, key)
            self._condition.notify_all()
        return work

    def _create(self, key: Hashable, work: EmulatedWork) -> None:
        if self._calling.get(work.peer) == key:
            self._created.add(key)
            self._condition.notify_all()
            return
        self._calling[work.rank] = key
        self.block(work.rank, lambda: key in self._created, f"communicator {key}")
        self._calling.pop(work.rank, None)

    def _run(self, rank: int, key: Hashable) -> None:
        """Run the transfers that are at the heads of both queues."""
        queue = self._queues[rank, key]
        while queue:
            head = queue[0]
            other = self._queues[head.peer, key]
            if not other or other[0].peer != rank or other[0].is_send == head.is_send:
                return
            queue.popleft()
            peer = other.popleft()
            send, receive = (head, peer) if head.is_send else (peer, head)
            assert send.tensor.shape == receive.tensor.shape, "another tensor is expected"
            assert send.tensor.dtype == receive.tensor.dtype, "another tensor is expected"
            receive.tensor.copy_(send.tensor)
            head.done = peer.done = True
            self.transfers += 1
            self._run(head.peer, key)

    def block(self, rank: int, done: Callable[[], bool], what: str) -> None:
        """Wait until ``done``; raise if no rank can move."""
        with self._condition:
            self._waiting[rank] = (done, what)
            self._check()
            self._condition.wait_for(lambda: done() or bool(self._deadlock))
            del self._waiting[rank]
            if not done():
                raise DeadlockError(self._deadlock)

    def _check(self) -> None:
        if self._alive and self._alive <= set(self._waiting):
            stuck = {r: what for r, (done, what) in self._waiting.items() if not done()}
            if len(stuck) == len(self._waiting):
                lines = [f"rank {rank} waits for {what}" for rank, what in sorted(stuck.items())]
                self._deadlock = "; ".join(lines)
                self._condition.notify_all()

    def leave(self, rank: int) -> None:
        """A rank has ended."""
        with self._condition:
            self._alive.discard(rank)
            self._check()

    def exchange(self, rank: int, value: T) -> list[T]:
        """All-gather a value on the host."""
        with self._condition:
            number = self._round[rank]
            self._round[rank] += 1
            found = self._rounds[number]
            found[rank] = value
            self._condition.notify_all()
        self.block(rank, lambda: len(found) == self.ranks, f"exchange {number}")
        return [found[r] for r in range(self.ranks)]


class EmulatedChannels(DeviceChannels):
    """The runtime's channels for tensors on the CPU, over an emulated world."""

    device_type = "cpu"

    def __init__(self, rank: int, world: EmulatedWorld) -> None:
        super().__init__(rank)
        self._world = world

    def send(self, route: Route, tensor: torch.Tensor) -> EmulatedWork:
        work = EmulatedWork(self._world, self._rank, route.target, tensor, is_send=True)
        return self._world.issue(self._groups[route], work)

    def receive(self, route: Route, tensor: torch.Tensor) -> EmulatedWork:
        work = EmulatedWork(self._world, self._rank, route.source, tensor, is_send=False)
        return self._world.issue(self._groups[route], work)

    def close(self) -> None:
        self._groups.clear()

    def _make_group(self, route: Route) -> Hashable:
        return route

    def _connect_all(self) -> None:
        """Do nothing: collectives are not emulated."""

    def _synchronize(self) -> None:
        """Do nothing: a wait has blocked the host."""


class SharedChannels(EmulatedChannels):
    """One group for each direction, whatever the ranks: the wrong assignment."""

    def _make_group(self, route: Route) -> Hashable:
        return route.channel

    def _connect(self, route: Route) -> None:
        """Leave the creation of communicators to the first call."""


class Issued(NamedTuple):
    """An operation that a rank has issued."""

    route: Route
    is_send: bool
    dtype: torch.dtype


class EmulatedTransport:
    """A rank's transport over an emulated world: the device side of ProcessGroupTransport."""

    def __init__(
        self,
        rank: int,
        world: EmulatedWorld,
        channels: type[EmulatedChannels] = EmulatedChannels,
        ahead: int = 0,
    ) -> None:
        self.ranks, self.local, self.timeout = world.ranks, (rank,), 60.0
        self.receives_ahead = ahead
        self.issued: list[Issued] = []
        self._rank, self._world = rank, world
        self._channels = channels(rank, world)

    def open(self, routes: Sequence[Route], device: torch.device) -> None:
        self._channels.open(routes)

    def send(self, source: int, target: int, channel: int, tensor: torch.Tensor) -> Any:
        if not tensor.numel():
            return None
        route = Route(source, target, channel)
        self.issued.append(Issued(route, True, tensor.dtype))
        return self._channels.send(route, tensor)

    def send_all(
        self, source: int, target: int, channel: int, tensors: Sequence[torch.Tensor]
    ) -> list[Any]:
        return [self.send(source, target, channel, tensor) for tensor in tensors]

    def post(
        self,
        source: int,
        target: int,
        channel: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Any, torch.Tensor]:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        if not tensor.numel():
            return None, tensor
        route = Route(source, target, channel)
        self.issued.append(Issued(route, False, dtype))
        return self._channels.receive(route, tensor), tensor

    def ready(self, handle: Any) -> bool:
        return True

    def wait(self, handle: Any) -> Any:
        work, tensor = handle if isinstance(handle, tuple) else (handle, None)
        if work is not None:
            work.wait()
        return tensor

    def begin_exchange(self, row: Sequence[int]) -> list[list[int]]:
        return self.exchange(row)

    def end_exchange(self, handle: list[list[int]]) -> list[list[int]]:
        return handle

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        return self._world.exchange(self._rank, list(row))

    def exchange_bytes(self, message: bytes) -> list[bytes]:
        return self._world.exchange(self._rank, message)

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        return tensor.copy_(self._world.exchange(self._rank, tensor.clone())[root])

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(sum(self._world.exchange(self._rank, tensor.clone())))  # type: ignore[arg-type]

    def close(self) -> None:
        self._channels.close()


def run_ranks(
    ranks: int,
    mode: str,
    work: Callable[[EmulatedTransport], T],
    *,
    channels: type[EmulatedChannels] = EmulatedChannels,
    ahead: int = 0,
) -> list[T]:
    """Return ``work(transport)`` of every rank, each in a thread; raise the first error."""
    world = EmulatedWorld(ranks, mode)

    def run(rank: int) -> T:
        torch.autograd.set_multithreading_enabled(False)
        try:
            return work(EmulatedTransport(rank, world, channels, ahead))
        finally:
            world.leave(rank)

    with ThreadPoolExecutor(ranks) as threads:
        running = [threads.submit(run, rank) for rank in range(ranks)]
    failures = [each.exception() for each in running if each.exception() is not None]
    for failure in failures:
        if not isinstance(failure, DeadlockError):
            raise failure
    if failures:
        raise failures[0]
    assert not [queue for queue in world._queues.values() if queue], "an operation never ran"
    assert world.transfers, "nothing was transferred over the channels"
    return [each.result() for each in running]
