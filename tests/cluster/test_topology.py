"""nvidia-smi topo -m: tables of several machines and drivers, compared with the data by hand."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.cluster.devices import Link
from fxpart.cluster.importers import nvidia_topology
from fxpart.cluster.importers.registry import detect_format
from fxpart.cluster.importers.source_facts import ImportOptions
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError

DATA = Path(__file__).parent / "data"
GB = 1e9
# The mesh of a DGX-1 with V100, as in NVIDIA's documentation: pairs with two links, with one.
TWO = {(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)}
ONE = {(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)}


def text(name: str) -> str:
    return (DATA / f"topo_{name}.txt").read_text()


def why(name_or_text: str, facts: ImportOptions) -> str:
    with pytest.raises(FxpartError) as caught:
        nvidia_topology.read(name_or_text, facts)
    assert caught.value.code == "FXP407"
    problem = caught.value.problems[0]
    return f"{problem.where}: {problem.why} {problem.fix}"


@pytest.mark.parametrize("name", ["8xh100", "8xa100", "dgx1_v100", "4xt4_old", "2xrtx4090"])
def test_format_is_detected(name: str) -> None:
    assert detect_format(text(name)) == "topo"


@pytest.mark.parametrize(
    ("name", "device", "rate"), [("8xh100", "h100", 18 * 26.5), ("8xa100", "a100", 12 * 25)]
)
def test_all_alike_is_one_link_of_the_host(name: str, device: str, rate: float) -> None:
    found = nvidia_topology.read(text(name), ImportOptions(device=device))
    (link,) = found.cluster.links
    assert (link.source, link.target, link.kind) == ("host0", "host0", "nvlink")
    assert link.bandwidth == rate * GB
    assert link.origin.startswith("nominal: ")
    assert any("links x" in note for note in found.notes)
    assert len(found.cluster.devices) == 8


def test_what_lies_near_each_gpu() -> None:
    devices = nvidia_topology.read(text("8xh100"), ImportOptions(device="h100")).cluster.devices
    said = [device.extra["topology"] for device in devices if device.extra is not msgspec.UNSET]
    assert len(said) == 8
    assert said[0] == {
        "cpu_affinity": "0-55,112-167",
        "numa_affinity": "0",
        "nics": {"mlx5_0": "PIX", "mlx5_1": "NODE", "mlx5_2": "SYS", "mlx5_3": "SYS"},
    }
    assert said[6]["nics"]["mlx5_3"] == "PIX" and said[6]["numa_affinity"] == "1"
    old = nvidia_topology.read(
        text("dgx1_v100"), ImportOptions(device="v100-sxm2-16gb", pcie=16 * GB)
    )
    extra = old.cluster.devices[3].extra
    assert extra is not msgspec.UNSET
    assert extra["topology"] == {
        "cpu_affinity": "0-19,40-59",
        "nics": {"mlx5_0": "PHB", "mlx5_2": "PIX", "mlx5_1": "SYS", "mlx5_3": "SYS"},
    }


def test_the_mesh_of_a_dgx_1() -> None:
    facts = ImportOptions(device="v100-sxm2-16gb", pcie=15.8 * GB)
    cluster = nvidia_topology.read(text("dgx1_v100"), facts).cluster
    for a, b in permutations(range(8), 2):
        link = cluster.link(cluster.devices[a], cluster.devices[b])
        pair = (min(a, b), max(a, b))
        links = 2 if pair in TWO else 1 if pair in ONE else 0
        assert link.kind == ("nvlink" if links else "pcie")
        assert link.bandwidth == (links * 25 * GB if links else 15.8 * GB)


def test_switches_are_segments() -> None:
    cluster = nvidia_topology.read(
        text("4xt4_old"), ImportOptions(device="t4", pcie=15.8 * GB)
    ).cluster
    named = {
        (a, b): cluster.link(cluster.devices[a], cluster.devices[b]).segment
        for a, b in permutations(range(4), 2)
    }
    assert named[0, 1] is named[2, 3] is msgspec.UNSET  # inside of a switch; no switch (PXB)
    assert {named[a, b] for a in (0, 1) for b in (2, 3)} == {"host0/pcie-switch-of-gpu0-up"}
    assert {named[a, b] for a in (2, 3) for b in (0, 1)} == {"host0/pcie-switch-of-gpu0-down"}


def test_pcie_is_never_guessed() -> None:
    assert "--pcie-gbs" in why(text("2xrtx4090"), ImportOptions(device="rtx-4090"))
    found = nvidia_topology.read(
        text("2xrtx4090"), ImportOptions(device="rtx-4090", pcie=31.5 * GB)
    )
    (link,) = found.cluster.links
    assert link.bandwidth == 31.5 * GB and "as given" in link.origin and "PHB" in link.origin


def test_the_speed_of_an_unknown_gpu_is_never_guessed() -> None:
    unknown = text("2xrtx4090").replace("PHB", "NV4")
    assert "--nvlink-gbs" in why(unknown, ImportOptions(device="rtx-4090"))
    (link,) = nvidia_topology.read(
        unknown, ImportOptions(device="rtx-4090", nvlink=14 * GB)
    ).cluster.links
    assert link.bandwidth == 56 * GB


def test_onto_a_cluster() -> None:
    into = Cluster.parse("2x8xv100-sxm2-16gb")
    facts = ImportOptions(into=into, pcie=15.8 * GB)
    assert "--host host0" in why(text("dgx1_v100"), facts)
    one = ImportOptions(into=into, pcie=15.8 * GB, hosts=("host1",))
    cluster = nvidia_topology.read(text("dgx1_v100"), one).cluster
    assert cluster.link("host0/gpu:0", "host0/gpu:1") == into.link("host0/gpu:0", "host0/gpu:1")
    assert cluster.link("host1/gpu:0", "host1/gpu:1").bandwidth == 25 * GB
    assert cluster.link("host0/gpu:0", "host1/gpu:1").kind == "net"
    both = ImportOptions(into=cluster, pcie=15.8 * GB, hosts=("host0", "host1"))
    twice = nvidia_topology.read(text("dgx1_v100"), both).cluster
    assert len(twice.links) == 2 * 56 + 1
    assert "has 8" in why(text("dgx1_v100"), ImportOptions(into=Cluster.parse("4xt4")))
    assert "no such host" in why(text("dgx1_v100"), ImportOptions(into=into, hosts=("x",)))


def test_without_devices() -> None:
    assert "--into" in why(text("8xh100"), ImportOptions())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("\tPHB\t X \t0-63", "\tPHB\t0-63", "is not a connection type of GPU1 and GPU1"),
        ("GPU1\tPHB\t X \t0-63\t0\t\tN/A\n", "", "GPU1 has a column, but no row"),
        ("GPU1\tPHB", "GPU1\tPIX", "GPU0 to GPU1 is PHB, but GPU1 to GPU0 is PIX"),
        ("GPU1\tPHB", "GPU1\tQPI", "'QPI' is not a connection type of GPU1 and GPU0"),
        ("GPU1\tPHB\t X \t0-63\t0\t\tN/A", "GPU1\tPHB", "the row has 1 types"),
        ("GPU1\tPHB", "GPU0\t X ", "GPU0 has two rows"),
        ("GPU0\tGPU1\tCPU", "CPU", "no line with the columns"),
    ],
)
def test_faults_name_the_line(old: str, new: str, words: str) -> None:
    whole = text("2xrtx4090")
    assert old in whole
    assert words in why(whole.replace(old, new, 1), ImportOptions(device="rtx-4090", pcie=1.0))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_random_tables(data: st.DataObject) -> None:
    """A table made of random types gives a link of the right speed for each pair."""
    count = data.draw(st.integers(1, 6))
    kinds = st.sampled_from(["NV1", "NV2", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"])
    types = {(a, b): data.draw(kinds) for b in range(count) for a in range(b)}
    gap = data.draw(st.sampled_from(["\t", "   "]))
    names = [f"GPU{i}" for i in range(count)]
    rows = [gap + gap.join([*names, "CPU Affinity"])]
    for a in range(count):
        cells = [types.get((min(a, b), max(a, b)), " X ") for b in range(count)]
        rows.append(gap.join([names[a], *cells, "0-7"]))
    cluster = nvidia_topology.read(
        "\n".join(rows), ImportOptions(device="a100", pcie=16 * GB)
    ).cluster
    assert len(cluster.devices) == count
    for a, b in permutations(range(count), 2):
        kind = types[min(a, b), max(a, b)]
        link = cluster.link(cluster.devices[a], cluster.devices[b])
        assert isinstance(link, Link)
        expected = 25 * GB * int(kind[2:]) if kind.startswith("NV") else 16 * GB
        assert link.bandwidth == expected
