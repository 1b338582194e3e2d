"""Other programs' files: what each field becomes, and clear errors for whatever is malformed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from benchmarks.maxload.formats import parse_instance, read_instance
from benchmarks.maxload.formats.overrides import DeviceOverrides
from benchmarks.maxload.instance import Instance, Node
from benchmarks.maxload.portfolio import solve
from hypothesis import given
from hypothesis import strategies as st

from fxpart.errors import FxpartError

MAXLOAD: dict[str, Any] = {
    "maxSizePerFPGA": 100.0,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [
        {"id": 7, "name": "a", "supportedOnFpga": 1, "cpuLatency": 9.0, "fpgaLatency": 1.5,
         "isBackwardNode": 0, "size": 4.0, "colorClass": 3},
        {"id": 4, "supportedOnFpga": False, "cpuLatency": 2, "fpgaLatency": 0,
         "isBackwardNode": True, "size": 0, "more": [1]},
    ],
    "edges": [{"sourceId": 7, "destId": 4, "cost": 0.25, "size": 12}],
}  # fmt: skip
PIPER: dict[str, Any] = {
    "maxDevices": 3,
    "maxMemoryPerDevice": 1e6,
    "bandwidth": 50.0,
    "mbsInBatch": 8,
    "nodes": [
        {"id": i, "name": f"layer{i}",
         "TMPCs": {"1": [
             {"id": "vanilla", "timePerSample": 1.0 + i, "parameterSize": 5.0,
              "memoryUsageA": 10.0, "memoryUsageB": 2.0, "syncTimeFw": {}, "syncTimeBw": {}},
             {"id": "activation recomp", "timePerSample": 9.0, "parameterSize": 5.0,
              "memoryUsageA": 1.0, "memoryUsageB": 2.0, "syncTimeFw": {}, "syncTimeBw": {}}],
             "2": []}}
        for i in range(3)
    ],
    "edges": [
        {"sourceId": 0, "destId": 1, "communicationCost": 100.0},
        {"sourceId": 0, "destId": 2, "communicationCost": 25.0},
        {"sourceId": 1, "destId": 2, "communicationCost": 0.0},
    ],
}  # fmt: skip
PIPEDREAM = """\
node1 -- Input0 -- forward_compute_time=73.6, backward_compute_time=0.0, activation_size=9.0, parameter_size=0.000
node4 -- Embedding(32320, 1024, padding_idx=0) -- forward_compute_time=0.073, backward_compute_time=6.949, activation_size=2500.0, parameter_size=40.000
node5 -- LSTM(1024, 1024) -- forward_compute_time=5.25, backward_compute_time=0.75, activation_size=[6000.0; 131.0; 9.0], parameter_size=67.000 -- stage_id=1
\tnode1 -- node4
\tnode4 -- node5
"""  # noqa: E501
DEVICES = DeviceOverrides(accelerators=2, bandwidth=1e6)
FILES = {
    "max-load": (json.dumps(MAXLOAD).encode(), DeviceOverrides()),
    "piper": (json.dumps(PIPER).encode(), DeviceOverrides()),
    "pipedream": (PIPEDREAM.encode(), DEVICES),
}


def parse(data: Any, options: DeviceOverrides | None = None) -> Instance:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return parse_instance(raw, "file", options or DeviceOverrides())


def test_max_load() -> None:
    assert parse(MAXLOAD) == Instance(
        nodes=(
            Node(id=7, name="a", accelerator=1.5, cpu=9.0, bytes=4.0, transfer=0.25, group=3),
            Node(id=4, accelerator=0.0, cpu=2.0, runs=False, backward=True),
        ),
        edges=((0, 1),),
        accelerators=2,
        cpus=1,
        memory=100.0,
    )
    other = parse(MAXLOAD, DeviceOverrides(accelerators=5, cpus=0, memory=7.0))
    assert (other.accelerators, other.cpus, other.memory) == (5, 0, 7.0)


def test_piper() -> None:
    found = parse(PIPER)
    assert [n.accelerator for n in found.nodes] == [1.0, 2.0, 3.0]
    assert [n.bytes for n in found.nodes] == [32.0] * 3, "three devices: three in flight"
    assert [n.transfer for n in found.nodes] == [2 * 100 / 50, 0.0, 0.0]
    assert found.edges == ((0, 1), (0, 2), (1, 2))
    assert (found.accelerators, found.cpus, found.memory) == (3, 0, 1e6)
    other = parse(PIPER, DeviceOverrides(accelerators=2, memory=50.0, bandwidth=100.0))
    assert [n.bytes for n in other.nodes] == [22.0] * 3
    assert (other.nodes[0].transfer, other.memory) == (2.0, 50.0)


def test_pipedream() -> None:
    found = parse(PIPEDREAM.encode(), DeviceOverrides(accelerators=2, bandwidth=1e6, memory=5e4))
    assert found.nodes[0] == Node(id=1, name="Input0", accelerator=0.0)
    embedding, lstm = found.nodes[1:]
    assert (embedding.id, embedding.name) == (4, "Embedding(32320, 1024, padding_idx=0)")
    assert embedding.accelerator == pytest.approx(7.022)
    assert embedding.bytes == 2540.0
    assert embedding.transfer == pytest.approx(5.0), "milliseconds: 2 * 2500 bytes at 1 MB/s"
    assert (lstm.bytes, lstm.accelerator) == (6140.0 + 67.0, 6.0)
    assert found.edges == ((0, 1), (1, 2))
    assert (found.accelerators, found.memory) == (2, 5e4)
    assert solve(found).status == "optimal"


@pytest.mark.parametrize(
    "name,options,words",
    [
        ("max-load", DeviceOverrides(bandwidth=1.0), "--bandwidth"),
        ("piper", DeviceOverrides(cpus=1), "--cpus"),
        ("pipedream", DeviceOverrides(accelerators=2), "--bandwidth"),
        ("pipedream", DeviceOverrides(bandwidth=1e6), "--devices"),
        ("pipedream", DeviceOverrides(accelerators=2, bandwidth=0.0), "--bandwidth"),
        ("pipedream", DeviceOverrides(accelerators=2, bandwidth=1.0, cpus=2), "--cpus"),
    ],
)
def test_what_has_to_be_given_and_what_has_no_use(
    name: str, options: DeviceOverrides, words: str
) -> None:
    with pytest.raises(FxpartError) as failure:
        parse(FILES[name][0], options)
    assert failure.value.code == "FXP109" and words in str(failure.value)


def without(data: dict[str, Any], *path: str | int) -> dict[str, Any]:
    """A copy with one entry left out."""
    copy = json.loads(json.dumps(data))
    inner = copy
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    return copy  # type: ignore[no-any-return]


MALFORMED: dict[str, Any] = {
    "empty": b"",
    "no json": b"{",
    "not utf-8": b'{"maxFPGAs": "\xff"}',
    "a list": b'["maxFPGAs"]',
    "no format": b"{}",
    "deep": b'{"maxFPGAs": ' + b"[" * 100_000,
    "no nodes": without(MAXLOAD, "nodes"),
    "no device count": without(MAXLOAD, "maxFPGAs"),
    "no id": without(MAXLOAD, "nodes", 0, "id"),
    "text for a number": {**MAXLOAD, "maxFPGAs": "two"},
    "nothing to place": {**MAXLOAD, "nodes": [], "edges": []},
    "no devices": {**MAXLOAD, "maxFPGAs": 0, "maxCPUs": 0},
    "negative": {**MAXLOAD, "maxSizePerFPGA": -1},
    "huge": b'{"maxFPGAs": 1e999, "maxSizePerFPGA": 1, "nodes": [], "edges": []}',
    "strange edge": {**MAXLOAD, "edges": [{"sourceId": 7, "destId": 99, "cost": 1}]},
    "two costs": {**MAXLOAD, "edges": [*MAXLOAD["edges"], {**MAXLOAD["edges"][0], "cost": 1}]},
    "twice an id": {**MAXLOAD, "nodes": [MAXLOAD["nodes"][0]] * 2, "edges": []},
    "no alternative": without(PIPER, "nodes", 1, "TMPCs", "1"),
    "no time": without(PIPER, "nodes", 1, "TMPCs", "1", 0, "timePerSample"),
    "strange edge of piper": {**PIPER, "edges": [{"sourceId": 0, "destId": 99}]},
    "words": b"node1 and node2\n",
    "strange edge of pipedream": PIPEDREAM.encode() + b"\tnode4 -- node99\n",
    "no number": PIPEDREAM.replace("0.073", "0.0.7").encode(),
    "negative time": PIPEDREAM.replace("=5.25", "=-50").encode(),
    "a node twice": (PIPEDREAM + PIPEDREAM).encode(),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_are_one_clear_error(name: str) -> None:
    options = DEVICES if name in list(MALFORMED)[-5:] or name == "empty" else DeviceOverrides()
    with pytest.raises(FxpartError) as failure:
        parse(MALFORMED[name], options)
    assert {p.code for p in failure.value.problems} == {"FXP206"}
    assert all(p.where.startswith("file") and p.why for p in failure.value.problems)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(FxpartError, match="FXP206"):
            read_instance(path)


def mutated(data: bytes, seed: int) -> bytes:
    """The file with a few bytes changed, removed, repeated or moved."""
    draw, changed = random.Random(seed), bytearray(data)
    for _ in range(draw.randint(1, 4)):
        a = draw.randrange(len(changed) + 1)
        b = min(len(changed), a + draw.choice([1, 1, 2, 7, 40]))
        piece = bytes(changed[a:b])
        changed[a:b] = draw.choice(
            [
                b"",
                piece * 2,
                b"-",
                b"9",
                b"e9",
                b"null",
                b"\x00",
                b'"',
                b"[",
                bytes([draw.randrange(256)]),
            ]
        )
    return bytes(changed)


@pytest.mark.parametrize("name", FILES)
def test_fuzzed_files_are_read_or_refused(name: str) -> None:
    data, options = FILES[name]
    refused = 0
    for seed in range(1500):
        try:
            parse_instance(mutated(data, seed), "file", options)
        except FxpartError as fault:
            refused += 1
            assert {p.code for p in fault.problems} <= {"FXP206", "FXP109"}
    assert 300 < refused < 1500


@pytest.mark.slow
@given(st.one_of(st.binary(max_size=80), st.text(max_size=80).map(lambda t: t.encode())))
def test_anything_at_all_is_read_or_refused(data: bytes) -> None:
    for start in (b"", b'{"maxFPGAs": 1, "nodes": ', b"node1 -- x -- forward_compute_time="):
        with pytest.raises(FxpartError):
            parse_instance(start + data, "file", DEVICES)
