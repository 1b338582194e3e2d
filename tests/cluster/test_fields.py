"""Every field and every unknown key: through files without loss, and checked."""

from __future__ import annotations

import datetime
import json
import math
import tomllib

import msgspec
import pytest
from cluster_drawing import clusters
from hypothesis import given, settings

from fxpart.cluster.completeness import MOST, find_misspelled_keys, missing_facts, missing_links
from fxpart.cluster.devices import CollectiveCurve, Device, Host, Link
from fxpart.cluster.files import decode, from_builtins, to_builtins, to_json, to_toml
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError

CPU = Device(
    name="a/cpu:0", kind="cpu", model="cpu", host="a", memory=10**9, flops={"float32": 1e12},
    bandwidth=1e11,
)  # fmt: skip
ANY = Link(source="*", target="*", latency=1e-5, bandwidth=1e9, kind="net")
PLAIN = Cluster(name="plain", devices=(CPU,), links=(ANY,))
CURVE = CollectiveCurve(
    operation="all_reduce", ranks=2, points=((8.0, 1e-5),), latency=1e-5, inverse_bandwidth=1e-9
)  # fmt: skip


def changed(item: msgspec.Struct, **fields: object) -> msgspec.Struct:
    return msgspec.structs.replace(item, **fields)


@pytest.mark.slow
@given(clusters())
@settings(max_examples=30, deadline=None)
def test_files_both_ways(cluster: Cluster) -> None:
    assert cluster.problems() == ()
    assert decode(Cluster, to_toml(cluster).encode(), ".toml") == cluster
    assert decode(Cluster, to_json(cluster).encode(), ".json") == cluster
    assert from_builtins(Cluster, to_builtins(cluster)) == cluster
    assert json.loads(to_json(cluster)) == tomllib.loads(to_toml(cluster))


def test_hash_of_a_cluster_without_new_fields_is_what_it_was() -> None:
    """Computed before there were hosts, curves and unknown keys."""
    assert PLAIN.hash == "0664d2301134b40a0b4d87e9fda011e0ce6807eb2ad3432c217f2ee40aded310"


@pytest.mark.parametrize(
    "more",
    [
        {"hosts": (Host(name="a", cores=2),)},
        {"collectives": (CURVE,)},
        {"extra": {"rack": 4}},
        {"devices": (changed(CPU, threads=2),)},
        {"devices": (changed(CPU, quota=0.5),)},
        {"devices": (changed(CPU, measured={"float32": 9e11}),)},
        {"links": (changed(ANY, curve=((8.0, 1e-5),)),)},
    ],
)
def test_each_new_field_is_in_the_hash(more: dict[str, object]) -> None:
    other = changed(PLAIN, **more)
    assert isinstance(other, Cluster) and other.problems() == ()
    assert other.hash != PLAIN.hash


def test_unknown_keys_stay_where_they_are() -> None:
    text = """
name = "lab"
owner = "physics"
[[hosts]]
name = "a"
rack = { row = 3, slots = [1, 2] }
[[devices]]
name = "a/0"
kind = "cpu"
model = "cpu"
host = "a"
memory = 1000
flops = { float32 = 1.0 }
bandwidth = 1.0
bought = 2024-05-01
extra = "this name too"
[[links]]
source = "*"
target = "*"
latency = 0
bandwidth = 1
colour = "grey"
"""
    cluster = decode(Cluster, text.encode(), ".toml")
    assert cluster.extra == {"owner": "physics"}
    assert cluster.devices[0].extra == {
        "bought": datetime.date(2024, 5, 1),
        "extra": "this name too",
    }
    before, after = tomllib.loads(text), tomllib.loads(to_toml(cluster))
    for kind in ("hosts", "devices", "links"):
        assert before[kind][0].items() <= after[kind][0].items()
    assert after["owner"] == "physics"


def test_null_goes_into_json_alone() -> None:
    cluster = changed(PLAIN, extra={"rack": None})
    assert isinstance(cluster, Cluster)
    assert decode(Cluster, to_json(cluster).encode(), ".json") == cluster
    with pytest.raises(FxpartError, match="FXP603"):
        to_toml(cluster)


