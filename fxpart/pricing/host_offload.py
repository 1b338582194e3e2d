"""Prices of offloading: bytes in host memory, and seconds on the link between device and host.

They follow the runtime. An update copies gradients to the host, then updates there, then copies the
parameters back; nothing overlaps. Activations are copied beside the computation: a block takes the
longer of both. At the peak of a stage the device has the activations of the running block, and
those that wait for a copy. On a CPU rank the host's memory is the device's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from fxpart.cluster.presets import find_device_data
from fxpart.plan.offload import OFFLOADS, Offload, offloads_activations, offloads_optimizer
from fxpart.solver.offload import add_copies, offload_variant, offload_weight
from fxpart.solver.problem import Variant, Weight

if TYPE_CHECKING:
    from fxpart.cluster.devices import Device
    from fxpart.cluster.model import Cluster


@dataclass(frozen=True)
class HostOffload:
    """What a plan offloads. shared: whether a rank's device memory is its host's, on CPUs."""

    optimizer: bool = False
    activations: bool = False
    shared: bool = False

    @classmethod
    def of(cls, offload: Offload, cluster: Cluster) -> HostOffload:
        """Return what is offloaded on a cluster. With CPUs in it, all bytes count as theirs."""
        shared = any(device.kind == "cpu" for device in cluster.devices)
        return cls(offloads_optimizer(offload), offloads_activations(offload), shared)

    @property
    def source(self) -> str:
        """Return where the prices of offload come from, for the plan; "" without offload."""
        if not (self.optimizer or self.activations):
            return ""
        return (
            f"copies at {_ACHIEVED:.0%} of the link to the host, updates at {_UPDATE / 1e9:.0f} "
            "GB/s per GPU (assumptions)"
        )

    @property
    def others(self) -> tuple[Offload, ...]:
        """Return the offloads that free memory of the devices besides, the cheapest first."""
        if self.shared or self.optimizer or self.activations:
            return ()
        return tuple(each for each in OFFLOADS if each != "none")

    def weight(self, weight: Weight) -> Weight:
        """Return a parameter without what the host has of it: copies, and optimizer state."""
        if not self.optimizer or not weight.gradient:
            return weight
        found = offload_weight(weight)
        if self.shared:
            kept = weight.optimizer + found.copied
            found = msgspec.structs.replace(found, optimizer=kept, temporary=weight.temporary)
        return found

    def variant(self, variant: Variant, devices: Sequence[Device]) -> Variant:
        """Return the costs of a microbatch whose activations are offloaded."""
        if not self.activations:
            return variant
        forward, backward = (
            tuple(map(self.overlap, rows, repeat(variant.activation), devices))
            for rows in (variant.forward, variant.backward)
        )
        found = msgspec.structs.replace(
            offload_variant(variant), forward=forward, backward=backward
        )
        if self.shared:
            found = msgspec.structs.replace(
                found, activation=variant.activation, recompute=variant.recompute
            )
        return found

    def memory(
        self, activation: Sequence[int], workspace: Sequence[int], largest: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return what a microbatch in flight has on the device, and a running block, by block."""
        kept = tuple(size if self.shared else 0 for size in activation)
        return kept, add_copies(workspace, activation, largest)

    def overlap(
        self, seconds: Sequence[float], activation: Sequence[int], device: Device
    ) -> tuple[float, ...]:
        """Return seconds by block: the computation, or the copies of activations if they are
        longer; on a CPU their sum.
        """
        copies = [size / link_bandwidth(device) for size in activation]
        combine = sum if device.kind == "cpu" else max
        return tuple(combine(pair) for pair in zip(seconds, copies, strict=True))


def update_seconds(weight: Weight, device: Device) -> float:
    """Return the seconds of a parameter's update on the host, with the copies there and back.

    Each of the three is an operation that the host starts.
    """
    moved = 2 * (weight.host - weight.copied) + 1.5 * weight.copied
    moving = weight.copied / link_bandwidth(device) + moved / _update_bandwidth(device)
    return moving + 3 * device.launch


def link_bandwidth(device: Device) -> float:
    """Return the bytes/s of copies between a device and its host, in one direction.

    The device's own figure, else that of its data file or architecture. On a CPU a copy reads and
    writes the same memory.
    """
    if device.host_bandwidth is not UNSET:
        return device.host_bandwidth
    if device.kind == "cpu":
        return device.bandwidth / 2
    data = find_device_data(device.model)
    return float(data.get("host_bandwidth", _PCIE)) * _ACHIEVED


def _update_bandwidth(device: Device) -> float:
    return device.bandwidth if device.kind == "cpu" else _UPDATE


_PCIE = 1.575e10  # bytes/s of PCIe 3.0 x16 in one direction, for devices without a data file
_ACHIEVED = 0.8  # of a link by copies of pinned memory; an assumption
# bytes/s of host memory for each rank; an assumption: eight ranks of a server with two sockets of
# eight channels DDR4-3200 (410 GB/s)
_UPDATE = 5.0e10
