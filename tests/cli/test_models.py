"""The verbs that take a model: from doctor and plan to training on processes, and on meshes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sample_plans
from cli_calls import TARGET, call, fresh

from fxpart.plan.model import Plan


@pytest.fixture
def target(tmp_path: Path) -> str:
    """A file with targets; append ``:name``."""
    path = tmp_path / "target_of_cli.py"
    path.write_text(TARGET)
    return str(path)


def test_users_mistakes(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = call(capsys, "plan", "nowhere.py:f", status=2)
    assert "FXP107" in err and "nowhere.py" in err
    _, err = call(capsys, "plan", f"{target}:refuses", status=2)
    assert "ValueError: not today" in err and "target_of_cli.py:" in err
    _, err = call(capsys, "plan", f"{target}:net", "--constraint", "stages", status=2)
    assert "write KEY=VALUE" in err
    _, err = call(capsys, "plan", f"{target}:net", "--cluster", "nonsense", status=2)
    assert "FXP404" in err


@pytest.mark.slow
def test_doctor(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, "doctor", f"{target}:net", "-b", "16", "--json")
    found = json.loads(out)
    assert (found["model"], found["batch_size"], found["batch"]) == ("Net", 16, "symbolic")
    assert (found["loss"], found["example"]) == ("given", "given")
    assert found["parameters"] == 6 * (16 * 16 + 16) + 16 * 4 + 4
    assert found["parameter_tensors"] == 14 and found["blocks"] > 2
    assert [i["batch_dim"] for i in found["inputs"]] == [0, 0]
    out, _ = call(capsys, "doctor", f"{target}:net")
    assert out.startswith("Net can be partitioned") and "loss          given" in out
    _, err = call(capsys, "doctor", f"{target}:branches", status=2)
    line = 1 + TARGET.splitlines().index("        if x.sum() > 0:")
    assert "FXP103" in err and f"target_of_cli.py:{line}" in err


@pytest.mark.slow
def test_plan_to_training(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole path on a small model, each verb on the last one's result."""
    plan, name = str(tmp_path / "p.json"), f"{target}:net"
    out, err = call(
        capsys, "plan", name, "-c", "local:2", "-m", "4", "--constraint", "stages=2", "-o", plan
    )
    assert "2 stages on 2 ranks" in out and "wrote" in err
    found = Plan.load(plan)
    assert (found.microbatches, len(found.stages), found.constraints["stages"]) == (4, 2, 2)
    out, _ = call(
        capsys, "plan", name, "-c", "local:2", "-m", "4", "--constraint", "stages=2", "--json"
    )
    assert out == Path(plan).read_text()
    folder = tmp_path / "build"
    out, _ = call(
        capsys, "export", name, "-c", "local:2", "--plan", plan, "-o", str(folder), "--json"
    )
    listed = json.loads(out)["files"]
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == set(listed)
    assert Plan.load(folder / "plan.json") == found
    out, err = call(capsys, "verify", name, "-c", "local:2", "--plan", plan, "--json")
    result = json.loads(out)
    assert result["equal"] and result["passed"] and len(result["losses"]) == 3
    out, _ = call(capsys, "verify", name, "--ranks", "3", "--steps", "1")
    assert "3 stages on 3 ranks" in out and "bit for bit" in out
    out, err = call(
        capsys,
        "train",
        name,
        "-c",
        "local:2",
        "--plan",
        plan,
        "--steps",
        "4",
        "--lr",
        "0.01",
        "--save",
        str(tmp_path / "weights"),
        "--json",
    )
    losses = [json.loads(line)["loss"] for line in out.splitlines()]
    assert len(losses) == 4 and losses[3] < losses[0]
    assert "the example batch is repeated" in err
    assert "wrote model.safetensors into" in err
    weights = str(tmp_path / "weights")
    out, _ = call(
        capsys, "train", name, "-c", "local:2", "--plan", plan, "--steps", "1",
        "--weights", weights, "--json",
    )  # fmt: skip
    assert json.loads(out)["loss"] < losses[3]


