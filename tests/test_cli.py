"""The command line: exit statuses, what goes where, no tracebacks, no torch without need."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sample_plans

from fxpart import cli
from fxpart.errors import CODES
from fxpart.plan import Plan

TARGET = """
import os, torch, fxpart
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 4)
    def forward(self, x):
        for layer in self.layers:
            x = self.drop(torch.relu(layer(x)))
        return self.head(x)

def _batch():
    torch.manual_seed(1)
    return torch.randn(8, 16), torch.randint(0, 4, (8,))

def net():
    torch.manual_seed(0)
    return fxpart.Workload(Net(), example=_batch(), loss=nn.functional.cross_entropy)

def with_data():
    torch.manual_seed(0)
    return fxpart.Workload(Net(), example=_batch(), loss=nn.functional.cross_entropy,
                           data=[_batch()] * 2, optimizer=torch.optim.SGD)

def short_data():
    work = with_data()
    return fxpart.Workload(work.model, example=work.example, loss=work.loss,
                           data=iter([_batch()]))

def broken_data():
    def data():
        yield _batch()
        raise KeyError("no more files")
    work = with_data()
    return fxpart.Workload(work.model, example=work.example, loss=work.loss,
                           data=data)

def killed_data():
    def data():
        yield _batch()
        if os.environ.get("RANK") == "1":
            os.kill(os.getpid(), 9)
        yield _batch()
    work = with_data()
    return fxpart.Workload(work.model, example=work.example, loss=work.loss, data=data)

