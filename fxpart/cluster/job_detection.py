"""Detect this host and the other hosts of a job started by torchrun or SLURM."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from fxpart import environment
from fxpart.cluster.devices import Host
from fxpart.cluster.gpu_detection import find_gpus
from fxpart.cluster.gpu_sources import run
from fxpart.cluster.host_detection import check_ranks, cores, local
from fxpart.cluster.importers import nvidia_topology, slurm
from fxpart.cluster.importers.source_facts import (
    NO_NETWORK,
    ImportedCluster,
    ImportOptions,
    make_import_error,
    network,
    validate_imported,
)
from fxpart.cluster.merge import hosts_of
from fxpart.cluster.model import Cluster
from fxpart.cluster.presets import host_of_models
from fxpart.errors import FxpartError

# Bytes/s per unit of PCIe link width (x1) in one direction, after encoding, by generation.
_PCIE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def detect(facts: ImportOptions) -> ImportedCluster:
    """Return a cluster with the hosts of the job.

    Only this host is inspected. Other hosts are assumed to have the same devices, which is stated
    in their ``source``. Hosts are linked only if ``facts.network`` has the network's speed.
    """
    launch, job = environment.read_launch(), environment.read_slurm()
    nodes = slurm.expand(job.nodes) if job is not None else ()
    each = _per_host(launch, job)
    base, notes = _this_host(each, facts)
    if not nodes and launch is not None and not launch.one_machine:
        if launch.world % launch.local_world:
            why = f"{launch.world} ranks cannot be divided into hosts of {launch.local_world} ranks"
            raise make_import_error(
                "WORLD_SIZE", why, "start the same number of ranks on each host"
            )
        nodes = tuple(f"host{i}" for i in range(launch.world // launch.local_world))
    if not nodes:
        return ImportedCluster(validate_imported(base, "this host"), notes)
    # Without SLURM, this host is the first of the numbered hosts.
    inspected = job.node if job is not None and job.node in nodes else nodes[0]
    known = slurm.cpus(job.cpus, len(nodes)) if job is not None else ()
    made = slurm.replicate_host(base, nodes, known, network(facts), inspected)
    if job is None:
        made = _without_addresses(made)
    if len(nodes) > 1:
        others = [node for node in nodes if node != inspected]
        names = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if others[4:] else "")
        notes += (f"not inspected, assumed to be equal to {inspected}: {names}",)
        notes += (NO_NETWORK,) if facts.network is None else ()
    return ImportedCluster(validate_imported(made, "the job"), notes)


def _per_host(launch: environment.Launch | None, job: environment.Slurm | None) -> int | None:
    """Return the devices per host according to torchrun or SLURM; None if neither is used."""
    if launch is not None:
        return launch.local_world
    if job is None:
        return None
    gpus = slurm.count(job.gpus, "SLURM_GPUS_ON_NODE")
    return gpus or slurm.count(job.tasks, "SLURM_NTASKS_PER_NODE")


def _this_host(each: int | None, facts: ImportOptions) -> tuple[Cluster, tuple[str, ...]]:
    """Return this host as a cluster of ``each`` devices, by default all, and notes."""
    gpus = find_gpus()
    if not gpus:
        return local(Cluster, each or cores()), ()
    check_ranks(each or 0, gpus)
    base = host_of_models(Cluster, gpus[: each or len(gpus)])
    (name,) = hosts_of(base)
    here = Host(name=name, cores=cores(), source="the cores that this process may use")
    base = msgspec.structs.replace(base, hosts=(here,))
    if len(base.devices) < len(gpus) or len(gpus) == 1:
        return base, ()
    table = run("nvidia-smi", "topo", "-m")
    try:
        found = nvidia_topology.read(table, _topology_options(facts, base))
    except FxpartError as why:
        note = f"nvidia-smi topo -m was not used: {why.problems[0].why}"
        return base, (note,)
    return found.cluster, found.notes


def _topology_options(facts: ImportOptions, base: Cluster) -> ImportOptions:
    """Return the options for reading the topology, with the PCIe speed from the driver."""
    return ImportOptions(into=base, pcie=facts.pcie or _pcie_bandwidth(), nvlink=facts.nvlink)


def _pcie_bandwidth() -> float | None:
    """Return bytes/s of this host's slowest GPU slot in one direction; None if unknown."""
    text = run(
        "nvidia-smi",
        "--query-gpu=pcie.link.gen.max,pcie.link.width.max",
        "--format=csv,noheader,nounits",
    )
    rates = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != 2 or not all(word.isdigit() for word in words):
            return None
        rates.append(_PCIE.get(int(words[0]), 0.0) * int(words[1]))
    return min(rates, default=0.0) or None


def _without_addresses(cluster: Cluster) -> Cluster:
    """Return the cluster without addresses, as its host names were generated."""
    hosts = () if cluster.hosts is UNSET else cluster.hosts
    plain = tuple(msgspec.structs.replace(host, address="") for host in hosts)
    return msgspec.structs.replace(cluster, hosts=plain)
