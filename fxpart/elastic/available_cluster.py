"""The cluster that is left after devices are lost, and for another number of ranks."""

from __future__ import annotations

from collections.abc import Collection

from fxpart.cluster.model import Cluster
from fxpart.errors import error


def remove_devices(cluster: Cluster, lost: Collection[str]) -> Cluster:
    """Return the cluster without lost devices, in the original order.

    lost: names of devices, or of hosts with all their devices; unknown names are ignored. Links and
    hosts of lost devices are removed too. Raises FXP519 if no device is left.
    """
    lost_names = set(lost)
    left = [
        k
        for k, d in enumerate(cluster.devices)
        if d.name not in lost_names and d.host not in lost_names
    ]
    if len(left) == len(cluster.devices):
        return cluster
    if not left:
        raise error(
            "FXP519",
            where=f"cluster {cluster.name}",
            why=f"all {len(cluster.devices)} devices are lost",
            fix="restart when devices are available; checkpoints are kept",
        )
    return cluster.part(left)


def adapt_cluster_to_ranks(given: str, ranks: int, lost: Collection[str] = ()) -> Cluster:
    """Return the cluster to plan a run of ``ranks`` ranks for. given: as on the command line.

    "auto" is this host, shared evenly by that many ranks. Any other cluster is what is left of it;
    the planner uses as many devices as it needs. Raises FXP519 if fewer than ``ranks`` are left,
    and what reading a cluster raises.
    """
    if given == "auto":
        return Cluster.parse(f"local:{ranks}")
    left = remove_devices(Cluster.parse(given), lost)
    if len(left.devices) < ranks:
        noun = "device is" if len(left.devices) == 1 else "devices are"
        raise error(
            "FXP519",
            where=f"cluster {left.name}",
            why=f"{len(left.devices)} {noun} left, but {ranks} ranks are requested",
            fix=f"request at most {len(left.devices)} ranks, or add devices",
        )
    return left
