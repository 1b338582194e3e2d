"""Roofline cost model: an op takes as long as its arithmetic or its memory traffic.

Williams, Waterman, Patterson: Roofline (CACM 2009), per op, at peak rates, plus a launch cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from msgspec import UNSET

from fxpart.costs import Cost, CostModel

from . import communication
from .efficiency import Efficiency, find_efficiency
from .mixtures import list_parts
from .op_work import FLOAT8, flops, is_free, is_known, traffic
from .tensor_sizes import floating_dtype

if TYPE_CHECKING:
    from fxpart.cluster.devices import CollectiveCurve, Device, Link
    from fxpart.cluster.model import Cluster
    from fxpart.costs import OpSpec

SOURCE = "roofline"


@dataclass(frozen=True)
class Roofline(CostModel):
    """max(FLOPs / rate(dtype), bytes / memory bandwidth) + launch for ops, α-β for links.

    On a GPU with a data file an op takes as long as its kernels at the rates that its architecture
    reaches (:mod:`fxpart.costmodels.efficiency`), and at least as long as its launch.

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
        if parts := list_parts(op):
            costs = [self.op(part, device, backward) for part in parts]
            totals = (sum(c.seconds for c in costs), sum(c.bytes for c in costs))
            return Cost(*totals, sum(c.flops for c in costs), SOURCE)
        moved = float(traffic(op, backward))
        if (backward and not op.gradients) or (is_free(op) and not moved):
            return Cost(0.0, source=SOURCE)
        work = float(flops(op, backward))
        rate, note, dtype = _rate(op, device, backward)
        launches = max(1, op.gradients) if backward and work else 1
        found = find_efficiency(device.model) if device.kind == "gpu" else None
        if found is None:
            seconds = max(work / rate, moved / _bandwidth(device)) + launches * device.launch
        else:
            seconds = _kernels(op, device, backward, (work, moved, rate), dtype, found, launches)
        if not is_known(op):
            note += f", only bytes for {op.name}" if not work else ""
        return Cost(seconds, moved, work, SOURCE + note)

    def reshard(self, source: str, target: str, size: float, links: tuple[Link, ...]) -> Cost:
        """Return a change of placement; see :func:`fxpart.costmodels.communication.reshard`."""
        return communication.reshard(source, target, size, links, self.curves)

    def transfer(self, size: float, link: Link) -> Cost:
        """Return the cost of ``size`` bytes over one link."""
        return communication.transfer(size, link)


def _kernels(
    op: OpSpec,
    device: Device,
    backward: bool,
    amount: tuple[float, float, float],
    dtype: str,
    efficiency: Efficiency,
    launches: int,
) -> float:
    """Return the seconds of an op's kernels on a GPU; at least those that the host needs.

    amount: FLOPs, bytes, and FLOP/s. Rates that were measured on the device are achieved rates.
    """
    work, moved, rate = amount
    measured = device.measured if isinstance(device.measured, dict) else {}
    reached = rate * (1.0 if dtype in measured else efficiency.arithmetic(op, dtype, backward))
    bandwidth = _bandwidth(device) * (1.0 if "bandwidth" in measured else efficiency.traffic(op))
    each = efficiency.kernel(work / launches / reached, moved / launches / bandwidth)
    return launches * max(device.launch, each)


def _rate_in_8_bits(
    op: OpSpec, device: Device, used: str, backward: bool
) -> tuple[float, str, str]:
    """Return the FLOP/s of products in 8 bits; the weight's gradient is computed in ``used``."""
    rate = device.flops.get("float8")
    if rate is None:
        fallback = device.flops.get(used, min(device.flops.values()))
        return fallback, f", {used} rate for float8", used
    if backward and op.needs(1):
        wide = device.flops.get(used, rate)
        return 2 / (1 / rate + 1 / wide), f", half in {used}", "float8"
    return rate, "", "float8"


def _rate(op: OpSpec, device: Device, backward: bool) -> tuple[float, str, str]:
    """Return the FLOP/s for the op's dtype, a note where the device has none for it, the dtype.

    Without one the float32 rate is used, or the lowest rate.
    """
    used = floating_dtype((*op.inputs, *op.outputs))
    if op.key in FLOAT8 and not (backward and op.needs(1) and not op.needs(0)):
        return _rate_in_8_bits(op, device, used, backward)
    dtype = "float8" if used.startswith("float8") else used
    measured = device.measured if isinstance(device.measured, dict) else {}
    rates = device.flops | {name: rate for name, rate in measured.items() if name != "bandwidth"}
    if dtype in rates:
        return rates[dtype], "", dtype
    rate = rates.get("float32", min(rates.values()))
    return rate, f", float32 rate for {dtype}", "float32"


def _bandwidth(device: Device) -> float:
    """Return the bytes/s of the device's memory, measured if available."""
    measured = device.measured if isinstance(device.measured, dict) else {}
    return measured.get("bandwidth", device.bandwidth)