def wrong() -> dict[str, Cluster]:
    """What a fault says, and a cluster that has it."""
    two = Host(name="a", slowdown=(1.0, 1.5, 1.4))
    faults: dict[str, dict[str, object]] = {
        "no device has this host": {"hosts": (Host(name="b"),)},
        "defined 2 times": {"hosts": (Host(name="a"), Host(name="a"))},
        "cores is -1": {"hosts": (Host(name="a", cores=-1),)},
        "slowdown of 1 computing ranks is 0.9": {"hosts": (Host(name="a", slowdown=(0.9,)),)},
        "slowdown of 2 computing ranks is inf": {
            "hosts": (Host(name="a", slowdown=(1, math.inf)),)
        },
        "1.4, is below that of fewer ranks, 1.5": {"hosts": (two,)},
        "threads is 0": {"devices": (changed(CPU, threads=0),)},
        "price is -1": {"devices": (changed(CPU, price=-1.0),)},
        "domain '' is empty": {"devices": (changed(CPU, domain=""),)},
        "measured float32 is 0": {"devices": (changed(CPU, measured={"float32": 0.0}),)},
        "segment '*' is empty": {"links": (changed(ANY, segment="*"),)},
        "curve has 0 entries": {"links": (changed(ANY, curve=()),)},
        "8.0 bytes follow 8.0": {"links": (changed(ANY, curve=((8.0, 1.0), (8.0, 2.0))),)},
        "the time of 8.0 bytes is 0": {"links": (changed(ANY, curve=((8.0, 0.0),)),)},
        "operation 'sum'": {"collectives": (changed(CURVE, operation="sum"),)},
        "ranks is 1": {"collectives": (changed(CURVE, ranks=1),)},
        "hosts is 3": {"collectives": (changed(CURVE, hosts=3),)},
        "points has 0 entries": {"collectives": (changed(CURVE, points=()),)},
        "latency is nan": {"collectives": (changed(CURVE, latency=math.nan),)},
        "over 2 ranks on 1 hosts": {"collectives": (CURVE, CURVE)},
        "key 'name', which is a field": {"extra": {"name": 1}},
        "extra is empty": {"extra": {}},
        "the number nan": {"extra": {"x": [math.nan]}},
        "more than 64 bits": {"extra": {"x": 1 << 63}},
        "not valid Unicode": {"extra": {"x": "\ud800"}},
        "a set": {"extra": {"x": {1}}},
    }
    made = {words: changed(PLAIN, **fields) for words, fields in faults.items()}
    return {words: cluster for words, cluster in made.items() if isinstance(cluster, Cluster)}


@pytest.mark.parametrize("words", list(wrong()))
def test_each_fault_is_found(words: str) -> None:
    found = wrong()[words].problems()
    assert {p.code for p in found} == {"FXP402"}
    assert any(words in f"{p.where}: {p.why}" for p in found), found


def test_slowdown_may_fall_by_noise() -> None:
    host = Host(name="a", slowdown=(1.0, 1.5, 1.49))
    cluster = changed(PLAIN, hosts=(host,))
    assert isinstance(cluster, Cluster) and cluster.problems() == ()


def test_missing_links_name_the_pairs() -> None:
    b = changed(CPU, name="b/cpu:0", host="b")
    one_way = Link(source="a", target="b", latency=0.0, bandwidth=1.0)
    cluster = changed(PLAIN, devices=(CPU, b), links=(one_way,))
    assert isinstance(cluster, Cluster)
    (problem,) = missing_links(cluster)
    assert (problem.code, problem.where) == ("FXP403", "b/cpu:0 -> a/cpu:0")
    assert missing_links(Cluster.parse("16x8xh100")) == ()
    hosts = Cluster.parse("128x2xh100")
    apart = changed(hosts, links=hosts.links[:-1])
    assert isinstance(apart, Cluster) and len(missing_links(apart)) == MOST
    assert "many links between devices" in "\n".join(missing_facts(apart))
    assert missing_links(Cluster.parse("1xh100")) == ()


def test_missing_facts_shrink_as_they_are_given() -> None:
    cluster = Cluster.local(2)
    words = "\n".join(missing_facts(cluster))
    assert "the slowdown of ranks" in words and "collectives" in words and "cores" not in words
    assert cluster.hosts is not msgspec.UNSET
    full = msgspec.structs.replace(
        cluster,
        devices=tuple(changed(d, measured={"float32": 1e9}) for d in cluster.devices),
        links=tuple(changed(x, curve=((8.0, 1e-5),)) for x in cluster.links),
        hosts=tuple(changed(h, slowdown=(1.0, 1.2)) for h in cluster.hosts),
        collectives=(CURVE,),
    )
    assert full.problems() == () and missing_facts(full) == ()
    assert "the number of cores of host 'a'" in missing_facts(PLAIN)


def test_keys_that_look_like_known_ones_are_told() -> None:
    device = changed(CPU, extra={"lanch": 1e-6, "bought": 2024, "Threads": 2})
    cluster = changed(PLAIN, devices=(device, changed(device, name="a/cpu:1")), extra={"links_": 1})
    assert isinstance(cluster, Cluster) and cluster.problems() == ()
    assert find_misspelled_keys(cluster) == (
        "key 'links_' of the cluster has no effect; did you mean 'links'?",
        "key 'lanch' of devices has no effect; did you mean 'launch'?",
        "key 'Threads' of devices has no effect; did you mean 'threads'?",
    )
    assert find_misspelled_keys(PLAIN) == ()
