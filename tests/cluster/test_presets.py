"""Clusters by name: presets, devices and this host."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path

import pytest

from fxpart.cluster import gpu_detection, host_detection
from fxpart.cluster.devices import Host
from fxpart.cluster.link_index import LinkIndex
from fxpart.cluster.model import Cluster
from fxpart.cluster.presets import device_data, models
from fxpart.errors import FxpartError

DATA = Path(__file__).parents[2] / "costmodels" / "devices"


def codes(call: object, *args: object) -> list[str]:
    with pytest.raises(FxpartError) as caught:
        call(*args)  # type: ignore[operator]
    return [problem.code for problem in caught.value.problems]


# presets and this host


@pytest.mark.parametrize(
    ("text", "hosts", "count"),
    [
        ("8xh100", 1, 8),
        ("16x8xh100", 16, 128),
        ("2x8xa100", 2, 16),
        ("1xt4", 1, 1),
        ("3X2XCPU", 3, 6),
    ],
)
def test_presets(text: str, hosts: int, count: int) -> None:
    cluster = Cluster.parse(text).validate()
    assert len(cluster.devices) == count
    assert len({d.host for d in cluster.devices}) == hosts
    for a, b in itertools.permutations(cluster.devices, 2):
        found = cluster.link(a, b) if count <= 6 else LinkIndex(cluster)(a.name, b.name)
        assert (found.kind == "net") == (a.host != b.host)


@pytest.mark.parametrize("model", sorted(p.stem for p in DATA.glob("*.toml")))
def test_device_data(model: str) -> None:
    data = tomllib.loads((DATA / f"{model}.toml").read_text())
    assert data["name"] == model and model in models()
    assert data["source"] and data["date"][:2] == "20"
    assert data["link"]["source"] and data["network"]["source"]
    assert 10**9 < data["memory"] < 10**12
    assert "float32" in data["flops"]
    assert 1e11 < data["flops"]["float32"] <= max(data["flops"].values()) < 1e16
    assert 1e11 < data["bandwidth"] < 1e13
    assert 1e9 <= data["network"]["bandwidth"] < data["bandwidth"]
    assert data["link"]["bandwidth"] < data["bandwidth"]
    for alias in data["aliases"]:
        assert device_data(alias)["name"] == model
    Cluster.parse(f"2x2x{model}").validate()


@pytest.mark.parametrize(
    ("product", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("AMD Instinct MI250X", "mi250x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI355X", "mi355x"),
        ("Tesla P40", "p40"),
        ("Tesla P100-SXM2-16GB", "p100-sxm2-16gb"),
        ("Tesla P100-PCIE-16GB", "p100-pcie-16gb"),
        ("NVIDIA GeForce GTX 1080 Ti", "gtx-1080-ti"),
        ("Tesla V100-PCIE-32GB", "v100-pcie-32gb"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti"),
        ("NVIDIA TITAN RTX", "titan-rtx"),
        ("NVIDIA A30", "a30"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA RTX A5000", "a5000"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A800-SXM4-80GB", "a800-sxm-80gb"),
        ("NVIDIA H800", "h800-sxm"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L20", "l20"),
        ("AMD Instinct MI100", "mi100"),
        ("AMD Instinct MI210", "mi210"),
        ("AMD Instinct MI250", "mi250"),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_product_names(product: str, model: str | None) -> None:
    assert gpu_detection.match_model(product) == model


@pytest.mark.parametrize(
    "text",
    ["", "8xfoo", "0xh100", "999999999x8xh100", "999999999xh100", "local:0", "local:999999", "h100",
     "8x8x8xh100", "-1xh100", "８xh100x", "x" * 10_000, "1e3xh100"],
)  # fmt: skip
def test_what_is_no_preset(text: str) -> None:
    with pytest.raises(FxpartError) as caught:
        Cluster.parse(text)
    assert caught.value.code == "FXP404"
    assert "h100" in caught.value.problems[0].fix
    assert len(str(caught.value)) < 2000


def test_local_shares_the_host() -> None:
    one, four = Cluster.local(1), Cluster.local(4).validate()
    assert len(four.devices) == 4 and len({d.host for d in four.devices}) == 1
    for rank in four.devices:
        assert rank.memory == one.devices[0].memory // 4
        assert rank.flops["float32"] == pytest.approx(one.devices[0].flops["float32"] / 4)
        assert rank.bandwidth == pytest.approx(one.devices[0].bandwidth / 4)
        assert "estimate" in rank.source
        assert rank.threads == max(1, host_detection.cores() // 4)
    assert four.hosts == (
        Host(
            name="local", cores=host_detection.cores(), source="the cores that this process may use"
        ),
    )
    assert four.hash == Cluster.parse("local:4").hash
    assert one.devices[0].memory <= host_detection.memory()


def test_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(host_detection, "find_gpus", lambda: [])
    assert Cluster.auto() == Cluster.local(host_detection.cores())
    monkeypatch.setattr(host_detection, "find_gpus", lambda: ["h100-sxm"] * 2)
    assert Cluster.auto() == Cluster.parse("2xh100")
    monkeypatch.setattr(host_detection, "find_gpus", lambda: ["h100-sxm", "t4"])
    mixed = Cluster.auto().validate()
    assert [(d.name, d.model) for d in mixed.devices] == [
        ("host0/gpu:0", "h100-sxm"),
        ("host0/gpu:1", "t4"),
    ]
    assert mixed.link("host0/gpu:0", "host0/gpu:1").bandwidth == 0.65 * 1.6e10  # the T4
    launched = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (launched | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    assert [d.model for d in Cluster.auto().devices] == ["h100-sxm", "t4"] * 2
    monkeypatch.setattr(host_detection, "find_gpus", lambda: ["h100-sxm"] * 2)
    assert Cluster.auto() == Cluster.parse("2x2xh100")
    monkeypatch.setattr(host_detection, "find_gpus", lambda: ["h100-sxm"])
    with pytest.raises(FxpartError, match="FXP602"):
        Cluster.auto()