@pytest.mark.slow
def test_training_data(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("-c", "local:2", "--steps", "3")
    out, err = call(capsys, "train", f"{target}:with_data", *options)
    assert out.count("loss") == 3 and "repeated" not in err
    out, err = call(capsys, "train", f"{target}:short_data", *options)
    assert out.count("loss") == 1 and "the data ended after 1 steps" in err
    out, err = call(capsys, "train", f"{target}:broken_data", *options, status=2)
    assert out.count("loss") == 1 and "KeyError: 'no more files'" in err and "FXP107" in err


@pytest.mark.slow
def test_training_on_two_processes(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same losses as in one process, in order and told once."""
    given = ("train", f"{target}:net", "--steps", "3", "--constraint", "stages=2", "--json")
    out, _ = call(capsys, *given, "--cluster", "local:2")
    done = fresh(*given, "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    one, two = ([json.loads(line) for line in text.splitlines()] for text in (out, done.stdout))
    assert [r["step"] for r in two] == [1, 2, 3]
    assert [r["loss"] for r in one] == [r["loss"] for r in two]


@pytest.mark.slow
def test_processes_that_fail(target: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    sample_plans.plan().dump(plan)
    done = fresh("train", f"{target}:net", "--nproc", "2", "--plan", str(plan))
    assert done.returncode == 2 and "FXP502" in done.stderr
    done = fresh("train", f"{target}:broken_data", "--nproc", "2", "--steps", "3")
    assert done.returncode == 2, done.stderr
    assert "KeyError: 'no more files'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_process_that_is_killed(target: str) -> None:
    done = fresh("train", f"{target}:killed_data", "--nproc", "2", "--steps", "3")
    assert done.returncode == 5, done.stderr
    assert "FXP507" in done.stderr and "signal 9" in done.stderr and "rank 1" in done.stderr
    assert "Traceback" not in done.stderr


MESH = ("--mesh", "dp=2,tp=2")
COLUMNS = """
[annotations]
"layers.*.weight" = "tp:S(0)"
"""


@pytest.mark.slow
def test_a_mesh_from_plan_to_verify(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plan with annotations, dump what they are completed to, explain, verify, train, export."""
    said, dumped, path = tmp_path / "said.toml", tmp_path / "all.json", tmp_path / "mesh.json"
    said.write_text(COLUMNS)
    net, common = f"{target}:net", ("--annotations", str(said), "--zero", "1", "-m", "2")
    out, _ = call(
        capsys, "plan", net, "-c", "local:8", *MESH, *common, "--constraint", "stages=2",
        "-o", str(path), "--dump-annotations", str(dumped),
    )  # fmt: skip
    assert "mesh dp=2,tp=2: 4 ranks per stage" in out and "ZeRO 1 over dp" in out
    held = json.loads(dumped.read_text())["annotations"]
    assert "tp:S(0)" in held["layers.0.weight"] and held["input:x"].startswith("dp:S(0)")
    out, _ = call(capsys, "explain", str(path), "layers.0.weight")
    assert "annotation 'layers.*.weight'" in out
    assert "no such" not in call(capsys, "explain", str(path), "nothing", status=2)[1]
    out, _ = call(capsys, "verify", net, "--plan", str(path))
    assert "2 stages on 8 ranks" in out and "DIFFERENT" not in out
    out, _ = call(capsys, "train", net, "--plan", str(path), "--steps", "2")
    assert out.count("loss") == 2
    call(capsys, "export", net, "--plan", str(path), "-o", str(tmp_path / "build"))
    names = {p.name for p in (tmp_path / "build").iterdir()}
    assert {"stage0.py", "stage1.py", "rank7.txt"} <= names and "stage1_lane1.py" not in names
    again = tmp_path / "again.json"
    call(
        capsys, "plan", net, "-c", "local:8", *MESH, "--zero", "1", "-m", "2",
        "--annotations", str(dumped), "--constraint", "stages=2", "-o", str(again),
    )  # fmt: skip
    both = [json.loads(p.read_text())["sharding"]["placed"] for p in (path, again)]
    ways = [{(n, e["placements"]) for e in side for n in e["names"]} for side in both]
    assert ways[0] == ways[1]


def test_what_does_not_fit_a_mesh_is_told_at_once(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    net = f"{target}:net"
    constraints = ("--constraint", "stages=3", "--constraint", "zero_axis=pp", "--zero", "2")
    _, err = call(capsys, "plan", net, "-c", "local:4", *MESH, *constraints, status=2)
    assert "zero_axis='pp'" in err and "they need 12 devices" in err
    _, err = call(capsys, "plan", net, "--constraint", "zero_axis=dp", status=2)
    assert "requires `mesh`" in err
    _, err = call(capsys, "verify", net, *MESH, "--ranks", "6", status=2)
    assert "a multiple of 4" in err


@pytest.mark.slow
def test_verify_a_mesh_on_real_processes(target: str) -> None:
    done = fresh("verify", f"{target}:net", "--mesh", "tp=2", "--nproc", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == 2 and found["stages"] == 1 and found["passed"]
