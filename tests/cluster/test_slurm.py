"""SLURM's node lists, against a list written out; what the environment gives."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.cluster.importers import slurm
from fxpart.cluster.importers.registry import detect_format
from fxpart.cluster.importers.source_facts import ImportOptions
from fxpart.cluster.model import Cluster
from fxpart.environment import read_slurm as job
from fxpart.errors import FxpartError


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("node7", "node7"),
        ("node[01-03,7],gpu-a[1-2]", "node01 node02 node03 node7 gpu-a1 gpu-a2"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("a,b[3]-ib,a", "a b3-ib"),
        ("[1-2]x", "1x 2x"),
    ],
)
def test_lists(text: str, nodes: str) -> None:
    assert slurm.expand(text) == tuple(nodes.split())


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,,b", "n[", "n]", "n[1-2", "n[[1]]", "n[2-1]", "n[a-b]", "n[]", "n[1-]", "n[-1]",
     "a b", "n[1,,2]", "n[0-99999999]", "n[1-400][1-400]", "é[1-2]", "n[١-٣]"],
)  # fmt: skip
def test_no_lists(text: str) -> None:
    with pytest.raises(FxpartError, match="FXP407"):
        slurm.expand(text)


PARTS = st.lists(
    st.tuples(
        st.sampled_from(["n", "gpu-", "r1c", "x."]),
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=3),
        st.integers(1, 4),
        st.sampled_from(["", "-ib", ".lan"]),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.slow
@given(PARTS)
@settings(max_examples=80, deadline=None)
def test_written_out(parts: list[tuple[str, list[tuple[int, int]], int, str]]) -> None:
    texts, expected = [], []
    for prefix, ranges, width, suffix in parts:
        inner = [
            f"{first:0{width}}" if not more else f"{first:0{width}}-{first + more:0{width}}"
            for first, more in ranges
        ]
        texts.append(f"{prefix}[{','.join(inner)}]{suffix}")
        for first, more in ranges:
            expected += [
                f"{prefix}{number:0{width}}{suffix}" for number in range(first, first + more + 1)
            ]
    assert slurm.expand(",".join(texts)) == tuple(dict.fromkeys(expected))


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=3), min_size=1, max_size=3))
@settings(deadline=None)
def test_several_brackets(choices: list[list[int]]) -> None:
    text = "".join(f"a[{','.join(map(str, choice))}]" for choice in choices)
    names = ["".join(f"a{n}" for n in numbers) for numbers in product(*choices)]
    assert slurm.expand(text) == tuple(dict.fromkeys(names))


def test_a_cluster_from_a_list() -> None:
    assert detect_format("node[01-02]\n") == "slurm"
    found = slurm.read("node[01-02]\n", ImportOptions(device="a100", per_host=4))
    assert [d.name for d in found.cluster.devices][3:5] == ["node01/gpu:3", "node02/gpu:0"]
    assert found.cluster.link("node02/gpu:0", "node02/gpu:1").kind == "nvlink"
    assert any("--network-gbs" in note for note in found.notes)
    with pytest.raises(FxpartError, match="node01/gpu:0 -> node02/gpu:0"):
        found.cluster.link("node01/gpu:0", "node02/gpu:0")
    facts = ImportOptions(device="a100", per_host=4, network=25e9, network_latency=2e-5)
    link = slurm.read("node01\nnode02\n", facts).cluster.link("node01/gpu:0", "node02/gpu:0")
    assert (link.bandwidth, link.latency, link.origin) == (25e9, 2e-5, "given on the command line")


def test_a_cluster_from_the_environment() -> None:
    text = (
        "SLURM_JOB_ID=17\nSLURM_JOB_NODELIST=n[1-3]\nSLURM_GPUS_ON_NODE=2\n"
        "SLURM_JOB_CPUS_PER_NODE='64(x2),32'\n"
    )
    assert detect_format(text) == "slurm"
    cluster = slurm.read(text, ImportOptions(device="h100")).cluster
    assert len(cluster.devices) == 6
    assert cluster.hosts is not msgspec.UNSET
    assert [(h.name, h.cores) for h in cluster.hosts] == [("n1", 64), ("n2", 64), ("n3", 32)]


def test_addresses_onto_a_cluster() -> None:
    cluster = slurm.read("n[1-2]", ImportOptions(into=Cluster.parse("2x2xt4"))).cluster
    assert cluster.hosts is not msgspec.UNSET
    assert [(h.name, h.address) for h in cluster.hosts] == [("host0", "n1"), ("host1", "n2")]
    assert cluster.devices == Cluster.parse("2x2xt4").devices
    with pytest.raises(FxpartError, match="has 3 nodes"):
        slurm.read("n[1-3]", ImportOptions(into=Cluster.parse("2x2xt4")))


@pytest.mark.parametrize(
    ("text", "facts", "words"),
    [
        ("n[1-2]", ImportOptions(per_host=2), "--device"),
        ("n[1-2]", ImportOptions(device="t4"), "--per-host"),
        (
            "SLURM_JOB_NODELIST=n1\nSLURM_GPUS_ON_NODE=gpu:a",
            ImportOptions(device="t4"),
            "not a number of",
        ),
        (
            "SLURM_JOB_NODELIST=n1\nSLURM_JOB_CPUS_PER_NODE=4x",
            ImportOptions(device="t4", per_host=1),
            "4x",
        ),
        ("SLURM_JOB_ID=1", ImportOptions(), "neither SLURM_JOB_NODELIST"),
        ("first line\nnode 2", ImportOptions(), "line 1"),
        ("n[1-9999]", ImportOptions(device="t4", per_host=16), "more than"),
    ],
)
def test_what_is_missing(text: str, facts: ImportOptions, words: str) -> None:
    with pytest.raises(FxpartError, match="FXP407") as caught:
        slurm.read(text, facts)
    assert words in str(caught.value)


def test_the_environment_is_text() -> None:
    assert job({"PATH": "/bin"}) is None
    found = job(
        {"SLURM_NODELIST": "old[1-2]", "SLURM_NTASKS_PER_NODE": "4", "SLURMD_NODENAME": "n"}
    )
    assert found is not None
    assert (found.nodes, found.tasks, found.node, found.gpus) == ("old[1-2]", "4", "n", "")
