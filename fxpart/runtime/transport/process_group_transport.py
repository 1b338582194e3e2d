"""Transport with one rank per process over torch.distributed: gloo on CPUs, nccl on GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fxpart.collectives.failures import ALL, NO_RANK, waiting
from fxpart.compat import share_cores
from fxpart.runtime.transport.control_channel import ControlChannel, connect_control_channel
from fxpart.runtime.transport.deadline import Deadline
from fxpart.runtime.transport.device_channels import DeviceChannels
from fxpart.runtime.transport.interface import (
    AHEAD,
    PeerLostError,
    Route,
    TransferTimeoutError,
    Transport,
)
from fxpart.runtime.transport.shared_memory import (
    MOST_CHANNELS,
    SharedMemory,
)
from fxpart.runtime.transport.shared_memory import connect_shared_memory as connect_memory
from fxpart.runtime.transport.shared_memory_peer import SharedMemoryReceive, SharedMemorySend
from fxpart.runtime.transport.transfer_watchdog import TransferWatchdog

_CONTROL = 4  # The tag of control messages; those of transfers are their channels.
_DIRECT = 15  # Maximum number of other ranks for direct sends.
_LONGEST = 1 << 30  # Maximum bytes of a message.
_TIMED_OUT = ("timed out", "timeout")


@dataclass(slots=True)
class _DistributedTransfer:
    """A transfer over gloo: torch's work object, its tensor on the CPU, and the other rank.

    device: of the tensor for the user.
    """

    work: Any
    tensor: torch.Tensor
    rank: int = NO_RANK
    device: torch.device | None = None


@dataclass(slots=True)
class _DeviceTransfer:
    """A transfer between devices: torch's work object, its tensor, and its route."""

    work: Any
    tensor: torch.Tensor
    route: Route


_Transfer = _DistributedTransfer | _DeviceTransfer | SharedMemorySend | SharedMemoryReceive


