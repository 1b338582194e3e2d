"""The smallest files that a reader once failed on, and what it says of them now."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fxpart.costmodels.profile_store import Profile

from fuzz import inputs, programs
from fuzz.driving import LONGEST, bounded
from fuzz.readers import READERS
from fxpart import cli
from fxpart.cluster.files import to_json
from fxpart.cluster.model import Cluster
from fxpart.compiler.graph_json import _distinct
from fxpart.errors import FxpartError
from fxpart.files import toml
from fxpart.plan.model import Plan
from fxpart.sharding import Mesh
from fxpart.solver.archive import decode_joint_problem, encode


def refused(read: Callable[[bytes], object], data: bytes) -> str:
    with pytest.raises(FxpartError) as caught:
        read(data)
    return caught.value.code


def test_a_joint_problem_without_a_workspace() -> None:
    import joint_problems

    document = json.loads(encode(joint_problems.rich_problem(0)))
    document["works"][0]["workspace"] = []
    assert refused(decode_joint_problem, json.dumps(document).encode()) == "FXP206"


def test_toml_keys_of_many_parts_take_no_time() -> None:
    """tomllib took 0.1 s of 3,000 parts, and a hundred times that of 30,000."""
    slowest = 0.0
    for key in ("a." * 30_000 + "a", '"a" . ' * 30_000 + "a"):
        for text in (f"{key} = 1", f"[{key}]", f"x = {{ {key} = 1 }}"):
            start = time.process_time()
            with pytest.raises(ValueError, match="128 parts"):
                toml(text)
            slowest = max(slowest, time.process_time() - start)
            assert refused(READERS["cluster-toml"].read, text.encode()) == "FXP401"
            assert refused(READERS["annotations-toml"].read, text.encode()) == "FXP111"
    for text in ("x = '" + "y" * 200_000 + "'", "x = [" + "1.5, " * 20_000 + "]"):
        assert list(toml(text)) == ["x"]
    assert slowest < 0.5


def test_a_rank_that_tells_of_parts_of_other_dims() -> None:
    """A part of one dim and a part of two, of one tensor, that together have its elements."""
    document = json.loads(READERS["checkpoint-told"].samples()[0].data)
    tensor = next(t for t in document["tensors"].values() if len(t["shape"]) == 2 and t["parts"])
    tensor["parts"][0]["ranges"].append([[0, 1]])
    assert refused(READERS["checkpoint-told"].read, json.dumps(document).encode()) == "FXP513"


def test_an_axis_of_more_digits_than_python_converts() -> None:
    for size in ("9" * 5000, "0", "1000000", "-1", "٣", ""):
        assert refused(lambda data: Mesh.parse(data.decode()), f"dp={size}".encode()) == "FXP109"
    assert Mesh.parse("dp=002,tp=999999").axes == (("dp", 2), ("tp", 999999))


@pytest.mark.parametrize("csv", [True, False])
def test_a_schedule_of_nothing_but_faults_is_refused_in_few_words(csv: bool) -> None:
    head = "" if csv else "fxpart-schedule x stages=1 microbatches=1 stage_rank=0\n0: "
    data = head + ("x," if csv else "x ") * 50_000
    with pytest.raises(FxpartError) as caught:
        READERS["schedule-csv" if csv else "schedule"].read(data.encode())
    assert len(caught.value.problems) < 110


@pytest.mark.parametrize(
    "change",
    [
        "DROP TABLE ops; CREATE VIEW ops AS WITH RECURSIVE n(i) AS "
        "(SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS setting, i AS key, i AS value, "
        "i AS date FROM n",
        "CREATE TRIGGER t AFTER INSERT ON ops BEGIN DELETE FROM stages; END",
        "DROP TABLE ops; CREATE TABLE ops (setting TEXT, key TEXT, value TEXT, "
        "date TEXT AS (zeroblob(1000000000)))",
        "CREATE TABLE more (x)",
    ],
)
def test_a_profile_that_computes(change: str, tmp_path: Path) -> None:
    """What a view or a trigger says would be run by the database."""
    path = tmp_path / "some.profile"
    Profile(path, create=True).close()
    base = sqlite3.connect(path)
    base.executescript(change)
    base.close()
    for create in (False, True):
        with pytest.raises(FxpartError) as caught:
            Profile(path, create=create)
        assert caught.value.code == "FXP405"


def test_a_profile_with_a_value_that_is_nested_deep(tmp_path: Path) -> None:
    path = tmp_path / "some.profile"
    path.write_bytes(READERS["profile"].samples()[0].data)
    base = sqlite3.connect(path)
    base.execute("UPDATE stages SET value = ?", ('{"parts":' + "[" * 100_000,))
    base.commit()
    base.close()
    with pytest.raises(FxpartError, match="FXP405"):
        inputs.read_profile(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("nodes", 1, "target"), {"function": "os:system"}),
        (("nodes", 1, "target"), {"function": "builtins:exec"}),
        (("nodes", 1, "target"), {"function": "torch:load"}),
        (("nodes", 1, "target"), {"function": "antigravity:fly"}),
        (("nodes", 1, "target"), {"operation": "load_library"}),
        (("nodes", 1, "target"), {"operation": "aten.save.default"}),
        (("nodes", 1, "target"), {"operation": "aten.save"}),
        (("nodes", 1, "target"), {"operation": "aten.from_file.default"}),
        (("nodes", 1, "target"), {"operation": "__class__.__init__.__globals__"}),
        (("nodes", 1, "target"), {"__reduce__": "os:system"}),
        (("nodes", 0, "target"), "x=print(1)"),
        (("nodes", 0, "name"), "x, y=print(1)"),
        (("nodes", 1, "target"), 'a.b"); print(1); ("'),
        (("nodes", 0, "op"), "call_method"),
        (("nodes", 0, "kwargs"), {"dict": {"x=print(1), y": 1}}),
        (("nodes", 0, "value", "dtype"), "load"),
    ],
)
def test_a_reproducer_that_names_what_is_no_part_of_a_graph(
    place: tuple[str | int, ...], value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = READERS["reproducer"].samples()[0].data
    document = json.loads(graph)
    assert [node["op"] for node in document["nodes"][:2]] == ["placeholder", "get_attr"]
    *above, last = place
    held = document
    for key in above:
        held = held[key]
    held[last] = value
    if isinstance(value, dict) and last == "target":
        held["op"] = "call_function"
    assert refused(READERS["reproducer"].read, json.dumps(document).encode()) == "FXP109"
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_program_whose_lane_is_none() -> None:
    """Its digest is right, and its content is not."""
    for data in (b"{}", b"\xff", b'{"stages":[', b"[" * 100_000):
        assert refused(READERS["program-lane"].read, data) == "FXP505"


HUGE = int("9" * 400)  # beyond a float


@pytest.mark.parametrize("number", [HUGE, -HUGE, 1 << 63])
def test_a_plan_with_a_number_beyond_a_float(number: int) -> None:
    """What came after the check of numbers computed with it."""
    plan = json.loads(READERS["plan"].samples()[0].data)
    named = 0
    for key, value in plan.items():
        if type(value) is int and key != "version":
            changed = json.dumps({**plan, key: number}).encode()
            with pytest.raises(FxpartError) as caught:
                READERS["plan"].read(changed)
            found = [p.where for p in caught.value.problems]
            assert found[0] == key  # and what follows from it, where that can be computed
            assert found == [key] or abs(number) < HUGE
            named += 1
    assert named >= 3


@pytest.mark.slow
def test_a_plan_that_names_ranks_without_end() -> None:
    """Each of its texts stands for no more than a plan can have; together they filled memory."""
    plan = json.loads(READERS["plan"].samples()[0].data)
    plan["stages"] = [{**plan["stages"][0], "ranks": "0-1048570"}] * 1000
    with bounded():
        assert refused(READERS["plan"].read, json.dumps(plan).encode()) == "FXP303"


def test_a_cluster_with_counts_beyond_a_float() -> None:
    """Cores, threads and ranks were not bounded, and are divided by."""
    cluster = json.loads(to_json(Cluster.parse("2x2xh100")))
    cluster["hosts"] = [{"name": d["host"], "cores": HUGE} for d in cluster["devices"][::2]]
    given = json.dumps(cluster).encode()
    assert refused(READERS["cluster-json"].read, given) == "FXP401"
    cluster["hosts"][0]["cores"] = cluster["hosts"][1]["cores"] = cluster["devices"][0][
        "threads"
    ] = 1 << 60
    with pytest.raises(FxpartError) as caught:
        READERS["cluster-json"].read(json.dumps(cluster).encode())
    assert [problem.code for problem in caught.value.problems] == ["FXP402"] * 3


def test_a_cluster_of_thousands_of_faults_is_refused_in_few_words() -> None:
    cluster = json.loads(to_json(Cluster.parse("local:2")))
    cluster["hosts"] = [{"name": "local", "slowdown": [0] * 16_000}]
    with pytest.raises(FxpartError) as caught:
        READERS["cluster-json"].read(json.dumps(cluster).encode())
    assert len(caught.value.problems) == 256 and len(str(caught.value)) < LONGEST
    assert caught.value.problems[-1].why == "15745 more problems are not listed"


NCCL = """# Rank 0 Group 0 Pid 1 on a device 0 [0x1] NVIDIA A100
# Rank 1 Group 0 Pid 2 on a device 1 [0x2] NVIDIA A100
size count time
{} 1 4 1
"""


@pytest.mark.parametrize("size", ["1e308", "9" * 400, "1e19", "1.5", "nan", "-1"])
def test_nccl_tests_of_sizes_that_cannot_be(size: str) -> None:
    for name in ("nccl", "recognised"):
        assert refused(READERS[name].read, NCCL.replace("{}", size).encode()) == "FXP407"


@pytest.mark.slow
def test_nccl_tests_of_more_ranks_than_can_be() -> None:
    devices = [{"hostname": f"h{n}", "device": 0, "device_info": "A100"} for n in range(10_000)]
    text = {"config": {"devices": devices, "nthreads": 10_000}, "results": [{"size": 1}]}
    with bounded():
        assert refused(READERS["nccl"].read, json.dumps(text).encode()) == "FXP407"


@pytest.mark.slow
def test_slurm_cores_of_more_nodes_than_can_be() -> None:
    """Each part stood for 16384 nodes, however many there were already."""
    text = "SLURM_JOB_NODELIST=n[1-2]\nSLURM_GPUS_ON_NODE=1\nSLURM_JOB_CPUS_PER_NODE="
    with bounded():
        READERS["slurm"].read((text + ",".join(["1(x16384)"] * 9_000)).encode())


def test_ops_of_a_profile_with_sizes_beyond_a_float() -> None:
    """And with sizes that are nested deep."""
    for sizes in (HUGE, "[" * 90_000):
        key = f'["aten.relu.default",[["float32",[{sizes},3]]],[["float32",[2,3]]],[],[0]]'
        READERS["profile-rows"].read(f"ops.key\0\0{key} forward".encode())


def test_a_path_that_is_no_text() -> None:
    """What is said of it can be printed, and sent as JSON."""
    with pytest.raises(FxpartError) as caught:
        Plan.load(os.fsdecode(b"/none/\xff.json"))
    assert "/none/\\udcff.json" in str(caught.value)
    assert cli.run(["explain", os.fsdecode(b"/none/\xff.json"), "--json"]) == 2


@pytest.mark.slow
def test_a_reproducer_whose_symbols_have_no_size_or_all_the_same() -> None:
    """Sizes were counted up one by one until they were free, and at least 2."""
    document = json.loads(READERS["reproducer"].samples()[0].data)
    for size in (-(1 << 62), 1e308, 1 << 62, None, "x"):
        changed = json.dumps({**document, "symbols": {"s0": size, "s1": size}}).encode()
        start = time.process_time()
        try:
            READERS["reproducer"].read(changed)
        except FxpartError as caught:
            assert caught.code == "FXP109"
        assert time.process_time() - start < 1
    start = time.process_time()
    found = _distinct({f"s{n}": n % 7 for n in range(20_000)})
    assert time.process_time() - start < 1
    assert sorted(found.values()) == list(range(2, 20_002))
    assert _distinct({"a": 5, "b": 5, "c": -9, "d": 6, "e": 2}) == {
        "a": 5, "b": 6, "c": 2, "d": 7, "e": 3,
    }  # fmt: skip


def test_weights_whose_header_is_nested_deep_or_endless() -> None:
    read = READERS["weights"].read
    wrong = (b"[" * 100_000, b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}')
    for header in wrong:
        assert refused(read, programs.with_length(header)) == "FXP110"
    assert refused(READERS["weights-index"].read, b'{"weight_map":' + b"[" * 100_000) == "FXP110"


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "{}.json"],
        ["cluster", "show", "{}.json"],
        ["schedule", "validate", "{}.json"],
        ["cluster", "import", "{}.json"],
        ["cluster", "import", "{}.json", "--format", "topo"],
        ["profile", "--show", "{}.json"],
        ["ckpt", "convert", "{}.json", "to", "--to", "hf"],
        ["ckpt", "verify", "{}.json"],
        ["postmortem", "{}.json"],
        ["whatif", "{}.json"],
        ["diff", "{}.json", "{}.json"],
        ["validate", "{}.json"],
        ["report", "{}.json", "--trace", "{}.json"],
    ],
)
def test_what_is_no_regular_file_is_not_waited_for(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that nobody writes would block for ever; a device may never end."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.json")
    os.symlink("/dev/zero", "zero.json")
    for name in ("pipe", "zero"):
        given = [argument.format(name) for argument in arguments]
        assert cli.run(given) == 2
