"""The cluster: devices as individuals and the directed links between them. No torch.

Reading, writing, presets, detection and checks are modules beside this one; they are given the
class and do not import it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from fxpart.cluster.devices import CollectiveCurve, Device, Host, Link
from fxpart.errors import FxpartError, Problem


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

        return local(Cluster, ranks)

    @staticmethod
    def parse(text: str | Path | Cluster) -> Cluster:
        """A cluster from a preset, "auto", or a .toml or .json file; clusters pass through.

        Presets: "local:4" (this host), "8xh100" (devices x model), "16x8xh100" (hosts x devices x
        model). Raises FXP401 (file), FXP402 (content) or FXP404 (no such preset).
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
        """torchrun's ranks if it started us, else this host's GPUs, else its cores."""
        from fxpart.cluster.host_detection import detect

        return detect(Cluster)

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """The cluster in a .toml or .json file, checked. Raises FXP401 or FXP402."""
        from fxpart.cluster.files import load

        return load(Cluster, Path(path))

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
