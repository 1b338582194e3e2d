"""Devices, hosts and the directed links between devices: the data of a cluster. No torch."""

from __future__ import annotations

from typing import Any

import msgspec


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device that runs one rank.

    name: unique, e.g. "host0/gpu:3". kind: "cpu" or "gpu". model: e.g. "h100-sxm". memory: bytes.
    flops: peak FLOP/s by dtype ("float32", "bfloat16"). bandwidth: memory bytes/s. launch: seconds
    each op costs at least. source: where the figures come from. Ranks of one host may share its
    cores and memory: then these are the rates that each has while all of them compute.
    threads: of computation, on a CPU. quota: cores that the device may use on average, where a
    container holds it to less than its threads would take; the rates above are those under it.
    price: money an hour, in any one currency. domain: what fails together (a rack, a zone).
    measured: rates that were measured here, beside the nominal ones above, by dtype (FLOP/s) and
    "bandwidth" (bytes/s). extra: keys of a file that fxpart does not know, kept as they are. These
    six are left out of files and of the hash where not given.
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
    measured: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    extra: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET

    @property
    def share(self) -> float:
        """Of the time of its threads what the device's quota leaves, above 0, at most 1."""
        if isinstance(self.quota, msgspec.UnsetType):
            return 1.0
        threads = 1 if isinstance(self.threads, msgspec.UnsetType) else self.threads
        return min(1.0, self.quota / threads)


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine, as far as its devices share it.

    name: what devices call their ``host``. cores: that ranks on it share; 0 where not known.
    slowdown: how many times longer a computation takes while 1, 2, ... of its ranks compute at the
    same time, as measured; empty where it was not. address: by which others reach it. source: where
    the figures come from. extra: keys of a file that fxpart does not know, kept as they are.
    """

    name: str
    cores: int = 0
    slowdown: tuple[float, ...] = ()
    address: str = ""
    source: str = ""
    extra: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class CpuLoadImbalance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two ranks share a core while another is idle, until the operating system looks.

    cores: how many ranks compute without sharing cores. seconds: how long it lasts where nothing
    else changes. fallen: the part of a core that is lost meanwhile where more ranks than cores
    computed just before; risen: the same where fewer did.
    """

    cores: int
    seconds: float
    fallen: float
    risen: float = 0.0


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A directed link. source and target name a device, a host, or "*"; the closest match wins.

    latency: seconds that a transfer takes before its first byte, software included; bandwidth:
    bytes/s; kind: "shm", "nvlink", "net", ... ("net" means between hosts). origin: where the
    figures come from. shared: between hosts, whether all devices of a host share that bandwidth
    (one network card), so that bytes of stages on one host add up; else each device has its own.
    segment: the name of something that links share (a PCIe switch, a network card): transfers over
    links of one segment share its bandwidth. curve: measured (bytes, seconds), bytes rising, which
    replace latency and bandwidth from the first to the last. extra: unknown keys of a file.
    """

    source: str
    target: str
    latency: float
    bandwidth: float
    kind: str = ""
    origin: str = ""
    # What is not given is left out of files and of the hash.
    shared: bool | msgspec.UnsetType = msgspec.UNSET
    segment: str | msgspec.UnsetType = msgspec.UNSET
    curve: tuple[tuple[float, float], ...] | msgspec.UnsetType = msgspec.UNSET
    extra: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class CollectiveCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured seconds of one collective over a group of ranks, by size.

    operation: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "broadcast". ranks: of
    the group; hosts: machines that they are on. points: (bytes, median seconds), bytes rising;
    the bytes are those of the whole tensor, as the formulas of alphabeta.py count them. latency
    (seconds), inverse_bandwidth (seconds a byte): the fitted line; residual: its median relative
    error over the points. source: backend, threads, date. extra: unknown keys of a file.
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
