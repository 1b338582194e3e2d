"""Devices in the solvers' problems: kinds, memory limits, and the links into each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from itertools import islice
from typing import TYPE_CHECKING

from msgspec import UNSET

from fxpart.cluster.link_index import LinkIndex
from fxpart.solver.problem import DeviceLimit

if TYPE_CHECKING:
    from fxpart.cluster.devices import Device, Link
    from fxpart.cluster.model import Cluster
    from fxpart.costs import CostModel

RESERVE = 0.08  # least fraction of memory for runtime context, fragmentation, buffers
# Relative variation of the peak memory of equal runs, because heaps fragment differently.
VARIES = 0.03
_LARGE = float(1 << 30)


def group_by_kind(cluster: Cluster) -> tuple[tuple[Device, ...], tuple[int, ...]]:
    """Return one device of each kind with different costs, and the kind of every device.

    Ranks of one host slow each other down, so hosts of CPUs with another contention curve or number
    of ranks are other kinds.
    """
    ranks = Counter(device.host for device in cluster.devices)
    curves = {} if cluster.hosts is UNSET else {h.name: h.slowdown for h in cluster.hosts}
    found: dict[tuple[object, ...], int] = {}
    samples: list[Device] = []
    types = []
    for device in cluster.devices:
        rates = tuple(sorted(device.flops.items()))
        curve = curves.get(device.host, ())
        shared = (ranks[device.host], curve) if curve or device.kind == "cpu" else ()
        speed = (
            rates, device.bandwidth, device.launch, device.share, device.host_bandwidth
        )  # fmt: skip
        key = (device.kind, device.model, *speed, shared)
        if key not in found:
            found[key] = len(samples)
            samples.append(device)
        types.append(found[key])
    return tuple(samples), tuple(types)


def named(device: Device) -> str:
    """Return the name of a device's kind: the model, with its CPU quota if there is one."""
    name = device.model or device.name
    return name if device.quota is UNSET else f"{name} of {device.quota:g} cores"


def limits(cluster: Cluster, model: CostModel, *, reserve: float = RESERVE) -> list[DeviceLimit]:
    """Return each device with its usable memory and the worst link from an earlier device.

    Raises FXP403 where two devices have no link. Devices with equal links are looked up once.
    """
    links = LinkIndex(cluster)
    types = group_by_kind(cluster)[1]
    # class of links -> the first device of each host so far
    before: dict[Hashable, dict[str, str]] = {}
    known: dict[tuple[Hashable, Hashable, bool], tuple[float, float]] = {}
    result = []
    for device, kind in zip(cluster.devices, types, strict=True):
        group = links.link_class(device.name)
        worst = (0.0, 0.0)
        for other, names in before.items():
            same, apart = names.get(device.host), islice(names.items(), 2)
            reached = [(device.host, same)] if same else []
            reached += [pair for pair in apart if pair[0] != device.host][:1]
            for host, name in reached:
                key = (other, group, host == device.host)
                if key not in known:
                    known[key] = line(model, links, name, device.name)
                worst = (max(worst[0], known[key][0]), max(worst[1], known[key][1]))
        result.append(
            DeviceLimit(
                name=device.name,
                type=kind,
                memory=get_usable_bytes(device, model, reserve),
                latency=worst[0],
                inverse_bandwidth=worst[1],
            )
        )
        before.setdefault(group, {}).setdefault(device.host, device.name)
    return result


def get_usable_bytes(device: Device, model: CostModel, reserve: float = RESERVE) -> int:
    """Return the bytes of a device that a plan's tensors may use together.

    On a CPU of a profiled host, the measured memory of a rank's process is subtracted.
    """
    most = int(device.memory * (1 - reserve))
    found = model.knowledge(device).contention if device.kind == "cpu" else None
    if found is None or not found.baseline:
        return most
    available = device.memory * (1 - VARIES) - found.baseline
    return max(0, min(most, int(available / (1 + found.overhead))))


def line(model: CostModel, links: LinkIndex, source: str, target: str) -> tuple[float, float]:
    """Return (latency, seconds per byte) of a transfer between two devices, there or back.

    Where the two directions differ it is their mean: a hidden state goes one way and a gradient of
    the same size returns, so that both together take twice this time.
    """
    there, back = links(source, target), links(target, source)
    one = transfer_line(model, there)
    if there == back:
        return one
    other = transfer_line(model, back)
    return (one[0] + other[0]) / 2, (one[1] + other[1]) / 2


def transfer_line(model: CostModel, link: Link) -> tuple[float, float]:
    """Return (latency, seconds per byte) of the model's transfers over a link."""
    start = model.transfer(0.0, link).seconds
    return start, (model.transfer(_LARGE, link).seconds - start) / _LARGE