class Branches(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x * 2
        return x

def branches():
    return Branches(), (torch.zeros(4, 3),)

def refuses():
    raise ValueError("not today")
"""


@pytest.fixture
def plan(tmp_path: Path) -> str:
    """A plan file."""
    path = tmp_path / "plan.json"
    sample_plans.plan().dump(path)
    return str(path)


@pytest.fixture
def target(tmp_path: Path) -> str:
    """A file with targets; append ``:name``."""
    path = tmp_path / "target_of_cli.py"
    path.write_text(TARGET)
    return str(path)


def call(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> tuple[str, str]:
    """stdout and stderr of a call in this process, which must exit with ``status``."""
    found = cli.run(list(arguments))
    out, err = capsys.readouterr()
    assert found == status, out + err
    assert "Traceback" not in err
    return out, err


def fresh(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """A call in a process of its own; ``code`` runs in place of the command line."""
    start = ["-c", code] if code else ["-m", "fxpart"]
    return subprocess.run(
        [sys.executable, *start, *arguments], capture_output=True, text=True, check=False
    )


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, "--help")
    folder = Path(cli.__file__).parent
    # The others hold what several verbs share, or a verb of a verb.
    verbs = {p.stem for p in folder.glob("*.py") if "\ndef command(" in p.read_text()}
    assert set(cli.VERBS) == verbs
    assert all(f"\n  {verb} " in out for verb in verbs)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_each_verb_has_help_and_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, verb, "--help")
    assert "--json" in out


def test_bare_call_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = call(capsys, status=2)
    assert "Verbs:" in out + err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, "--version")
    assert re.fullmatch(r"fxpart, version \d+\.\d+\.\d+\n", out)


@pytest.mark.parametrize(
    "arguments", [["foo"], ["plan"], ["--no-such"], ["explain", "--no-such", "x"], ["validate"],
                  ["simulate", "x", "-m", "0"]]
)  # fmt: skip
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out, err = call(capsys, *arguments, status=2)
    assert out == "" and "Error:" in err


# Verbs and subjects that must work without the heavy packages, and quickly.
LIGHT = [["--help"], ["explain", "PLAN"], ["explain", "FXP204"], ["validate", "PLAN"],
         ["simulate", "PLAN"], ["diff", "PLAN", "PLAN"], ["report", "PLAN", "-o", "OUT"],
         ["explain", "PLAN", "--json"]]  # fmt: skip


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_light_verbs_load_nothing_heavy(arguments: list[str], plan: str, tmp_path: Path) -> None:
    arguments = [
        a.replace("PLAN", plan).replace("OUT", str(tmp_path / "r.html")) for a in arguments
    ]
    code = (
        "import sys, resource, fxpart.cli\n"
        "status = fxpart.cli.run(sys.argv[1:])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "heavy = [m for m in ('torch', 'ortools', 'sympy', 'numpy', 'rich') if m in sys.modules]\n"
        "print(status, used.ru_utime + used.ru_stime, heavy, file=sys.stderr)"
    )
    done = fresh(*arguments, code=code)
    status, used, heavy = done.stderr.splitlines()[-1].split(maxsplit=2)
    assert (status, heavy) == ("0", "[]"), done.stderr
    # The promise is for the two that are typed most; drawing may take a little longer.
    assert float(used) < (0.3 if arguments[0] in ("--help", "explain") else 1.0)


def test_explain_a_plan(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = call(capsys, "explain", plan)
    assert out.startswith("GPT2LMHeadModel on local:4") and err == ""
    out, _ = call(capsys, "explain", plan, "--json")
    found, given = json.loads(out), Plan.load(plan)
    assert found["step"]["seconds"] == given.prediction.step_seconds
    assert [one["stage"] for one in found["by_stage"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_a_page(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, "explain", code.lower())
    assert out.startswith(f"# {code}: {CODES[code][0]}\n")
    # An example as it is printed, with the code's own title, and advice.
    assert re.search(rf"(?m)^ +{code}  {re.escape(CODES[code][0])}$", out)
    assert "What to do" in out


def test_every_page_has_a_code() -> None:
    pages = files("fxpart").joinpath("docs", "errors").iterdir()
    assert {p.name.removesuffix(".md") for p in pages} == set(CODES)


def test_explain_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert "microbatch" in call(capsys, "explain", "glossary")[0]
    assert "certificate" in call(capsys, "explain", "how_it_chooses")[0]
    found = json.loads(call(capsys, "explain", "FXP301", "--json")[0])
    assert found["exit_status"] == 2 and found["title"] == CODES["FXP301"][0]
    _, err = call(capsys, "explain", "FXP999", status=2)
    assert "FXP900" in err


def test_validate(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = call(capsys, "validate", plan)
    assert "valid, 4 stages on 4 ranks" in out and err == ""
    broken = tmp_path / "broken.json"
    raw = json.loads(Path(plan).read_text())
    raw["stages"][1]["first"], raw["mesh"]["pipeline"] = 3, 9
    broken.write_text(json.dumps(raw))
    out, err = call(capsys, "validate", plan, str(broken), "--json", status=2)
    first, second = json.loads(out)
    assert first == {"plan": plan, "problems": [], "valid": True}
    assert [p["where"] for p in second["problems"]] == ["stages[1]", "mesh"]
    assert err.count("FXP303") == 4  # a title and a last line for each of the two
    assert json.loads(call(capsys, "validate", "--schema")[0])["$defs"]


def test_diff(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "diff", plan, plan)[0] == "no difference\n"
    other = tmp_path / "other.json"
    msgspec.structs.replace(Plan.load(plan), seed=7).dump(other)
    assert call(capsys, "diff", plan, str(other), status=1)[0] == "seed: 0 -> 7\n"
    out, _ = call(capsys, "diff", plan, str(other), "--json", status=1)
    assert json.loads(out) == [{"kind": "given", "new": 7, "old": 0, "path": "seed"}]
    slower = sample_plans.plan(slow=2.0)
    msgspec.structs.replace(slower, microbatches=7).dump(other)
    lines = call(capsys, "diff", plan, str(other), status=1)[0].splitlines()
    at = lines.index("Predicted")
    assert lines[0] == "Decided" and lines[1] == "  microbatches: 8 -> 7"
    old, new = (Plan.load(p).prediction.step_seconds for p in (plan, other))
    words = f"  prediction.step_seconds: {old:.6g} -> {new:.6g} ({(new / old - 1) * 100:+.1f} %)"
    assert words in lines[at:]


def test_simulate(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    out, err = call(capsys, "simulate", plan, "--schedule", "gpipe", "--trace", str(trace))
    assert out.startswith("gpipe: ") and "8 microbatches in flight" in out and "wrote" in err
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(e["ph"] == "X" and e["cat"] == "compute" for e in events) == 2 * 4 * 8
    found = json.loads(call(capsys, "simulate", plan, "-m", "3", "--json")[0])
    assert found["ranks"] == 4 and len([s for s in found["spans"] if s["kind"] == "F"]) == 12
    _, err = call(capsys, "simulate", plan, "--schedule", "zigzag", status=2)
    assert "FXP109" in err


def test_report(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.html"
    out, err = call(capsys, "report", plan, "-o", str(path))
    assert out == "" and str(path) in err
    assert path.read_text().startswith("<!DOCTYPE html>")
    out, _ = call(capsys, "report", plan, "-o", str(path), "--json")
    assert json.loads(out) == {"files": {str(path): path.stat().st_size}}
    _, err = call(capsys, "report", plan, "-o", str(tmp_path / "no" / "r.html"), status=4)
    assert "FXP603" in err


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(call(capsys, "env", "--json")[0])
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"].startswith("2.") and "transports" in found
    assert re.search(r"(?m)^torch +2\.", call(capsys, "env")[0])


def test_errors_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, err = call(capsys, "explain", str(tmp_path / "none.json"), "--json", status=2)
    (problem,) = json.loads(out)["error"]
    assert problem["code"] == "FXP301" and "FXP301" in err


def test_our_own_fault(
    plan: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(path: str) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(Plan, "load", fault)
    _, err = call(capsys, "validate", plan, status=70)
    assert "RuntimeError: boom" in err and "--traceback" in err
    assert cli.run(["--traceback", "validate", plan]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_interrupt(
    plan: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(path: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Plan, "load", stop)
    assert call(capsys, "validate", plan, status=130)[1].endswith("interrupted\n")


def test_names_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = sample_plans.plan()
    evil = "\x1b]0;title\x07\x1b[2J\u009b31mname"
    model = msgspec.structs.replace(plan.model, name=evil)
    path = tmp_path / "evil.json"
    msgspec.structs.replace(plan, model=model).dump(path)
    out, _ = call(capsys, "explain", str(path))
    assert "name" in out and not set(out) & {"\x1b", "\x07", "\u009b"}


def test_closed_pipe_is_quiet(plan: str) -> None:
    command = f"'{sys.executable}' -m fxpart explain '{plan}' --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "{\n" and done.stderr == ""


def test_output_in_a_poor_encoding(plan: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fxpart", "explain", plan],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "\\u2026" in done.stdout


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
    assert out.startswith("Net can be partitioned") and "the one that you gave" in out
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
        "--json",
    )
    losses = [json.loads(line)["loss"] for line in out.splitlines()]
    assert len(losses) == 4 and losses[3] < losses[0]
    assert "the example batch is repeated" in err


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
def test_training_on_two_processes(target: str) -> None:
    """The same losses as in one process, in order and told once."""
    name = f"{target}:net"
    both = [
        fresh("train", name, *where, "--steps", "3", "--constraint", "stages=2", "--json")
        for where in (("--cluster", "local:2"), ("--nproc", "2"))
    ]
    for done in both:
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    one, two = ([json.loads(line) for line in done.stdout.splitlines()] for done in both)
    assert [r["step"] for r in two] == [1, 2, 3]
    assert [r["loss"] for r in one] == [r["loss"] for r in two]


@pytest.mark.slow
def test_processes_that_fail(target: str, plan: str) -> None:
    done = fresh("train", f"{target}:net", "--nproc", "2", "--plan", plan)
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
    assert "mesh dp=2,tp=2: 4 ranks a stage" in out and "ZeRO 1 over dp" in out
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
    assert "nothing without a mesh" in err
    _, err = call(capsys, "verify", net, *MESH, "--ranks", "6", status=2)
    assert "a multiple of 4" in err


@pytest.mark.slow
def test_verify_a_mesh_on_real_processes(target: str) -> None:
    done = fresh("verify", f"{target}:net", "--mesh", "tp=2", "--nproc", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == 2 and found["stages"] == 1 and found["passed"]
