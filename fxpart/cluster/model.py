"""The cluster: individual devices and the directed links between them. Does not import torch.

The modules for files, presets, detection and validation take the class as an argument, so that
there is no import cycle.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from fxpart.cluster.devices import CollectiveCurve, Device, Host, Link
from fxpart.errors import FxpartError, Problem


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices in rank order, their links and hosts.

    collectives: measured seconds of collectives, see :mod:`fxpart.costmodels.communication`.
    extra: unknown keys of a file.
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    hosts: tuple[Host, ...] | msgspec.UnsetType = msgspec.UNSET
    collectives: tuple[CollectiveCurve, ...] | msgspec.UnsetType = msgspec.UNSET
    extra: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET

    @staticmethod
    def local(ranks: int) -> Cluster:
        """Return this host as ``ranks`` CPU devices that share its cores and memory evenly.

        The rates are estimated by a formula, as stated in each device's ``source``. Raises FXP404
        if ``ranks`` is not between 1 and 131072.
        """
        from fxpart.cluster.host_detection import local

        return local(Cluster, ranks)

    @staticmethod
    def parse(text: str | Path | Cluster) -> Cluster:
        """Return a cluster from a preset, "auto", or a .toml or .json file; accepts a cluster, too.

        Presets: "local:4" (this host), "8xh100" (devices x model), "16x8xh100" (hosts x devices x
        model). Raises FXP401 (file), FXP402 (content) or FXP404 (unknown preset).
        """
        if isinstance(text, Cluster):
            return text
        from fxpart.cluster.files import SUFFIXES
        from fxpart.cluster.presets import MAX_TEXT, parse_local, parse_preset

        name = str(text) if isinstance(text, Path) else text.strip()[:MAX_TEXT]
        if isinstance(text, Path) or name.endswith(SUFFIXES):
            return Cluster.load(text if isinstance(text, Path) else name)
        if name.lower() == "auto":
            return Cluster.auto()
        ranks = parse_local(name)
        return parse_preset(Cluster, name) if ranks is None else Cluster.local(ranks)

    @staticmethod
    def auto() -> Cluster:
        """Return torchrun's ranks if it started this process, else local GPUs, else local cores."""
        from fxpart.cluster.host_detection import detect

        return detect(Cluster)

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Load and validate a .toml or .json file. Raises FXP401 or FXP402."""
        from fxpart.cluster.files import load

        return load(Cluster, Path(path))

    def dump(self, path: str | Path) -> None:
        """Write the cluster as TOML or JSON, by the suffix of ``path``. Raises FXP401 or FXP603."""
        from fxpart.cluster.files import dump

        dump(self, Path(path))

    @property
    def hash(self) -> str:
        """The SHA-256 of the canonical JSON, in hex."""
        from fxpart.cluster.files import digest

        return digest(self)

    def part(self, devices: Iterable[int]) -> Cluster:
        """Return a cluster of some devices, given by index, with their links and hosts.

        Ranks follow the new order. Raises IndexError for an index out of range.
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
        """Return the most specific link from one device to another.

        A pair of devices takes precedence over a pair of hosts, that over a host and "*", and that
        over two "*". The link of a device to itself has its memory bandwidth. Raises FXP403 if no
        link matches. For many lookups use :class:`fxpart.cluster.link_index.LinkIndex`.
        """
        from fxpart.cluster.link_index import LinkIndex

        names = [x if isinstance(x, str) else x.name for x in (source, target)]
        return LinkIndex(self)(names[0], names[1])

    def problems(self) -> tuple[Problem, ...]:
        """Return all problems of the cluster; empty if it is valid."""
        from fxpart.cluster.validation import problems

        return problems(self)

    def validate(self) -> Cluster:
        """Return the cluster itself; raises FXP402 with all problems if it is not valid."""
        found = self.problems()
        if found:
            raise FxpartError(found)
        return self
