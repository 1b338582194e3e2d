"""Data of a cluster: devices, hosts and directed links. Does not import torch."""

from __future__ import annotations

from typing import Any

import msgspec


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device that runs one rank.

    name: unique, e.g. "host0/gpu:3". kind: "cpu" or "gpu". model: e.g. "h100-sxm". memory: bytes.
    flops: peak FLOP/s by dtype ("float32", "bfloat16"). bandwidth: memory bytes/s. launch: minimum
    seconds of an op. source: origin of the figures. If ranks of a host share its cores and memory,
    the rates are those of each rank while all ranks compute.

    The other fields are omitted from files and from the hash if unset. threads: computing threads
    of a CPU. quota: cores that the device may use on average, if a container limits it to fewer
    than its threads; the rates include this limit. price: cost per hour, in any one currency.
    domain: failure domain (a rack, a zone). host_bandwidth: bytes/s of copies between the device's
    and its host's memory, in one direction. measured: measured rates by dtype (FLOP/s) and
    "bandwidth" (bytes/s), in addition to the nominal ones. extra: unknown keys of a file.
    """

    name: str
    kind: str
    model: str
    host: str
    memory: int
    flops: dict[str, float]
    bandwidth: float
    launch: float = 0.0
    source: str = ""
    threads: int | msgspec.UnsetType = msgspec.UNSET
    quota: float | msgspec.UnsetType = msgspec.UNSET
    price: float | msgspec.UnsetType = msgspec.UNSET
    domain: str | msgspec.UnsetType = msgspec.UNSET
    host_bandwidth: float | msgspec.UnsetType = msgspec.UNSET
    measured: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    extra: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET

    @property
    def share(self) -> float:
        """The fraction of its threads' time that the quota allows, in (0, 1]."""
        if isinstance(self.quota, msgspec.UnsetType):
            return 1.0
        threads = 1 if isinstance(self.threads, msgspec.UnsetType) else self.threads
        return min(1.0, self.quota / threads)


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties of a machine that its devices share.

    name: the ``host`` of its devices. cores: shared by its ranks; 0 if unknown. slowdown: measured
    factors by which computation slows down while 1, 2, ... ranks compute at the same time; empty
    if not measured. memory: bytes that all ranks may offload to; unset if unknown. address: network
    address. source: origin of the figures. extra: unknown keys
    of a file.
    """

    name: str
    cores: int = 0
    slowdown: tuple[float, ...] = ()
    memory: int | msgspec.UnsetType = msgspec.UNSET
    address: str = ""
    source: str = ""
    extra: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class CpuLoadImbalance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time during which two ranks share a core while another core is idle.

    It lasts until the operating system balances the load. cores: number of ranks that can compute
    without sharing cores. seconds: duration if nothing else changes. fallen: lost fraction of a
    core after more ranks than cores computed; risen: the same after fewer ranks computed.
    """

    cores: int
    seconds: float
    fallen: float
    risen: float = 0.0


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A directed link between devices, hosts or "*" (any); the most specific link is used.

    latency: seconds before the first byte, software included. bandwidth: bytes/s. kind: "shm",
    "nvlink", "mesh" (each pair of a host's devices has its own), "net" (between hosts), ... origin:
    origin of the figures. shared: whether all devices of a host share the bandwidth between hosts
    (one network card), or each device has its own. segment: name of a resource that several links
    share (a PCIe switch, a network card); transfers over links of one segment share its bandwidth.
    curve: measured (bytes, seconds) in ascending order, which replace latency and bandwidth within
    their range. extra: unknown keys of a file.
    """

    source: str
    target: str
    latency: float
    bandwidth: float
    kind: str = ""
    origin: str = ""
    # Unset fields are omitted from files and from the hash.
    shared: bool | msgspec.UnsetType = msgspec.UNSET
    segment: str | msgspec.UnsetType = msgspec.UNSET
    curve: tuple[tuple[float, float], ...] | msgspec.UnsetType = msgspec.UNSET
    extra: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class CollectiveCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured seconds of one collective over a group of ranks, by size.

    operation: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "broadcast". ranks:
    size of the group. hosts: number of machines. points: (bytes, median seconds), bytes ascending;
    the bytes are those of the whole tensor, as in the formulas of alphabeta.py. latency (seconds),
    inverse_bandwidth (seconds/byte): the fitted line; residual: its median relative error. source:
    backend, threads, date. extra: unknown keys of a file.
    """

    operation: str
    ranks: int
    hosts: int = 1
    points: tuple[tuple[float, float], ...]
    latency: float
    inverse_bandwidth: float
    residual: float = 0.0
    source: str = ""
    extra: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
