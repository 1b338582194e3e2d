"""PaddlePaddle's cluster JSON: in and out without loss, and what it means."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster_drawing import VALUES, clusters
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.cluster.files import decode, to_json, to_toml
from fxpart.cluster.importers import paddle, paddle_document
from fxpart.cluster.importers.paddle_export import document_of
from fxpart.cluster.importers.paddle_rank_map import mapping_of, reorder_devices
from fxpart.cluster.importers.registry import detect_format
from fxpart.cluster.importers.source_facts import ImportOptions
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError

DATA = Path(__file__).parent / "data"
TEXT = (DATA / "paddle_2_machines.json").read_text()
RANKS = (DATA / "paddle_ranks.json").read_text()


def imported(document: Any, **facts: Any) -> Cluster:
    return paddle.read(json.dumps(document), ImportOptions(**facts)).cluster


def why(document: Any, **facts: Any) -> str:
    with pytest.raises(FxpartError) as caught:
        imported(document, **facts)
    assert caught.value.code == "FXP407"
    return str(caught.value)


def same(one: Any, other: Any) -> bool:
    """Equal key by key, types of numbers included."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def test_what_a_document_means() -> None:
    assert detect_format(TEXT) == "paddle"
    cluster = paddle.read(TEXT, ImportOptions()).cluster
    assert [d.name for d in cluster.devices] == ["m0/gpu:0", "m0/gpu:1", "m1/gpu:0"]
    first, _, last = cluster.devices
    assert first.memory == 40 * 10**9 and first.kind == "gpu"
    assert first.flops == {"float32": 19.5e12, "float64": 9.7e12, "float16": 624e12}
    assert "float16" not in last.flops
    assert first.bandwidth == 1.555e12 and "a100-sxm-40gb" in first.source
    assert cluster.hosts is not msgspec.UNSET
    assert [(h.name, h.address) for h in cluster.hosts] == [("m0", "10.0.0.1"), ("m1", "10.0.0.2")]
    near = cluster.link("m0/gpu:0", "m0/gpu:1")
    assert (near.latency, near.bandwidth, near.kind) == (0.0, 235e9, "nvlink")
    assert cluster.link("m0/gpu:1", "m1/gpu:0").latency == pytest.approx(5e-5)


def test_a_missing_latency_comes_from_alpha_latency_or_is_said() -> None:
    """base + inter + hop x switch and base + intra, in µs."""
    cluster = paddle.read(TEXT, ImportOptions()).cluster
    assert cluster.link("m0/gpu:0", "m1/gpu:0").latency == pytest.approx((8.4 + 9.6 + 10) / 1e6)
    assert cluster.link("m0/gpu:1", "m0/gpu:0").latency == pytest.approx((8.4 + 3.4) / 1e6)
    document = json.loads(TEXT)
    del document["alpha_latency"]
    found = paddle.read(json.dumps(document), ImportOptions())
    assert "no latency" in found.cluster.link("m0/gpu:1", "m0/gpu:0").origin
    assert "4 links have no latency" in found.notes[0]


def test_memory_bandwidth_is_never_guessed() -> None:
    document = json.loads(TEXT)
    document["machines"][1]["devices"][0]["model"] = "Abacus 9"
    assert "--memory-gbs" in why(document)
    assert imported(document, memory=1e12).devices[2].bandwidth == 1e12
    assert imported(document, device="t4").devices[2].bandwidth == 3.2e11
    itself = {"source_global_id": "2", "target_global_id": 2, "type": "LOC", "bandwidth": "900"}
    document["machines"][1]["links"].append(itself)
    cluster = imported(document)
    assert cluster.devices[2].bandwidth == 900e9
    assert same(document_of(cluster), document)


# without loss

