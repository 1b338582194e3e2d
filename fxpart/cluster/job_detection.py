"""``fxpart cluster detect``: this host, and the hosts of the job that torchrun or SLURM started."""

from __future__ import annotations

import shutil
import subprocess

import msgspec
from msgspec import UNSET

from fxpart import environment
from fxpart.cluster.devices import Host
from fxpart.cluster.host_detection import cores, local, nvidia_models
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
from fxpart.cluster.presets import grid
from fxpart.errors import FxpartError

# Bytes/s of one PCIe lane in one direction, after encoding, by generation.
_PCIE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def detect(facts: ImportOptions) -> ImportedCluster:
    """This host's devices, and as many hosts as the job has.

    Only this host is looked at: devices of others are taken to be like its own, and their source
    says so. Between hosts there is a link only where ``facts.network`` gives its speed.
    """
    launch, job = environment.read_launch(), environment.read_slurm()
    nodes = slurm.expand(job.nodes) if job is not None else ()
    each = _per_host(launch, job)
    base, notes = _this_host(each, facts)
    if not nodes and launch is not None and not launch.one_machine:
        if launch.world % launch.local_world:
            why = f"{launch.world} ranks do not fill hosts of {launch.local_world}"
            raise make_import_error(
                "WORLD_SIZE", why, "start the same number of ranks on each host"
            )
        nodes = tuple(f"host{i}" for i in range(launch.world // launch.local_world))
    if not nodes:
        return ImportedCluster(validate_imported(base, "this host"), notes)
    # Without SLURM the first of the numbered hosts stands for this one.
    seen = job.node if job is not None and job.node in nodes else nodes[0]
    known = slurm.cpus(job.cpus, len(nodes)) if job is not None else ()
    made = slurm.named(base, nodes, known, network(facts), seen)
    if job is None:
        made = _unaddressed(made)
    if len(nodes) > 1:
        others = [node for node in nodes if node != seen]
        words = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if others[4:] else "")
        notes += (f"not looked at, taken to be like {seen}: {words}",)
        notes += (NO_NETWORK,) if facts.network is None else ()
    return ImportedCluster(validate_imported(made, "the job"), notes)


def _per_host(launch: environment.Launch | None, job: environment.Slurm | None) -> int | None:
    """Devices on each host, as torchrun or SLURM say; None where neither does."""
    if launch is not None:
        return launch.local_world
    if job is None:
        return None
    gpus = slurm.count(job.gpus, "SLURM_GPUS_ON_NODE")
    return gpus or slurm.count(job.tasks, "SLURM_NTASKS_PER_NODE")


def _this_host(each: int | None, facts: ImportOptions) -> tuple[Cluster, tuple[str, ...]]:
    """This host as a cluster of ``each`` devices, or of as many as it has."""
    gpus = nvidia_models()
    alike = len(set(gpus)) == 1 and (each or 0) <= len(gpus)
    if not alike:
        notes = ("its GPUs are not all of one model; left out",) if len(set(gpus)) > 1 else ()
        return local(Cluster, each or cores()), notes
    base = grid(Cluster, 1, each or len(gpus), gpus[0])
    (name,) = hosts_of(base)
    here = Host(name=name, cores=cores(), source="the cores that this process may use")
    base = msgspec.structs.replace(base, hosts=(here,))
    if len(base.devices) < len(gpus) or len(gpus) == 1:
        return base, ()
    table = _printed("topo", "-m")
    try:
        found = nvidia_topology.read(table, _with(facts, base))
    except FxpartError as why:
        note = f"nvidia-smi topo -m was not used: {why.problems[0].why}"
        return base, (note,)
    return found.cluster, found.notes


def _with(facts: ImportOptions, base: Cluster) -> ImportOptions:
    """What reading the topology needs: the devices, and PCIe's speed as the driver says it."""
    return ImportOptions(into=base, pcie=facts.pcie or _pcie(), nvlink=facts.nvlink)


def _pcie() -> float | None:
    """Bytes/s of this host's slowest GPU slot in one direction; None where it is not said."""
    text = _printed(
        "--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader,nounits"
    )
    rates = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != 2 or not all(word.isdigit() for word in words):
            return None
        rates.append(_PCIE.get(int(words[0]), 0.0) * int(words[1]))
    return min(rates, default=0.0) or None


def _printed(*arguments: str) -> str:
    """What nvidia-smi prints; "" where it cannot be asked."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _unaddressed(cluster: Cluster) -> Cluster:
    """The cluster without addresses: its hosts' names are numbers of our own."""
    hosts = () if cluster.hosts is UNSET else cluster.hosts
    plain = tuple(msgspec.structs.replace(host, address="") for host in hosts)
    return msgspec.structs.replace(cluster, hosts=plain)
