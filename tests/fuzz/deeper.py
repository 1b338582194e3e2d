"""What lies within files: a profile's rows, texts in a header; and what is told of many files."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fuzz import inputs, runs
from fuzz.mutations import Sample
from fuzz.reading import plain, scratch

if TYPE_CHECKING:
    from fxpart.cluster.devices import Device

Seal = Callable[[bytes], bytes]
_APART = b"\x00\x00"  # between the name of a place and what stands there

# A profile's rows, in a file that is otherwise right


@cache
def _rows() -> list[tuple[str, str, str]]:
    """Kind, key and value of each row of a profile."""
    path = scratch() / "rows.profile"
    path.write_bytes(inputs.profiles()[0].data)
    base = sqlite3.connect(path)
    kinds = [name for (name,) in base.execute("SELECT name FROM sqlite_master")]
    found = [(k, *row) for k in kinds for row in base.execute(f"SELECT key, value FROM {k}")]
    base.close()
    return found


@cache
def _device() -> Device:
    from fxpart.cluster.model import Cluster

    return Cluster.parse("1xa100").devices[0]


def read_row(data: bytes) -> object:
    """A profile of which one row has this value, or this key; then what is priced by it."""
    from fxpart.costmodels import AUTO, find
    from fxpart.costmodels.profile_cost_model import ProfileCostModel

    from fxpart.costs import OpSpec, TensorSpec

    place, _, text = data.rpartition(_APART)
    kind, _, column = place.decode("utf-8", "replace").partition(".")
    path = scratch() / "row.profile"
    known_places = {(k, column) for k, _, _ in _rows() for column in ("key", "value")}
    path.write_bytes((scratch() / "rows.profile").read_bytes())
    base = sqlite3.connect(path)
    if (kind, column) in known_places:
        base.execute(f"UPDATE {kind} SET {column} = ?", (text.decode("utf-8", "replace"),))
        base.commit()
    base.close()
    shown = inputs.read_profile(path)
    known = ProfileCostModel.load(path, None, find(AUTO))
    two = TensorSpec((2, 5), "float32")
    op = OpSpec("aten.relu.default", (two,), (two,), gradient_inputs=(0,), gradients=1)
    for setting in known.measurements:
        estimates = known._estimate(setting)
        estimates(op, False, known.base, _device())
        estimates.rate(op, True, known.base, _device())
    return shown


def rows() -> list[Sample]:
    """Each kind's values and keys."""
    found = []
    for kind, key, value in _rows():
        for column, text in (("value", value), ("key", key.rpartition(" ")[0])):
            if text[:1] in ("{", "["):
                found.append(Sample(text.encode(), "json", _placed(f"{kind}.{column}", key)))
    return found


def _placed(place: str, key: str) -> Seal:
    end = b" forward" if place.endswith("key") and key.endswith(" forward") else b""
    return lambda data: place.encode() + _APART + data + end


# PaddlePaddle's mapping of ranks


def read_mapping(data: bytes) -> object:
    """The devices in the order of a mapping's ranks, as `cluster import --ranks` has them."""
    from fxpart.cli.cluster import _text
    from fxpart.cluster.importers.paddle_rank_map import reorder_devices
    from fxpart.cluster.model import Cluster

    path = scratch() / "mapping.json"
    path.write_bytes(data)
    return reorder_devices(Cluster.parse("2x2xh100"), _text(str(path)))


def mappings() -> list[Sample]:
    """Of four devices."""
    from fxpart.cluster.importers.paddle_rank_map import mapping_of
    from fxpart.cluster.model import Cluster

    cluster = Cluster.parse("2x2xh100")
    names = [device.name for device in cluster.devices][::-1]
    return plain("json", msgspec.json.encode(mapping_of(cluster, names)))


# Texts in the headers of tensors' files


def in_header(files: Callable[[], runs.Files], name: str) -> Callable[[], list[Sample]]:
    """A header, and each JSON text in its metadata, changed; the tensors behind it are right."""

    def samples() -> list[Sample]:
        whole = runs.header_of(files, name)()[0]
        assert whole.seal is not None
        header = json.loads(whole.data)
        found = [whole]
        for key, text in header.get("__metadata__", {}).items():
            if text[:1] == "{":
                found.append(Sample(text.encode(), "json", _within(header, key, whole.seal)))
        return found

    return samples


def _within(header: dict[str, object], key: str, seal: Seal) -> Seal:
    def sealed(data: bytes) -> bytes:
        metadata = header["__metadata__"]
        assert isinstance(metadata, dict)
        text = data.decode("utf-8", "replace")
        changed = {**header, "__metadata__": {**metadata, key: text}}
        return seal(json.dumps(changed).encode())

    return sealed


def read_whole(path: Path) -> object:
    """Such a file as convert reads it."""
    from fxpart.checkpoint.exchange.conversion import ConversionOptions, _open_source, detect

    source = _open_source(path, detect(path), ConversionOptions())
    return [source.read(key) for key in source.tensors]


# What is told of a run's end


def read_end(data: bytes) -> object:
    """The words about a run of which one rank left this ring or failure."""
    from fxpart.cli import postmortem
    from fxpart.diagnostics.postmortem import examine

    folder = scratch() / "ended" / "events" / "generation-1"
    folder.mkdir(parents=True, exist_ok=True)
    failed = data[:1] == b"{"
    (folder / "rank-1.ring").write_bytes(_ring() if failed else data)
    for rank in range(2):  # the file says of which rank it is
        (folder / f"rank-{rank}.failure.json").write_bytes(data if failed else b"")
    found = examine(folder.parents[1])
    shown = [postmortem._head("run", found), postmortem._ranks(found), postmortem._events(found, 5)]
    return shown, msgspec.json.encode(postmortem._data(found, 5))


@cache
def _ring() -> bytes:
    return runs.rings()[0].data


def ends() -> list[Sample]:
    """Failures, then rings."""
    return [*runs.failures(), *runs.rings()]


# A plan's page with a recording of it


def read_compared(data: bytes) -> object:
    """What a recording says of its plan, in words and as a page."""
    import sample_plans

    from fxpart.report.comparison_builder import compare
    from fxpart.report.comparison_text import format_comparison
    from fxpart.report.html import report_html
    from fxpart.report.recording_file import check_recording, decode

    plan, recording = sample_plans.plan(2, 2), decode(data, "trace")
    check_recording(recording, plan, "trace")
    found = compare(plan, recording)
    return format_comparison(found), report_html(plan, recording, found)
