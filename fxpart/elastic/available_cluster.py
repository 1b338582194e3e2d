"""The cluster as devices go and come back: which are left, and what they are then."""

from __future__ import annotations

from collections.abc import Collection

from fxpart.cluster.model import Cluster
from fxpart.errors import error


def remove_devices(cluster: Cluster, lost: Collection[str]) -> Cluster:
    """The cluster with the devices that are left, in their order.

    lost: names of devices, or of hosts, which then go with all their devices; names that it does
    not have are not missed. Links and hosts that say nothing of what is left go too. Raises FXP519
    where no device is left.
    """
    gone = set(lost)
    left = [k for k, d in enumerate(cluster.devices) if d.name not in gone and d.host not in gone]
    if len(left) == len(cluster.devices):
        return cluster
    if not left:
        raise error(
            "FXP519",
            where=f"cluster {cluster.name}",
            why=f"none of its {len(cluster.devices)} devices is left",
            fix="start again when there are some; nothing is lost",
        )
    return cluster.part(left)


def adapt_cluster_to_ranks(given: str, ranks: int, lost: Collection[str] = ()) -> Cluster:
    """The cluster that a run of ``ranks`` ranks is planned for, as the command line names it.

    "auto" is this host shared evenly by so many ranks: each has more of it when they are fewer.
    Any other cluster is what is left of it, of which the planner takes as many devices as it needs.
    Raises FXP519 where fewer than ``ranks`` are left, and what reading a cluster raises.
    """
    if given == "auto":
        return Cluster.parse(f"local:{ranks}")
    left = remove_devices(Cluster.parse(given), lost)
    if len(left.devices) < ranks:
        word = "device is" if len(left.devices) == 1 else "devices are"
        raise error(
            "FXP519",
            where=f"cluster {left.name}",
            why=f"{len(left.devices)} {word} left, and {ranks} ranks are asked for",
            fix=f"ask for {len(left.devices)} at most, or add devices",
        )
    return left
