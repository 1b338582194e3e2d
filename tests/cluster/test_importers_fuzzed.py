"""No text makes an importer fail with anything but FXP407; what it reads is a valid cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.cluster.importers import registry
from fxpart.cluster.importers.paddle_export import document_of
from fxpart.cluster.importers.source_facts import ImportOptions
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError

DATA = Path(__file__).parent / "data"
SAMPLES = {path.name: path.read_text() for path in sorted(DATA.iterdir())}
FACTS = ImportOptions(
    device="a100", pcie=1e10, nvlink=1e10, per_host=2, memory=1e12, operation="broadcast"
)
INTO = ImportOptions(into=Cluster.parse("2x8xa100"), pcie=1e10, nvlink=1e10, hosts=("host0",))
TOKENS = st.sampled_from(
    ["", "0", "-1", "nan", "inf", "1e999", "9" * 30, "X", "NV99", "GPU0", "N/A", "\t", "\n", "#",
     "[", "]", "{", "}", '"', ",", "null", "true", "\x1b[4m", "\x00", "é", "١", "size", "# Rank",
     "SLURM"]
)  # fmt: skip


def survives(text: str, form: str, facts: ImportOptions) -> None:
    try:
        found = registry.read(text, form, facts)
    except FxpartError as fault:
        assert {problem.code for problem in fault.problems} == {"FXP407"}
    else:
        assert found.cluster.problems() == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_changed_texts(name: str, data: st.DataObject) -> None:
    text = SAMPLES[name]
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 12)))
        text = text[:start] + data.draw(TOKENS) + text[end:]
    form = data.draw(st.sampled_from(["auto", *registry.IMPORTERS]))
    survives(text, form, data.draw(st.sampled_from([FACTS, INTO, ImportOptions()])))


@pytest.mark.parametrize("name", [name for name in SAMPLES if name.endswith(".json")])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_changed_json(name: str, data: st.DataObject) -> None:
    """A value anywhere in a document replaced by one of another kind."""
    document = json.loads(SAMPLES[name])
    place: Any = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and data.draw(st.integers(0, 4)):
            place = place[key]
            continue
        strange = [None, True, -1, 0, 1.5, 10**30, "", "x", "7", [], {}, [[]], {"a": 1}]
        place[key] = data.draw(st.sampled_from(strange))
        break
    for form in ("paddle", "nccl-tests"):
        survives(json.dumps(document), form, FACTS)


@pytest.mark.parametrize("form", ["auto", *registry.IMPORTERS])
@given(text=st.text(max_size=60) | st.lists(TOKENS, max_size=30).map(" ".join))
@settings(max_examples=60, deadline=None)
def test_any_text(form: str, text: str) -> None:
    survives(text, form, FACTS)


KEYS = st.sampled_from(["machines", "devices", "links", "hostname"])
ANYTHING = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3),
    max_leaves=10,
)


@given(ANYTHING)
@settings(max_examples=60, deadline=None)
def test_any_document_kept_in_a_cluster(kept: Any) -> None:
    """A file may be edited by hand: what stands under "paddle" need not be a document."""
    cluster = Cluster(**{**_fields(Cluster.parse("1x2xt4")), "extra": {"paddle": kept}})
    if cluster.problems() == ():
        assert document_of(cluster)["machines"]


def _fields(cluster: Cluster) -> dict[str, Any]:
    return {name: getattr(cluster, name) for name in ("name", "devices", "links")}
