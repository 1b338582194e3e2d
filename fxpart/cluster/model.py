"""The cluster: devices as individuals and the directed links between them. No torch.

Reading, writing, presets, detection and checks live in ``fxpart.cluster_io``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from fxpart.errors import FxpartError, Problem


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


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices, in rank order, links, and what is known of hosts.

    collectives: measured seconds of collectives, see :mod:`fxpart.costmodels.communication`.
    extra: unknown keys of a file.
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    hosts: tuple[Host, ...] | msgspec.UnsetType = msgspec.UNSET
    collectives: tuple[CollectiveCurve, ...] | msgspec.UnsetType = msgspec.UNSET
    extra: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET

    @staticmethod
    def local(ranks: int) -> Cluster:
        """This host as ``ranks`` CPU devices that share its cores and memory evenly.

        The rates are estimated by formula, and each device's ``source`` says so. Raises FXP404
        where ``ranks`` is not between 1 and 16384.
        """
        from fxpart.cluster.host_detection import local

        return local(ranks)

    @staticmethod
    def parse(text: str | Path | Cluster) -> Cluster:
        """A cluster from a preset, "auto", or a .toml or .json file; clusters pass through.

        Presets: "local:4" (this host), "8xh100" (devices x model), "16x8xh100" (hosts x devices x
        model). Raises FXP401 (file), FXP402 (content) or FXP404 (no such preset).
        """
        from fxpart.cluster.presets import parse

        return text if isinstance(text, Cluster) else parse(text)

    @staticmethod
    def auto() -> Cluster:
        """torchrun's ranks if it started us, else this host's GPUs, else its cores."""
        from fxpart.cluster.host_detection import detect

        return detect()

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """The cluster in a .toml or .json file, checked. Raises FXP401 or FXP402."""
        from fxpart.cluster.files import load

        return load(Path(path))

    def dump(self, path: str | Path) -> None:
        """Write the cluster to ``path``: TOML or JSON by its suffix. Raises FXP401 or FXP603."""
        from fxpart.cluster.files import dump

        dump(self, Path(path))

    @property
    def hash(self) -> str:
        """The SHA-256 of the canonical JSON, in hex."""
        from fxpart.cluster.files import digest

        return digest(self)

    def part(self, devices: Iterable[int]) -> Cluster:
        """The cluster with some of its devices, by their places in ``devices``.

        With them go the links and hosts that they have to do with; ranks are their new order.
        Raises IndexError for a place that there is not.
        """
        kept = tuple(self.devices[place] for place in devices)
        hosts = {device.host for device in kept}
        known = {"*", *hosts, *(device.name for device in kept)}
        links = tuple(x for x in self.links if x.source in known and x.target in known)
        named = self.hosts
        if not isinstance(named, msgspec.UnsetType):
            named = tuple(host for host in named if host.name in hosts)
        return msgspec.structs.replace(self, devices=kept, links=links, hosts=named)

    def link(self, source: str | Device, target: str | Device) -> Link:
        """The link that a transfer from one device to another takes: the closest match.

        A pair of devices wins over a pair of hosts, that over a host and "*", and that over "*" and
        "*". A device reaches itself at its memory's speed. Raises FXP403 where nothing matches.
        For many look-ups make one :class:`fxpart.cluster.link_index.LinkIndex`.
        """
        from fxpart.cluster.link_index import LinkIndex

        names = [x if isinstance(x, str) else x.name for x in (source, target)]
        return LinkIndex(self)(names[0], names[1])

    def problems(self) -> tuple[Problem, ...]:
        """Everything that is wrong with the cluster; empty where it is valid."""
        from fxpart.cluster.validation import problems

        return problems(self)

    def validate(self) -> Cluster:
        """The cluster itself; raises FXP402 with every problem found where it is not valid."""
        found = self.problems()
        if found:
            raise FxpartError(found)
        return self
