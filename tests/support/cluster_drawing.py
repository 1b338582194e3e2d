"""Random valid clusters with every field there is, for hypothesis."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from fxpart.cluster.devices import CollectiveCurve, Device, Host, Link
from fxpart.cluster.model import Cluster
from fxpart.cluster.validation import OPERATIONS

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z")) | st.sampled_from(' "\\'),
    min_size=1,
    max_size=8,
).filter(str.isprintable)
RATES = st.floats(1e-3, 1e18)
TIMES = st.floats(0, 1e3)
# What JSON and TOML can both hold; null is JSON's alone.
SCALARS = (
    TEXT
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3), max_leaves=6
)


def given(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A value or none at all."""
    return st.just(msgspec.UNSET) | values


def extras(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Unknown keys of a struct; also one called "extra", as no file knows that name."""
    known = set(kind.__struct_fields__) - {"extra"}
    keys = TEXT.filter(lambda key: key not in known) | st.just("extra")
    return given(st.dictionaries(keys, VALUES, min_size=1, max_size=3))


def points() -> st.SearchStrategy[Any]:
    """Measured (bytes, seconds), bytes rising."""
    sizes = st.lists(st.floats(1, 1e12), min_size=1, max_size=4, unique=True).map(sorted)
    return sizes.flatmap(
        lambda xs: st.tuples(*(st.tuples(st.just(x), st.floats(1e-9, 1e3)) for x in xs))
    )


@st.composite
def devices(draw: st.DrawFn, name: str, host: str) -> Device:
    """One device."""
    return Device(
        name=name,
        kind=draw(st.sampled_from(["cpu", "gpu"])),
        model=draw(TEXT),
        host=host,
        memory=draw(st.integers(1, 1 << 50)),
        flops=draw(st.dictionaries(NAMES, RATES, min_size=1, max_size=3)),
        bandwidth=draw(RATES),
        launch=draw(TIMES),
        source=draw(TEXT),
        threads=draw(given(st.integers(1, 512))),
        price=draw(given(TIMES)),
        domain=draw(given(NAMES.map("z{}".format))),
        measured=draw(given(st.dictionaries(NAMES, RATES, max_size=2))),
        extra=draw(extras(Device)),
    )


@st.composite
def hosts(draw: st.DrawFn, name: str) -> Host:
    """One host, its slowdown rising."""
    return Host(
        name=name,
        cores=draw(st.integers(0, 512)),
        slowdown=tuple(sorted(draw(st.lists(st.floats(1, 100), max_size=3)))),
        address=draw(TEXT),
        source=draw(TEXT),
        extra=draw(extras(Host)),
    )


@st.composite
def links(draw: st.DrawFn, source: str, target: str) -> Link:
    """One link."""
    return Link(
        source=source,
        target=target,
        latency=draw(TIMES),
        bandwidth=draw(RATES),
        kind=draw(TEXT),
        origin=draw(TEXT),
        shared=draw(given(st.booleans())),
        segment=draw(given(NAMES.map("s{}".format))),
        curve=draw(given(points())),
        extra=draw(extras(Link)),
    )


@st.composite
def curves(draw: st.DrawFn, operation: str, ranks: int) -> CollectiveCurve:
    """One measured collective."""
    return CollectiveCurve(
        operation=operation,
        ranks=ranks,
        hosts=draw(st.integers(1, ranks)),
        points=draw(points()),
        latency=draw(TIMES),
        inverse_bandwidth=draw(TIMES),
        residual=draw(TIMES),
        source=draw(TEXT),
        extra=draw(extras(CollectiveCurve)),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """A valid cluster."""
    places = draw(st.lists(NAMES.map("h{}".format), min_size=1, max_size=3, unique=True))
    names = draw(st.lists(NAMES.map("d{}".format), min_size=1, max_size=4, unique=True))
    made = tuple(draw(devices(name, draw(st.sampled_from(places)))) for name in names)
    used = list(dict.fromkeys(device.host for device in made))
    ends = st.sampled_from(["*", *names, *used])
    pairs = draw(st.lists(st.tuples(ends, ends), max_size=4, unique=True))
    told = draw(st.lists(st.sampled_from(used), max_size=2, unique=True))
    groups = st.tuples(st.sampled_from(OPERATIONS), st.integers(2, 9))
    measured = draw(st.lists(groups, max_size=2, unique=True))
    return Cluster(
        name=draw(TEXT),
        devices=made,
        links=tuple(draw(links(*pair)) for pair in pairs),
        hosts=draw(given(st.just(tuple(draw(hosts(name)) for name in told)))),
        collectives=draw(given(st.just(tuple(draw(curves(*group)) for group in measured)))),
        extra=draw(extras(Cluster)),
    )
