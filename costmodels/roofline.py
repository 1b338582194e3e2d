"""Roofline cost model: an op takes as long as its arithmetic or its memory traffic.

Williams, Waterman, Patterson: Roofline (CACM 2009), per op, at peak rates, plus a launch cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from msgspec import UNSET

from fxpart.costs import Cost, CostModel

from . import communication
from .op_work import flops, is_free, is_known, traffic
from .tensor_sizes import is_floating

if TYPE_CHECKING:
    from fxpart.cluster.devices import CollectiveCurve, Device, Link
    from fxpart.cluster.model import Cluster
    from fxpart.costs import OpSpec

SOURCE = "roofline"


@dataclass(frozen=True)
class Roofline(CostModel):
    """max(FLOPs / rate(dtype), bytes / memory bandwidth) + launch for ops, α-β for links.

    curves: measured collectives of the cluster, which replace the formulas; so does a link's own
    curve, see :mod:`fxpart.costmodels.communication`. Rates measured on the device replace the
    nominal ones.
    """

    name: ClassVar[str] = SOURCE
    curves: tuple[CollectiveCurve, ...] = ()

    @classmethod
    def from_cluster(cls, cluster: Cluster | None) -> Roofline:
        """Return the model with the measured collectives of the cluster."""
        measured = UNSET if cluster is None else cluster.collectives
        return cls() if measured is UNSET else cls(measured)

    def op(self, op: OpSpec, device: Device, backward: bool) -> Cost:
        """Return the op's cost (with numeric shapes). Views are free, as are missing backwards."""
        moved = float(traffic(op, backward))
        if (backward and not op.gradients) or (is_free(op) and not moved):
            return Cost(0.0, source=SOURCE)
        work = float(flops(op, backward))
        rate, note = _rate(op, device)
        launches = max(1, op.gradients) if backward and work else 1
        seconds = max(work / rate, moved / _bandwidth(device)) + launches * device.launch
        if not is_known(op):
            note += f", only bytes for {op.name}" if not work else ""
        return Cost(seconds, moved, work, SOURCE + note)

    def reshard(self, source: str, target: str, size: float, links: tuple[Link, ...]) -> Cost:
        """Return a change of placement; see :func:`fxpart.costmodels.communication.reshard`."""
        return communication.reshard(source, target, size, links, self.curves)

    def transfer(self, size: float, link: Link) -> Cost:
        """Return the cost of ``size`` bytes over one link."""
        return communication.transfer(size, link)


def _rate(op: OpSpec, device: Device) -> tuple[float, str]:
    """Return the FLOP/s for the op's dtype, and a note where the device has no rate for it.

    Without one the float32 rate is used, or the lowest rate.
    """
    used = next((t.dtype for t in (*op.inputs, *op.outputs) if is_floating(t.dtype)), "float32")
    dtype = "float8" if used.startswith("float8") else used
    measured = device.measured if isinstance(device.measured, dict) else {}
    rates = device.flops | {name: rate for name, rate in measured.items() if name != "bandwidth"}
    if dtype in rates:
        return rates[dtype], ""
    rate = rates.get("float32", min(rates.values()))
    return rate, f", float32 rate for {dtype}"


def _bandwidth(device: Device) -> float:
    """Return the bytes/s of the device's memory, measured if available."""
    measured = device.measured if isinstance(device.measured, dict) else {}
    return measured.get("bandwidth", device.bandwidth)