class ProcessGroupTransport(Transport):
    """A transport over the default process group.

    Tensors on the CPU use gloo, which separates channels by tag, or shared memory between ranks of
    one host; if any pair cannot share memory, all use gloo. Tensors on devices use a communicator
    per open route (:mod:`fxpart.runtime.transport.device_channels`), whose waits only order the
    device's work. Over a route that is not open, which no step uses, they are copied to the CPU.
    Control messages always use the CPU.
    """

    def __init__(
        self,
        *,
        timeout: float | Deadline | None = None,
        one_machine: bool = False,
        shared_memory: bool = True,
    ) -> None:
        """Create the transport; the default process group must exist.

        timeout: maximum seconds of any wait; None: derived from step times. one_machine: all ranks
        run on this host, so messages can use loopback connections. shared_memory: whether to use
        shared memory on one host. All ranks must pass the same values.
        """
        self.ranks = dist.get_world_size()
        self.local: tuple[int, ...] = (dist.get_rank(),)
        self._deadline = timeout if isinstance(timeout, Deadline) else Deadline(timeout)
        self.timeout = timeout = self._deadline.seconds
        self._limit = timedelta(seconds=timeout)
        self.receives_ahead = AHEAD
        self._channels: DeviceChannels | None = None
        self._watchdog = TransferWatchdog(
            self.local[0], lambda: self._deadline.seconds, self._abort_device_transfers
        )
        backend = dist.get_backend_config()
        self._control: Any = None
        if "nccl" in backend:
            self._channels = DeviceChannels(self.local[0])
            if "gloo" not in backend:
                self._control = dist.new_group(backend="gloo")
        share_cores()
        self._control_channel: ControlChannel | None = None
        self._memory: SharedMemory | None = None
        self._collectives: tuple[SharedMemory, ...] = ()
        if one_machine and self.ranks > 1:
            self._control_channel = connect_control_channel(
                self.local[0], self.ranks, self.exchange_bytes, timeout
            )
        if one_machine and shared_memory and self.ranks > 1 and "nccl" not in backend:
            self._memory = connect_memory(self.local[0], self.ranks, self.exchange_bytes, timeout)

    @property
    def shares_memory(self) -> bool:
        """Whether transfers between CPUs use shared memory."""
        return self._memory is not None

    def connect_memory(self, channels: int) -> SharedMemory | None:
        """Connect the ranks of one host once more, for collectives; None if this is impossible.

        Every rank must call it. The connection belongs to the caller.
        """
        if self._memory is None or channels > MOST_CHANNELS:
            return None
        ranks, spread = self.ranks, self.exchange_bytes
        made = connect_memory(
            self.local[0], ranks, spread, self.timeout, channels=channels, copied=()
        )
        self._collectives += () if made is None else (made,)
        return made

    def open(self, routes: Iterable[Route], device: torch.device) -> None:
        """Create the communicators of the routes that are not open yet; on devices only."""
        if self._channels is None or device.type != self._channels.device_type:
            return
        self.receives_ahead = 0  # A posted receive occupies the device until its message comes.
        try:
            self._channels.open(routes)
        except (RuntimeError, ValueError) as cause:
            raise PeerLostError(str(cause)) from cause

    def send(self, source: int, target: int, channel: int, tensor: torch.Tensor) -> _Transfer:
        """Start sending; the handle keeps the tensor if it is needed."""
        if tensor.numel() == 0:
            return _DistributedTransfer(None, tensor)
        if self._channels is not None:
            route, channels = Route(source, target, channel), self._channels
            if channels.carries(route, tensor.device):
                return self._begin_on_device(lambda: channels.send(route, tensor), tensor, route)
        if self._memory is not None and tensor.device.type == "cpu":
            return self._memory.send(target, channel, tensor)
        there = tensor.cpu()
        return self._begin(lambda: dist.isend(there, target, self._control, channel), there, target)

    def send_all(
        self, source: int, target: int, channel: int, tensors: Sequence[torch.Tensor]
    ) -> Sequence[_Transfer]:
        """Start sending several tensors in order; shared memory announces all at once."""
        if self._memory is not None and all(t.device.type == "cpu" and t.numel() for t in tensors):
            return [*self._memory.send_all(target, channel, tensors)]
        return [self.send(source, target, channel, tensor) for tensor in tensors]

    def post(
        self,
        source: int,
        target: int,
        channel: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Transfer:
        """Start receiving: into a new buffer, or in place in shared memory."""
        if self._memory is not None and device.type == "cpu" and 0 not in shape:
            return self._memory.post(source, channel, shape, dtype)
        route, channels = Route(source, target, channel), self._channels
        if channels is not None and channels.carries(route, device) and 0 not in shape:
            buffer = torch.empty(shape, dtype=dtype, device=device)
            return self._begin_on_device(lambda: channels.receive(route, buffer), buffer, route)
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel() == 0:
            return _DistributedTransfer(None, tensor, device=device)
        return self._begin(
            lambda: dist.irecv(tensor, source, self._control, channel), tensor, source, device
        )

    def ready(self, handle: _Transfer) -> bool:
        """Return True: the other rank runs in another process."""
        return True

    def wait(self, handle: _Transfer) -> torch.Tensor:
        """Wait for a transfer, at most ``timeout`` seconds; the host never waits for a device."""
        if isinstance(handle, _DeviceTransfer):
            return self._wait_on_device(handle)
        if not isinstance(handle, _DistributedTransfer):
            assert self._memory is not None
            return self._memory.wait(handle)
        if handle.work is not None:
            self._finish(handle.work, handle.rank)
            handle.work = None
        if handle.device is not None and handle.device != handle.tensor.device:
            handle.tensor = handle.tensor.to(handle.device)
        return handle.tensor

    def begin_exchange(self, row: Sequence[int]) -> Any:
        """Start an exchange: direct sends between few ranks, as gloo's all-gather is slow."""
        self._watchdog.check()
        if self._deadline.lap():
            self._set_limit(self._deadline.seconds)
        if self._memory is not None:
            self._memory.tidy()
            for each in self._collectives:
                each.tidy()
        if self._control_channel is not None:
            return self._control_channel.begin(row)
        mine = torch.tensor(row, dtype=torch.int64)
        me, control = self.local[0], self._control
        parts = [mine if r == me else torch.empty_like(mine) for r in range(self.ranks)]
        others = [r for r in range(self.ranks) if r != me]
        try:
            if len(others) > _DIRECT:
                parts[me] = torch.empty_like(mine)
                return [dist.all_gather(parts, mine, group=control, async_op=True)], parts
            works = [dist.irecv(parts[r], r, control, _CONTROL) for r in others]
            works += [dist.isend(mine, r, control, _CONTROL) for r in others]
        except (RuntimeError, ValueError) as cause:
            raise PeerLostError(str(cause)) from cause
        return works, parts

    def end_exchange(self, handle: Any) -> list[list[int]]:
        """Wait for all others, with a timeout."""
        if self._control_channel is not None:
            try:
                return self._control_channel.end(handle)
            except TransferTimeoutError:
                self._watchdog.check()  # It names the transfer that the others wait for.
                raise
        works, parts = handle
        for work in works:
            self._finish(work)
        return [part.tolist() for part in parts]

    def exchange_bytes(self, message: bytes) -> list[bytes]:
        """All-gather the lengths, then the messages padded to the longest.

        PeerLostError if another rank is at a different exchange, so that its row is not a length: a
        rank that timed out continues while this one still reports the failure.
        """
        lengths = [row[0] for row in self.exchange([len(message)])]
        longest = max(lengths)
        if min(lengths) < 0 or longest > _LONGEST:
            raise PeerLostError("the ranks are no longer at the same exchange")
        if longest == 0:
            return [b""] * self.ranks
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(message)] = torch.frombuffer(bytearray(message or b"\0"), dtype=torch.uint8)[
            : len(message)
        ]
        parts = [torch.empty_like(mine) for _ in range(self.ranks)]
        self._finish(dist.all_gather(parts, mine, group=self._control, async_op=True))
        return [
            part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)
        ]

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Run torch's broadcast, with a timeout on the CPU; the host never waits for a device."""
        if tensor.numel():
            work = dist.broadcast(tensor, root, async_op=True)
            self._finish(work, limited=tensor.device.type == "cpu" or self._channels is None)
        return tensor

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Run torch's all-reduce with a timeout; for CPU tensors."""
        self._finish(dist.all_reduce(tensor, group=self._control, async_op=True))
        return tensor

    def wake(self) -> None:
        """End current and later waits of own connections after a rank was lost; any thread."""
        if self._control_channel is not None:
            self._control_channel.wake()
        for memory in (self._memory, *self._collectives):
            if memory is not None:
                memory.wake()
        self._abort_device_transfers()

    def close(self) -> None:
        """Close own connections; the process group belongs to its creator."""
        self._watchdog.close()
        if self._channels is not None:
            self._channels.close()
        if self._control_channel is not None:
            self._control_channel.close()
        if self._memory is not None:
            self._memory.close()

    def _set_limit(self, seconds: float) -> None:
        self.timeout, self._limit = seconds, timedelta(seconds=seconds)
        if self._control_channel is not None:
            self._control_channel.timeout = seconds
        if self._memory is not None:
            self._memory.timeout = seconds

    def _begin(
        self, begin: Any, tensor: torch.Tensor, rank: int, device: torch.device | None = None
    ) -> _DistributedTransfer:
        try:
            return _DistributedTransfer(begin(), tensor, rank, device)
        except (RuntimeError, ValueError) as cause:
            raise PeerLostError(str(cause)) from cause

    def _begin_on_device(self, begin: Any, tensor: torch.Tensor, route: Route) -> _DeviceTransfer:
        self._watchdog.check()
        try:
            return _DeviceTransfer(begin(), tensor, route)
        except (RuntimeError, ValueError) as cause:
            raise PeerLostError(str(cause)) from cause

    def _wait_on_device(self, handle: _DeviceTransfer) -> torch.Tensor:
        """Let the current CUDA stream wait: a limit would make the host wait, too."""
        self._watchdog.check()
        if handle.work is not None:
            work, handle.work = handle.work, None
            self._watchdog.watch(work, handle.route)
            try:
                work.wait()
            except (RuntimeError, ValueError) as cause:
                raise PeerLostError(str(cause)) from cause
        return handle.tensor

    def _abort_device_transfers(self) -> None:
        if self._channels is not None:
            self._channels.abort()

    def _finish(self, work: Any, rank: int = ALL, *, limited: bool = True) -> None:
        waiting.rank, waiting.since = rank, time.monotonic()
        try:
            if limited:
                work.wait(self._limit)
            else:
                work.wait()
            waiting.rank = NO_RANK
        except (RuntimeError, ValueError) as cause:
            self._watchdog.check()
            text = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
            if any(mark in text.lower() for mark in _TIMED_OUT):
                raise TransferTimeoutError(self.timeout, text) from cause
            raise PeerLostError(text) from cause
