"""Clusters: presets, files both ways, every fault at once, links by the closest match."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.cluster import gpu_detection, host_detection
from fxpart.cluster.devices import Device, Host, Link
from fxpart.cluster.files import decode, to_json, to_toml
from fxpart.cluster.link_index import LinkIndex
from fxpart.cluster.model import Cluster
from fxpart.cluster.presets import device_data, models
from fxpart.cluster.validation import MAX_DEVICES
from fxpart.errors import FxpartError

DATA = Path(__file__).parents[2] / "costmodels" / "devices"


def device(name: str = "a/cpu:0", host: str = "a", **changes: object) -> Device:
    fields: dict[str, object] = {
        "name": name,
        "kind": "cpu",
        "model": "cpu",
        "host": host,
        "memory": 10**9,
        "flops": {"float32": 1e12},
        "bandwidth": 1e11,
    }
    return Device(**(fields | changes))  # type: ignore[arg-type]


def link(source: str = "*", target: str = "*", **changes: object) -> Link:
    fields: dict[str, object] = {"latency": 1e-5, "bandwidth": 1e9, "kind": "net"}
    return Link(source=source, target=target, **(fields | changes))  # type: ignore[arg-type]


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


# files

names = st.text(
    st.characters(blacklist_categories=("C", "Z")) | st.sampled_from(' "\\'),
    min_size=1,
    max_size=12,
).filter(lambda s: s != "*" and s.isprintable())
rates = st.floats(1e-3, 1e18)
times = st.floats(0, 1e3)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Valid clusters with all sorts of names."""
    hosts = draw(st.lists(names.map("h{}".format), min_size=1, max_size=3, unique=True))
    labels = draw(st.lists(names.map("d{}".format), min_size=1, max_size=4, unique=True))
    devices = tuple(
        device(
            name,
            draw(st.sampled_from(hosts)),
            memory=draw(st.integers(1, 1 << 50)),
            flops=draw(st.dictionaries(names, rates, min_size=1, max_size=3)),
            bandwidth=draw(rates),
            launch=draw(times),
            source=draw(st.text(max_size=10).filter(lambda s: s.isprintable())),
        )
        for name in labels
    )
    ends = st.sampled_from(["*", *(d.name for d in devices), *(d.host for d in devices)])
    pairs = draw(st.lists(st.tuples(ends, ends), max_size=5, unique=True))
    links = tuple(link(a, b, latency=draw(times), bandwidth=draw(rates)) for a, b in pairs)
    return Cluster(name=draw(names), devices=devices, links=links)


@pytest.mark.slow
@given(clusters())
@settings(max_examples=60, deadline=None)
def test_files_both_ways(cluster: Cluster) -> None:
    assert cluster.problems() == ()
    assert decode(Cluster, to_toml(cluster).encode(), ".toml") == cluster
    assert decode(Cluster, to_json(cluster).encode(), ".json") == cluster
    assert json.loads(to_json(cluster)) == tomllib.loads(to_toml(cluster))


@pytest.mark.slow
@given(clusters(), st.integers(1, 1000))
@settings(max_examples=30, deadline=None)
def test_hash_follows_the_content(cluster: Cluster, more: int) -> None:
    flops = dict(reversed(cluster.devices[0].flops.items()))
    same = msgspec.structs.replace(cluster.devices[0], flops=flops)
    first, *rest = cluster.devices
    assert msgspec.structs.replace(cluster, devices=(same, *rest)).hash == cluster.hash
    other = msgspec.structs.replace(first, memory=first.memory + more)
    assert msgspec.structs.replace(cluster, devices=(other, *rest)).hash != cluster.hash


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_load_and_dump(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"cluster{suffix}"
    cluster = Cluster.parse("2x2xh100")
    cluster.dump(path)
    assert Cluster.load(path) == Cluster.parse(path) == Cluster.parse(str(path)) == cluster
    first = path.read_bytes()
    cluster.dump(path)
    assert path.read_bytes() == first


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    texts = {
        "broken.json": "{",
        "broken.toml": "name = ",
        "deep.json": "[" * 100_000,
        "deep.toml": "a = " + "[" * 100_000,
        "huge.json": '{"name": "a", "devices": [], "links": [], "n": 1e999}',
        "wrong.toml": 'name = "a"\ndevices = 3\nlinks = []',
        "hosts.json": '{"name": "a", "devices": [], "links": [], "hosts": [{"cores": 1}]}',
        "null.json": '{"name": "a", "devices": [], "links": [], "collectives": null}',
        "digits.toml": 'name = "a"\nlinks = []\ndevices = [{memory = ' + "9" * 10_000 + "}]",
        "binary.json": "\x00\x01",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        assert codes(Cluster.load, tmp_path / name) == ["FXP401"], name
    (tmp_path / "latin.toml").write_bytes(b'name = "\xff"')
    assert codes(Cluster.load, tmp_path / "latin.toml") == ["FXP401"]
    assert codes(Cluster.load, tmp_path / "none.toml") == ["FXP401"]
    assert codes(Cluster.load, tmp_path / "cluster.yaml") == ["FXP401"]
    assert codes(Cluster.load, tmp_path) == ["FXP401"]
    assert codes(Cluster.local(1).dump, tmp_path / "no" / "such.toml") == ["FXP603"]


@pytest.mark.slow
@given(st.data())
@settings(max_examples=200, deadline=None)
def test_changed_files_raise_only_our_errors(data: st.DataObject) -> None:
    suffix, write = data.draw(st.sampled_from([(".toml", to_toml), (".json", to_json)]))
    text = write(Cluster.parse("2x2xt4"))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 20)))
    new = data.draw(
        st.sampled_from(["", "-1", "nan", "inf", "0", "1e400", '"', "[", "}", "\n", "*"])
    )
    try:
        cluster = decode(Cluster, (text[:start] + new + text[end:]).encode(), suffix)
    except FxpartError as caught:
        assert {p.code for p in caught.problems} <= {"FXP401", "FXP402"}
    else:
        assert cluster.problems() == ()


