"""fxpart cluster detect: this host, torchrun's and SLURM's job, with nvidia-smi as a script."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fxpart.cluster import gpu_detection, host_detection, job_detection
from fxpart.cluster.importers.source_facts import ImportOptions
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError

DATA = Path(__file__).parent / "data"
ELSEWHERE = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURMD_NODENAME", "SLURM_GPUS_ON_NODE",
    "SLURM_NTASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ELSEWHERE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(job_detection, "find_gpus", lambda: [])


def nvidia(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, product: str, topo: str) -> None:
    """An nvidia-smi that prints what a machine with eight of a product does."""
    program = tmp_path / "nvidia-smi"
    names = "".join(f"echo '{product}'\n" for _ in range(8))
    slots = "".join("echo '4, 16'\n" for _ in range(8))
    program.write_text(
        f'#!/bin/sh\ncase "$*" in\n"topo -m") cat {DATA / topo};;\n'
        f"*pcie*) {slots};;\n*) {names};;\nesac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(job_detection, "find_gpus", gpu_detection.find_gpus)


def test_this_host() -> None:
    found = job_detection.detect(ImportOptions())
    assert found.cluster == Cluster.local(host_detection.cores()) and found.notes == ()


def test_gpus_and_their_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvidia(monkeypatch, tmp_path, "NVIDIA H100 80GB HBM3", "topo_8xh100.txt")
    found = job_detection.detect(ImportOptions())
    assert [device.model for device in found.cluster.devices] == ["h100-sxm"] * 8
    (link,) = found.cluster.links
    assert link.bandwidth == 18 * 26.5e9
    assert found.cluster.hosts is not msgspec.UNSET
    assert found.cluster.hosts[0].cores == host_detection.cores()


def test_pcie_is_what_the_driver_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvidia(monkeypatch, tmp_path, "Tesla V100-SXM2-16GB", "topo_dgx1_v100.txt")
    cluster = job_detection.detect(ImportOptions()).cluster
    link = cluster.link("host0/gpu:0", "host0/gpu:7")
    assert link.kind == "pcie" and link.bandwidth == pytest.approx(16 * 1.969e9)
    given = job_detection.detect(ImportOptions(pcie=1e10)).cluster
    assert given.link("host0/gpu:0", "host0/gpu:7").bandwidth == 1e10


def test_a_topology_that_does_not_fit_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvidia(monkeypatch, tmp_path, "Tesla V100-SXM2-16GB", "topo_4xt4_old.txt")
    found = job_detection.detect(ImportOptions())
    assert len(found.cluster.devices) == 8
    assert "topo -m was not used" in found.notes[0]


def torchrun(monkeypatch: pytest.MonkeyPatch, world: int, each: int) -> None:
    values = {"RANK": 0, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": each}
    for name, value in (values | {"MASTER_ADDR": "x", "MASTER_PORT": 1}).items():
        monkeypatch.setenv(name, str(value))


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun(monkeypatch, 4, 4)
    assert job_detection.detect(ImportOptions()).cluster == Cluster.local(4)
    torchrun(monkeypatch, 6, 2)
    found = job_detection.detect(ImportOptions())
    names = [device.name for device in found.cluster.devices]
    assert names[:3] == ["host0/cpu:0", "host0/cpu:1", "host1/cpu:0"] and len(names) == 6
    assert "assumed to be equal to host0" in found.cluster.devices[2].source
    assert "assumed to be equal to" not in found.cluster.devices[0].source
    assert any("is unknown" in note for note in found.notes)
    with pytest.raises(FxpartError, match="FXP403"):
        found.cluster.link("host0/cpu:0", "host1/cpu:0")
    assert (
        job_detection.detect(ImportOptions(network=1e9)).cluster.link(names[0], names[2]).bandwidth
        == 1e9
    )
    torchrun(monkeypatch, 5, 2)
    with pytest.raises(FxpartError, match="FXP407"):
        job_detection.detect(ImportOptions())


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "8(x3)")
    found = job_detection.detect(ImportOptions())
    assert [d.host for d in found.cluster.devices] == ["n1", "n1", "n2", "n2", "n3", "n3"]
    like = ["assumed to be equal to n2" in d.source for d in found.cluster.devices]
    assert like == [True, True, False, False, True, True]
    assert found.cluster.hosts is not msgspec.UNSET
    assert [(h.cores, h.address) for h in found.cluster.hosts] == [(8, f"n{i}") for i in (1, 2, 3)]
    assert found.cluster.link("n3/cpu:0", "n3/cpu:1").kind == "shm"
