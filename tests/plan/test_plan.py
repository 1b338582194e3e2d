"""Plan files: canonical bytes, every fault found, nothing but FxpartError whatever the bytes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sample_plans
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError
from fxpart.plan.diff import diff
from fxpart.plan.migration import VERSION, upgrade
from fxpart.plan.model import Plan


def raw() -> dict[str, Any]:
    """A valid plan as plain data."""
    return json.loads(sample_plans.plan().dumps())


def codes(data: bytes | str) -> list[str]:
    """The codes that loading ``data`` gives."""
    with pytest.raises(FxpartError) as caught:
        Plan.loads(data)
    return [p.code for p in caught.value.problems]


@pytest.mark.slow
@given(sample_plans.plans())
@settings(max_examples=100, deadline=None)
def test_round_trip_is_byte_identical(plan: Plan) -> None:
    text = plan.dumps()
    again = Plan.loads(text)
    assert again == plan
    assert again.dumps() == text
    assert diff(plan, again) == ()


def test_canonical_text() -> None:
    text = sample_plans.plan().dumps()
    assert text.endswith("}\n") and not text.endswith("\n\n")
    keys = list(json.loads(text))
    assert keys == sorted(keys)
    # A float field given an int is written as it will be read.
    plan = msgspec.structs.replace(sample_plans.plan(), constraints={"time_limit": 3})
    prediction = msgspec.structs.replace(plan.prediction, bubble=0)
    plan = msgspec.structs.replace(plan, prediction=prediction)
    assert '"bubble": 0.0' in plan.dumps() and '"time_limit": 3\n' in plan.dumps()


def test_dump_and_load(tmp_path: Path) -> None:
    plan, path = sample_plans.plan(), tmp_path / "plan.json"
    plan.dump(path)
    assert Plan.load(path) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    with pytest.raises(FxpartError) as caught:
        plan.dump(tmp_path / "nowhere" / "plan.json")
    assert caught.value.code == "FXP603"


def test_unreadable(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path, Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(FxpartError) as caught:
            Plan.load(path)
        assert caught.value.code == "FXP301", path
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(FxpartError, match="more than"):
        Plan.load(huge)


def test_not_json() -> None:
    assert codes(b"") == ["FXP301"]
    assert codes(b"\x80\x81") == ["FXP301"]
    assert codes(b"[" * 1_000_000) == ["FXP302"]
    assert codes(b'{"x":' * 100_000) == ["FXP301"]
    deep = json.dumps(raw())[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert codes(deep)[0] in ("FXP301", "FXP303")


def test_other_format_and_version() -> None:
    for text in ("{}", "[]", "3", "null", '{"version": 1}'):
        assert codes(text) == ["FXP302"]
    assert codes(json.dumps({**raw(), "format": "other"})) == ["FXP302"]
    for version in (0, -1, VERSION + 1, 10**30, "1", None, True, 1.0):
        assert codes(json.dumps({**raw(), "version": version}))[0] in ("FXP301", "FXP302"), version


def test_migration_runs_step_by_step() -> None:
    steps = {
        1: lambda plan: {**plan, "middle": plan["old"]},
        2: lambda plan: {"new": plan["middle"]},
    }
    assert upgrade({"old": 5}, 1, "x", steps=steps, target=3) == {"new": 5, "version": 3}
    for version in (0, 4):
        with pytest.raises(FxpartError) as caught:
            upgrade({}, version, "x", steps=steps, target=3)
        assert caught.value.code == "FXP302"


def test_every_fault_of_shape_is_found() -> None:
    plan = raw()
    del plan["seed"], plan["model"]["name"]  # the seed has a default
    plan["stages"][1]["first"] = "two"
    plan["stages"][2]["colour"] = "red"
    plan["mesh"]["pipeline"] = None
    plan["prediction"]["ranks"] = {}
    with pytest.raises(FxpartError) as caught:
        Plan.loads(json.dumps(plan), "p.json")
    places = sorted(p.where.removeprefix("p.json: ") for p in caught.value.problems)
    assert places == [
        "mesh['pipeline']",
        "model.name",
        "prediction.ranks",
        "stages[1].first",
        "stages[2].colour",
    ]
    assert {p.code for p in caught.value.problems} == {"FXP303"}


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of a plan: ``stages.1.first`` becomes ``value``."""

    def change(plan: Any) -> None:
        *way, last = path.split(".")
        for key in way:
            plan = plan[int(key)] if isinstance(plan, list) else plan[key]
        plan[int(last) if isinstance(plan, list) else last] = value

    return change


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "gap between stages": (_set("stages.1.first", 3), "stages[1]"),
    "overlap": (_set("stages.1.first", 1), "stages[1]"),
    "stage ends before it starts": (_set("stages.1.last", 1), "stages[1]"),
    "index": (_set("stages.2.index", 7), "stages[2].index"),
    "blocks left over": (_set("model.blocks", 9), "stages"),
    "rank twice": (_set("stages.1.ranks", [0]), "stages"),
    "rank without device": (_set("stages.3.ranks", [4]), "stages[3].ranks"),
    "replicas without ranks": (_set("stages.1.data_parallel", 2), "stages[1].ranks"),
    "zero replicas": (_set("stages.1.data_parallel", 0), "stages[1]"),
    "no stages": (_set("stages", []), "stages"),
    "mesh": (_set("mesh.pipeline", 3), "mesh"),
    "empty axis": (_set("mesh.data", 0), "mesh"),
    "edge backwards": (_set("edges", [[1, 0, True]]), "edges[0]"),
    "edge to nowhere": (_set("edges", [[1, 4, True]]), "edges[0]"),
    "edge twice": (_set("edges", [[0, 1, True], [0, 1, False]]), "edges[1]"),
    "tie on no stage": (_set("ties.0.stages", [0, 9]), "ties[0]"),
    "tie without its owner": (_set("ties.0.owner", 1), "ties[0]"),
    "tie of nothing": (_set("ties.0.names", []), "ties[0]"),
    "more microbatches than samples": (_set("microbatches", 99), "microbatches"),
    "no batch": (_set("batch_size", 0), "batch_size"),
    "negative": (_set("model.parameters", -1), "model.parameters"),
    "too large": (_set("model.parameters", 10**25), "model.parameters"),
    "step": (_set("prediction.step_seconds", 0.1), "prediction.step_seconds"),
    "bubble": (_set("prediction.bubble", 1.5), "prediction.bubble"),
    "rank predicted twice": (_set("prediction.ranks.1.ranks", "0"), "prediction.ranks"),
    "stage of a rank": (_set("prediction.ranks.1.stage", 0), "prediction.ranks[1].stage"),
    "no rank": (_set("prediction.ranks.1.ranks", ""), "prediction.ranks[1].ranks"),
    "workspace": (_set("prediction.ranks.1.workspace", 2**32), "prediction.ranks[1].workspace"),
    "collectives": (
        _set("prediction.ranks.1.collective_seconds", 1.0),
        "prediction.ranks[1].collective_seconds",
    ),
    "experts": (_set("stages.1.expert_parallel", 2), "stages[1]"),
    "pieces": (_set("stages.1.pieces", [[2, 2], [3, 3]]), "stages[1].pieces"),
    "pieces apart": (_set("stages.1.pieces", [[1, 3]]), "stages[1].pieces"),
    "unknown schedule": (_set("schedule", "zigzag"), "schedule"),
    "schedule that does not train": (_set("schedule", "forward"), "schedule"),
    "unknown weight mode": (_set("weights", "newest"), "weights"),
    "interleaved without pieces": (_set("schedule", "interleaved"), "stages"),
    "order": (_set("order", "0-6"), "order"),
    "order twice": (_set("order", "0-6,6"), "order"),
    "devices": (_set("devices", "0-2"), "devices"),
    "devices fall": (_set("devices", "1,0,2-3"), "devices"),
    "devices that are not": (_set("devices", "0-2,7"), "devices"),
    "weights": (_set("weights", "stash"), "weights"),
    "change": (
        _set("changes", [{"stages": 0, "microbatches": 1, "step_seconds": None, "why": ""}]),
        "changes[0]",
    ),
    "fits and does not": (_set("alternatives.0.unfit_seconds", 1.0), "alternatives[0]"),
    "in flight": (_set("prediction.ranks.1.in_flight", 9), "prediction.ranks[1].in_flight"),
    "over memory": (_set("prediction.ranks.1.memory.weights", 2**33), "prediction.ranks[1].memory"),
    "limit above device": (
        _set("prediction.ranks.1.memory_limit", 2**40),
        "prediction.ranks[1].memory_limit",
    ),
    "bound above objective": (_set("certificate.lower_bound", 1e6), "certificate.lower_bound"),
    "gap": (_set("certificate.gap", 0.5), "certificate.gap"),
    "optimal with a gap": (_set("certificate.status", "optimal"), "certificate.status"),
    "cluster hash": (_set("cluster_hash", "0"), "cluster_hash"),
    "cluster": (_set("cluster.devices.0.memory", 0), "cluster, device 'host0/cpu:0'"),
    "input twice": (
        _set("model.inputs", [{"name": "x", "dtype": "f", "shape": [1]}] * 2),
        "model.inputs",
    ),
    "batch dim": (_set("model.inputs.0.batch_dim", 2), "model.inputs[0].batch_dim"),
    "nodes": (_set("model.nodes", 1), "model.nodes"),
    "alternative": (_set("alternatives.0.stages", 0), "alternatives[0]"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_of_content(name: str) -> None:
    change, place = FAULTS[name]
    plan = raw()
    change(plan)
    with pytest.raises(FxpartError) as caught:
        Plan.loads(json.dumps(plan))
    assert place in [p.where for p in caught.value.problems]
    assert {p.code for p in caught.value.problems} == {"FXP303"}


@pytest.mark.slow
@given(st.sets(st.sampled_from(sorted(FAULTS)), min_size=2, max_size=4))
@settings(max_examples=60, deadline=None)
def test_faults_do_not_hide_each_other(names: set[str]) -> None:
    # Two changes of one place, or one that removes the other's place, say nothing; unknown names
    # are reported alone.
    names_first = ("unknown schedule", "schedule that does not train", "unknown weight mode")
    alone = ("no stages", "rank twice", "rank predicted twice", *names_first)
    top = [n for n in names if n not in alone]
    plan = raw()
    places: dict[str, str] = {}
    for name in top:
        change, place = FAULTS[name]
        change(plan)
        places[place.split("[")[0].split(".")[0]] = place
    if len(places) < len(top) or "cluster" in top:
        return
    with pytest.raises(FxpartError) as caught:
        Plan.loads(json.dumps(plan))
    assert set(places.values()) <= {p.where for p in caught.value.problems}


def test_numbers_that_json_cannot_hold() -> None:
    plan = sample_plans.plan()
    certificate = msgspec.structs.replace(plan.certificate, objective=float("nan"))
    broken = msgspec.structs.replace(plan, certificate=certificate)
    assert "certificate.objective" in [p.where for p in broken.problems()]
    for write in (broken.dumps, lambda: broken.dump("never.json")):
        with pytest.raises(FxpartError):
            write()
    assert not Path("never.json").exists()


def test_schema_names_every_field() -> None:
    schema = Plan.schema()
    assert schema["$schema"].endswith("2020-12/schema")
    fields = schema["$defs"]["Plan"]["properties"]
    assert set(fields) == set(Plan.__struct_fields__)
    json.dumps(schema)


def test_diff_names_each_leaf() -> None:
    old = sample_plans.plan()
    stages = (msgspec.structs.replace(old.stages[0], label="x"), *old.stages[1:3])
    new = msgspec.structs.replace(old, stages=stages, seed=3, constraints={"stages": 4, "b": True})
    changes = {c.path: (c.old, c.new) for c in diff(old, new)}
    assert changes.pop("stages[0].label") == (old.stages[0].label, "x")
    assert changes.pop("seed") == (0, 3)
    assert changes.pop("constraints.b") == (None, True)
    assert changes.pop("stages[3]")[1] is None
    assert not changes


JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308, 1e-320,
    "", "x", "\x00", "\x1b[2J", "é", "😀", "\u202e", "../../etc/passwd", "a" * 5000,
    [], [[]], {}, {"a": 1}, [None], [0] * 50, {"": {}},
]  # fmt: skip
TEXTS = [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"0123", b"'x'", b'"\\ud800"',
         b"9" * 5000, b"[" * 3000, b'{"a":' * 2000, b"\xff", b"\x00", b""]  # fmt: skip


