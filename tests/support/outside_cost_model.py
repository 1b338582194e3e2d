"""A cost model as another package would add it: every byte and every operator at a fixed price."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fxpart.cluster.devices import Device, Link
from fxpart.cluster.model import Cluster
from fxpart.costs import Cost, CostModel, OpSpec


@dataclass(frozen=True)
class FlatRate(CostModel):
    """Cost model that prices the bytes of an operator's tensors at the device's bandwidth."""

    name = "flat-rate"
    devices: int = 0

    @classmethod
    def from_cluster(cls, cluster: Cluster | None) -> FlatRate:
        """Return the model, which remembers the size of the cluster."""
        return cls(0 if cluster is None else len(cluster.devices))

    def op(self, op: OpSpec, device: Device, backward: bool) -> Cost:
        """Return 8 bytes per element at the device's bandwidth."""
        if backward and not op.gradients:
            return Cost(0.0, source=self.name)
        moved = 8.0 * sum(prod(map(int, t.shape)) for t in (*op.inputs, *op.outputs))
        return Cost(device.launch + moved / device.bandwidth, moved, source=self.name)

    def reshard(self, source: str, target: str, size: float, links: tuple[Link, ...]) -> Cost:
        """Return the time of the whole tensor over the slowest link."""
        if source == target or not links:
            return Cost(0.0, source=self.name)
        return Cost(max(self.transfer(size, link).seconds for link in links), size)

    def transfer(self, size: float, link: Link) -> Cost:
        """Return latency and bytes at the link's bandwidth."""
        return Cost(link.latency + size / link.bandwidth, size, source=self.name)