ID = st.integers(0, 3)
NUMBER = st.floats(1e-3, 1e6) | st.integers(1, 10**6)
WRITTEN = NUMBER | NUMBER.map(str)
MORE = st.dictionaries(st.sampled_from(["note", "slot", "x y"]), VALUES | st.none(), max_size=2)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Documents with texts for numbers, keys left out, unknown keys, devices that run no ranks."""
    kinds = draw(st.sampled_from([["GPU", "NIC", "CPU"], ["CPU", "NIC"], ["XPU"]]))
    machines: list[dict[str, Any]] = []
    ids: list[int] = []
    for i in range(draw(st.integers(1, 3))):
        devices = []
        for local in range(draw(st.integers(1, 3))):
            kind = kinds[0] if not ids else draw(st.sampled_from(kinds))
            ids.append(len(ids))
            device = draw(MORE) | {"global_id": ids[-1], "local_id": local, "type": kind}
            if kind == "NIC":
                device["width"] = draw(WRITTEN)
            else:
                device |= {"sp_gflops": draw(WRITTEN), "memory": draw(WRITTEN)}
                for key in ("dp_gflops", "hp_gflops"):
                    if draw(st.booleans()):
                        device[key] = draw(WRITTEN)
                if draw(st.booleans()):
                    device["model"] = draw(st.sampled_from(["A100-SXM4-40GB", "Abacus", ""]))
            devices.append(device)
        port = draw(st.sampled_from([{}, {"port": "768"}, {"port": 768}]))
        machine = draw(MORE) | {"hostname": f"m{i}", "addr": "10.0.0.1", "devices": devices}
        machines.append(machine | port)
    for machine in machines:
        links = []
        for _ in range(draw(st.integers(0, 4))):
            ends = {f"{end}_global_id": draw(st.sampled_from(ids)) for end in ("source", "target")}
            link = draw(MORE) | ends | {"bandwidth": draw(WRITTEN)}
            link["type"] = draw(st.sampled_from([*paddle_document.KINDS, "ICI"]))
            for key in ("latency", "hop"):
                if draw(st.booleans()):
                    link[key] = draw(WRITTEN | st.just(0))
            links.append(link)
        if links or draw(st.booleans()):
            machine["links"] = links
    document = draw(MORE) | {"machines": machines}
    if draw(st.booleans()):
        document["alpha_latency"] = json.loads(TEXT)["alpha_latency"]
    if draw(st.booleans()):
        document["fxpart"] = draw(VALUES | st.just({"name": "x", "devices": [], "links": []}))
    return document


@pytest.mark.slow
@given(documents())
@settings(max_examples=80, deadline=None)
def test_in_and_out(document: dict[str, Any]) -> None:
    cluster = imported(document, memory=1e12)
    assert cluster.problems() == ()
    assert same(document_of(cluster), document)
    again = decode(Cluster, to_json(cluster).encode(), ".json")
    assert again == cluster and same(document_of(again), document)


@pytest.mark.slow
@given(clusters())
@settings(max_examples=30, deadline=None)
def test_out_and_in(cluster: Cluster) -> None:
    """Whatever the cluster, although the format has no place for most of it."""
    document = json.loads(json.dumps(document_of(cluster)))
    assert imported(document) == cluster


@pytest.mark.parametrize("name", ["2x4xh100+1x2xa100", "local:3", "2x2xt4"])
def test_presets_out_and_in(name: str) -> None:
    cluster = Cluster.parse(name)
    document = document_of(cluster)
    assert imported(document) == cluster
    # PaddlePaddle's own keys say the same of every pair.
    del document["fxpart"]
    own = imported(document, memory=1e12)
    for a, b in zip(cluster.devices, own.devices, strict=True):
        assert a.memory == b.memory
        assert a.flops["float32"] == pytest.approx(b.flops["float32"])
    for i, source in enumerate(cluster.devices):
        for j, target in enumerate(cluster.devices):
            if i != j:
                one, other = cluster.link(source, target), own.link(own.devices[i], own.devices[j])
                assert one.bandwidth == pytest.approx(other.bandwidth)
                assert one.latency == pytest.approx(other.latency)


def test_only_what_changed_is_written() -> None:
    document = json.loads(TEXT)
    cluster = imported(document)
    faster = [
        msgspec.structs.replace(x, bandwidth=2e11, latency=1e-5)
        if (x.source, x.target) == ("m0/gpu:1", "m0/gpu:0") else x
        for x in cluster.links
    ]  # fmt: skip
    gone = [x for x in faster if (x.source, x.target) != ("m1/gpu:0", "m0/gpu:1")]
    bigger = msgspec.structs.replace(cluster.devices[1], memory=80 * 10**9)
    devices = (cluster.devices[0], bigger, cluster.devices[2])
    after = msgspec.structs.replace(cluster, devices=devices, links=tuple(gone))
    expected = deepcopy(document)
    expected["machines"][0]["devices"][2]["memory"] = 80
    expected["machines"][0]["links"][1] |= {"bandwidth": 200, "latency": 0.01}
    del expected["machines"][1]["links"][1]
    made = document_of(after)
    assert same({k: v for k, v in made.items() if k != "fxpart"}, expected)
    again = imported(made)
    assert (again.devices, again.links) == (after.devices, after.links)


def test_others_changes_beside_our_key_win() -> None:
    document = document_of(Cluster.parse("1x2xt4"))
    assert imported(document) == Cluster.parse("1x2xt4")
    document["machines"][0]["links"][0]["bandwidth"] = 1
    cluster = imported(document, memory=1e12)
    assert cluster.link(cluster.devices[0], cluster.devices[1]).bandwidth == 1e9
    assert same(document_of(cluster), document)


def test_through_toml() -> None:
    cluster = paddle.read(TEXT, ImportOptions()).cluster
    again = decode(Cluster, to_toml(cluster).encode(), ".toml")
    assert again == cluster and same(document_of(again), json.loads(TEXT))


# faults


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("machines",), None, "machines"),
        (("machines", 0), 3, "machines[0]"),
        (("machines", 0, "hostname"), "m1", "two machines"),
        (("machines", 0, "devices"), {}, "machines[0].devices"),
        (("machines", 0, "devices", 1, "global_id"), "x", "machines[0].devices[1].global_id"),
        (("machines", 0, "devices", 1, "global_id"), 1, "two devices"),
        (("machines", 0, "devices", 1, "memory"), "lots", "machines[0].devices[1].memory"),
        (("machines", 0, "devices", 1, "memory"), 0, "memory is 0 bytes"),
        (("machines", 0, "devices", 1, "sp_gflops"), 1e308, "machines[0].devices[1].sp_gflops"),
        (("machines", 0, "devices", 1, "sp_gflops"), True, "not a number"),
        (("machines", 0, "links"), 7, "machines[0].links"),
        (("machines", 0, "links", 0, "bandwidth"), -1, "bandwidth is -1"),
        (("machines", 0, "links", 0, "latency"), "slow", "machines[0].links[0].latency"),
        (("machines", 0, "links", 0, "source_global_id"), -1, "not an id"),
        (("machines", 0, "links", 0, "source_global_id"), [], "[] is not a number"),
    ],
)
def test_faults_name_the_key(path: tuple[Any, ...], value: Any, words: str) -> None:
    document = json.loads(TEXT)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert words in why(document)


@pytest.mark.parametrize("text", ["{", '{"machines": [}', "[" * 10**5, '{"machines": NaN}', "3"])
def test_no_json_names_the_line(text: str) -> None:
    with pytest.raises(FxpartError, match="FXP407"):
        paddle.read(text, ImportOptions())


def test_not_into_another() -> None:
    assert "--into" in why(json.loads(TEXT), into=Cluster.local(1))


# which rank runs where


def test_ranks_out_and_in() -> None:
    cluster = paddle.read(TEXT, ImportOptions()).cluster
    other = reorder_devices(cluster, RANKS)
    assert [d.name for d in other.devices] == ["m0/gpu:1", "m0/gpu:0", "m1/gpu:0"]
    assert same(mapping_of(other, [d.name for d in other.devices]), json.loads(RANKS))


@given(st.permutations(range(6)), st.integers(1, 6))
@settings(deadline=None)
def test_any_order_of_ranks(order: list[int], count: int) -> None:
    cluster = Cluster.parse("2x3xt4")
    names = [cluster.devices[i].name for i in order[:count]]
    mapping = mapping_of(cluster, names)
    again = reorder_devices(cluster, json.dumps(mapping))
    assert [d.name for d in again.devices][:count] == names
    assert sorted(d.name for d in again.devices) == sorted(d.name for d in cluster.devices)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "not a list"),
        ("[3]", "not an object with ranks"),
        ('[{"hostname": "m0", "ranks": {"0": [7]}}]', "no device 7"),
        ('[{"hostname": "m0", "ranks": {"0": [0, 1]}}]', "one device"),
        ('[{"hostname": "m0", "ranks": {"0": [0], "1": [0]}}]', "twice"),
        ('[{"hostname": "m0", "ranks": {"1": [0]}}]', "not 0, 1"),
        ('[{"hostname": "m0", "ranks": {"a": [0]}}]', "not an id"),
        ('[{"ranks": {"0": [0]}}]', "hostname"),
        ('[{"hostname": "m0", "ranks": {}}]', "the ranks are"),
    ],
)
def test_faults_of_a_mapping(text: str, words: str) -> None:
    with pytest.raises(FxpartError, match="FXP407") as caught:
        reorder_devices(paddle.read(TEXT, ImportOptions()).cluster, text)
    assert words in str(caught.value)