def mutate(value: Any, rng: random.Random) -> Any:
    """``value`` with one to three random changes anywhere in it."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        places: list[tuple[Any, Any]] = []
        todo = [value]
        while todo:
            here = todo.pop()
            items = here.items() if isinstance(here, dict) else enumerate(here)
            for key, item in items:
                places.append((here, key))
                if isinstance(item, (dict, list)):
                    todo.append(item)
        if not places:
            break
        where, key = rng.choice(places)
        action = rng.random()
        if action < 0.2:
            del where[key]
        elif action < 0.3 and isinstance(where, dict):
            where[rng.choice(["x", "", "__class__", key + "_", "\n"])] = copy.deepcopy(
                rng.choice(JUNK)
            )
        elif action < 0.4 and isinstance(where, list):
            where.append(where[key])
        elif action < 0.5 and isinstance(where[key], (int, float)):
            where[key] = where[key] * rng.choice([-1, 2, 1e300, 0]) + rng.choice([0, 1, -1])
        else:
            where[key] = copy.deepcopy(rng.choice(JUNK))
    return value


def mutated_bytes(value: Any, rng: random.Random) -> bytes:
    """A mutation as JSON text, and now and then one of the text itself."""
    data = json.dumps(mutate(value, rng)).encode()
    action = rng.random()
    at = rng.randrange(len(data) + 1)
    if action < 0.1:
        return data[:at]
    if action < 0.2:
        return data[:at] + rng.choice(TEXTS) + data[at:]
    if action < 0.3:
        start = data.find(b":", at)
        end = min((e for e in (data.find(b",", start), data.find(b"}", start)) if e > 0), default=0)
        if 0 < start < end:
            return data[: start + 1] + rng.choice(TEXTS) + data[end:]
    return data


@pytest.mark.slow
def test_3500_mutations_of_plans() -> None:
    rng = random.Random(2)
    base, valid, refused = raw(), 0, 0
    for _ in range(3500):
        data = mutated_bytes(base, rng)
        try:
            plan = Plan.loads(data)
        except FxpartError as fault:
            refused += 1
            assert fault.code in ("FXP301", "FXP302", "FXP303")
            assert len(str(fault).encode("utf-8", "backslashreplace")) < 200_000
        else:
            valid += 1
            assert plan.problems() == ()
            assert Plan.loads(plan.dumps()) == plan
    assert valid > 50 and refused > 2000  # the mutations are neither all harmless nor all fatal


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_750_mutations_of_clusters(suffix: str, tmp_path: Path) -> None:
    rng = random.Random(3)
    cluster = sample_plans.cluster(3)
    path = tmp_path / f"cluster{suffix}"
    cluster.dump(path)
    text = path.read_bytes()
    base = msgspec.to_builtins(cluster)
    refused = 0
    for _ in range(750):
        if suffix == ".json":
            data = mutated_bytes(base, rng)
        else:
            at, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
            middle = rng.choice([b"", *TEXTS, b"[[devices]]", b"= 1", b"\n", b'"""'])
            data = text[:at] + middle + text[min(end, at + rng.randint(0, 12)) :]
        path.write_bytes(data)
        try:
            found = Cluster.load(path)
        except FxpartError as fault:
            refused += 1
            assert {p.code for p in fault.problems} <= {"FXP401", "FXP402"}
        else:
            assert found.problems() == ()
    assert refused > 300
