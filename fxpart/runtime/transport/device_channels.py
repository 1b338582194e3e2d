"""Channels of device tensors between processes: one communicator per route.

NCCL runs the point-to-point operations of a communicator in the order of the calls, and a send ends
only when its receive runs. It ignores tags. A receive that is posted early therefore blocks every
later operation of its communicator, and a communicator that is created at its first use blocks the
host until the other rank creates it, too. So:

- each route (sender, receiver, direction) has its own process group of two ranks. A group carries
  only sends on one end and only receives on the other, in the order that both ends derive from the
  schedule (:mod:`fxpart.schedule.channels` proves it);
- all groups are created, and a first tensor is sent over each, in one order on all ranks, before
  the first step;
- no call here waits on the host. torch gives each communicator a CUDA stream of its own. An
  operation starts after the work that the current CUDA stream has at the call. ``work.wait()``
  makes the current CUDA stream wait for it, so kernels are launched ahead. The memory of a tensor
  is reused in the order of the device's work, so the schedule bounds it, not waits of the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fxpart.runtime.transport.interface import Route

# torch ends the process after this time. The transport's watchdog reports a hang much earlier.
_BACKSTOP = timedelta(days=1)


class DeviceChannels:
    """The open routes of this rank. device_type: of the tensors that they carry."""

    device_type = "cuda"

    def __init__(self, rank: int) -> None:
        """rank: of this process. The default process group must exist."""
        self._rank = rank
        self._known: set[Route] = set()
        self._groups: dict[Route, Any] = {}
        self._aborted = False

    def open(self, routes: Iterable[Route]) -> None:
        """Create the communicators of new routes; every rank calls it with the same routes."""
        if not self._known:
            self._connect_all()
        new = sorted(set(routes) - self._known)
        for route in new:
            group = self._make_group(route)
            if self._rank in (route.source, route.target):
                self._groups[route] = group
        for route in new:
            self._connect(route)
        self._known.update(new)

    def carries(self, route: Route, device: torch.device) -> bool:
        """Return whether a tensor of the device is transferred by an open route."""
        return device.type == self.device_type and route in self._groups

    def send(self, route: Route, tensor: torch.Tensor) -> Any:
        """Start sending; return torch's work object."""
        return dist.isend(tensor, route.target, self._groups[route])

    def receive(self, route: Route, tensor: torch.Tensor) -> Any:
        """Start receiving into ``tensor``; return torch's work object."""
        return dist.irecv(tensor, route.source, self._groups[route])

    def abort(self) -> None:
        """End the operations in flight, so that the device does not wait for them; any thread."""
        self._aborted = True
        for group in tuple(self._groups.values()):
            group.abort()

    def close(self) -> None:
        """Destroy the communicators once they are idle; aborted ones have ended."""
        if self._groups and not self._aborted:
            self._synchronize()
            for _, group in sorted(self._groups.items()):
                dist.destroy_process_group(group)
        self._groups.clear()
        self._known.clear()

    def _make_group(self, route: Route) -> Any:
        """Return the process group of a route; every rank takes part."""
        ends = sorted((route.source, route.target))
        return dist.new_group(ends, timeout=_BACKSTOP, backend="nccl")

    def _connect_all(self) -> None:
        """Create the communicator of the default group, which broadcasts use."""
        dist.all_reduce(torch.zeros(1, device=self.device_type))
        self._synchronize()

    def _connect(self, route: Route) -> None:
        """Send a first tensor, which creates the communicator and its buffers."""
        if route not in self._groups:
            return
        token = torch.zeros(1, device=self.device_type)
        work = (self.send if self._rank == route.source else self.receive)(route, token)
        work.wait()
        self._synchronize()

    def _synchronize(self) -> None:
        """Wait on the host for the device's work."""
        torch.cuda.synchronize()
