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

from fxpart.cluster.devices import Device, Link
from fxpart.cluster.files import decode, to_json, to_toml
from fxpart.cluster.model import Cluster
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