# checks


def test_every_problem_is_found() -> None:
    cluster = Cluster(
        name="bad",
        devices=(
            device("x", memory=0),
            device("x", flops={"float32": math.nan}, bandwidth=-1.0),
            device("y", flops={}, launch=math.inf, kind="abacus"),
            device("a", host="a"),
            device("*", host=""),
        ),
        links=(
            link("x", "nowhere", bandwidth=0.0),
            link("*", "*", latency=-1.0),
            link("*", "*", latency=math.nan),
        ),
    )
    text = "\n".join(f"{p.where}: {p.why}" for p in cluster.problems())
    for part in (
        "2 devices have this name",
        "memory is 0 bytes",
        "flops of float32 is nan",
        "bandwidth is -1.0",
        "flops is empty",
        "launch is inf",
        "abacus",
        "a host has the same name",
        "host '' is empty",
        "name '*' is empty, '*'",
        "'nowhere' is neither",
        "bandwidth is 0.0",
        "latency is -1.0",
        "latency is nan",
        "defined 2 times",
    ):
        assert part in text, part
    assert set(codes(cluster.validate)) == {"FXP402"}
    assert len(codes(cluster.validate)) == len(cluster.problems())


def test_empty_and_oversized() -> None:
    assert codes(Cluster(name="", devices=(), links=()).validate) == ["FXP402"]
    many = (device(),) * (MAX_DEVICES + 1)
    assert codes(Cluster(name="", devices=many, links=()).validate) == ["FXP402"]


# links


def test_closest_link_wins() -> None:
    """Against a search over all patterns, ranked as the documentation says."""
    devices = tuple(device(f"{h}/{i}", h) for h in "ab" for i in range(2))
    ends = ["*", "a", "b", *(d.name for d in devices)]
    everything = [
        link(s, t, bandwidth=1.0 + i) for i, (s, t) in enumerate(itertools.product(ends, ends))
    ]

    def closeness(end: str, d: Device) -> int | None:
        return {d.name: 2, d.host: 1, "*": 0}.get(end)

    for seed in range(60):
        chosen = [x for i, x in enumerate(everything) if (i * 7919 + seed * 104729) % 5 == 0]
        cluster = Cluster(name="c", devices=devices, links=tuple(chosen))
        for a, b in itertools.permutations(devices, 2):
            ranked = []
            for x in chosen:
                s, t = closeness(x.source, a), closeness(x.target, b)
                if s is not None and t is not None:
                    ranked.append((s + t, min(s, t), s, x.bandwidth))
            if ranked:
                assert cluster.link(a, b).bandwidth == max(ranked)[3]
            else:
                assert codes(cluster.link, a, b) == ["FXP403"]


def test_links_are_directed_and_missing_ones_name_the_pair() -> None:
    devices = (device("a/0", "a"), device("b/0", "b"))
    cluster = Cluster(name="c", devices=devices, links=(link("a", "b"),))
    assert cluster.link("a/0", "b/0").bandwidth == 1e9
    with pytest.raises(FxpartError, match="b/0 -> a/0"):
        cluster.link("b/0", "a/0")
    with pytest.raises(FxpartError, match="no device of this name"):
        cluster.link("a/0", "c/0")
    own = cluster.link("a/0", "a/0")
    assert (own.latency, own.bandwidth) == (0.0, devices[0].bandwidth)


@pytest.mark.slow
def test_imports_without_torch() -> None:
    code = (
        "import sys, fxpart.cluster as c, fxpart.costs, fxpart.costmodels;"
        "c.Cluster.parse('16x8xh100').hash;"
        "sys.exit(bool({'torch', 'sympy', 'ortools'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0


def test_hosts_of_several_models_side_by_side() -> None:
    both = Cluster.parse("2x4xh100+3x8xa100").validate()
    assert [d.model for d in both.devices] == ["h100-sxm"] * 8 + ["a100-sxm-80gb"] * 24
    assert sorted({d.host for d in both.devices}) == [f"host{i}" for i in range(5)]
    fast, slow = Cluster.parse("2x4xh100"), Cluster.parse("3x8xa100")
    assert both.link(both.devices[0], both.devices[1]) == fast.link(*fast.devices[:2])
    between = both.link(both.devices[0], both.devices[-1])
    assert between.bandwidth == min(
        c.link(c.devices[0], c.devices[-1]).bandwidth for c in (fast, slow)
    )
    for text in ("2x4xh100+", "2x4xh100+local:2", "9999x8xh100+9999x8xa100"):
        with pytest.raises(FxpartError, match="FXP404"):
            Cluster.parse(text)
