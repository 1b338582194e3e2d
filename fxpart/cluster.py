"""The cluster: devices as individuals and the directed links between them. No torch."""

from __future__ import annotations

import msgspec


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device that runs one rank.

    name: unique, e.g. "host0/gpu:3". kind: "cpu" or "gpu". model: e.g. "h100-sxm". memory: bytes.
    flops: peak FLOP/s by dtype ("float32", "bfloat16"). bandwidth: memory bytes/s. launch: seconds
    each op costs at least. source: where the figures come from.
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


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A directed link. source and target name a device, a host, or "*"; the closest match wins.

    latency: seconds; bandwidth: bytes/s; kind: "shm", "nvlink", "net", ...
    """

    source: str
    target: str
    latency: float
    bandwidth: float
    kind: str = ""


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices, in rank order, and links."""

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
