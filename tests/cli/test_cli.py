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
from cli_calls import call, fresh

from fxpart import cli, units
from fxpart.cli.explain import RENAMED
from fxpart.errors import CODES
from fxpart.plan.model import Plan


@pytest.fixture
def plan(tmp_path: Path) -> str:
    """A plan file."""
    path = tmp_path / "plan.json"
    sample_plans.plan().dump(path)
    return str(path)


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, "--help")
    folder = Path(cli.__file__).parent
    # The others hold what several verbs share, or a verb of a verb.
    verbs = {p.stem for p in folder.glob("*.py") if "\ndef command(" in p.read_text()}
    assert set(cli.VERBS.builtin) == verbs
    assert all(f"\n  {verb} " in out for verb in verbs)


@pytest.mark.parametrize("verb", cli.VERBS.builtin)
def test_each_verb_has_help_and_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, verb, "--help")
    assert "--json" in out


@pytest.mark.slow
def test_an_installed_package_adds_a_command(tmp_path: Path) -> None:
    """It is listed without being imported, runs with its own options, and reports as all do."""
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fxpart.commands]\nhello = outside:hello\nbroken = outside:NOTHING\n"
    )
    (tmp_path / "outside.py").write_text(
        "import click\nprint('imported')\nNOTHING = 3\n"
        "@click.command()\n@click.argument('name')\n"
        "def hello(name):\n    click.echo(f'hello {name}')\n"
    )
    root = Path(cli.__file__).parents[2]
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(root)!r}]\n"
    code += "from fxpart.cli import main; main()"

    def outside(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100
        )

    listed = outside("--help")
    assert "\n  hello " in listed.stdout and "imported" not in listed.stdout
    assert outside("hello", "you").stdout == "imported\nhello you\n"
    broken = outside("broken")
    assert broken.returncode == 2 and "FXP109" in broken.stderr and "click" in broken.stderr


def test_names_of_commands_are_in_the_table_only() -> None:
    """The module of every command is `fxpart.cli.NAME`; no module dispatches by name."""
    for verb in cli.VERBS.builtin:
        spec = cli.VERBS[verb]
        assert isinstance(spec, cli.CommandSpec) and spec.module == f"fxpart.cli.{verb}"
        assert spec.summary.endswith((".", "?")) and spec.load().name == "command"


def test_bare_call_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = call(capsys, status=2)
    assert "Commands:" in out + err


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
         ["explain", "PLAN", "--json"], ["schedule", "simulate", "zb-v", "-s", "4", "-m", "4"],
         ["schedule", "validate", "1f1b", "-s", "4", "-m", "4"]]  # fmt: skip


@pytest.mark.slow
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
    assert found["step"]["step_time"] == given.prediction.simulated_seconds
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
    assert "Certificate" in call(capsys, "explain", "understanding_a_plan")[0]
    found = json.loads(call(capsys, "explain", "FXP301", "--json")[0])
    assert found["exit_status"] == 2 and found["title"] == CODES["FXP301"][0]
    _, err = call(capsys, "explain", "FXP999", status=2)
    assert "FXP900" in err


@pytest.mark.parametrize("old", RENAMED)
def test_explain_an_earlier_name_of_a_page(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = call(capsys, "explain", old)
    assert err == f"The page '{old}' is now part of '{RENAMED[old]}'.\n"
    assert out == call(capsys, "explain", RENAMED[old])[0] and out.startswith("# ")


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
    same = units.seconds(Plan.load(plan).prediction.expected_seconds)
    out, _ = call(capsys, "diff", plan, str(other), status=1)
    assert out == f"step time {same} -> {same} (+0.0 %)\nseed: 0 -> 7\n"
    out, _ = call(capsys, "diff", plan, str(other), "--json", status=1)
    found = json.loads(out)
    assert found["changes"] == [{"kind": "given", "new": 7, "old": 0, "path": "seed"}]
    assert found["step_time"]["old"] == Plan.load(plan).prediction.expected_seconds
    slower = sample_plans.plan(slow=2.0)
    msgspec.structs.replace(slower, microbatches=7).dump(other)
    lines = call(capsys, "diff", plan, str(other), status=1)[0].splitlines()
    at = lines.index("Predictions")
    assert lines[1:3] == ["Decisions", "  microbatches: 8 -> 7"]
    old, new = (Plan.load(p).prediction.step_seconds for p in (plan, other))
    name = "prediction.step_seconds (closed form)"
    words = f"  {name}: {old:.6g} -> {new:.6g} ({(new / old - 1) * 100:+.1f} %)"
    assert words in lines[at:]


def test_simulate(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    out, err = call(capsys, "simulate", plan, "--schedule", "gpipe", "--trace", str(trace))
    assert "\ngpipe: simulated " in out and "8 microbatches in flight" in out and "wrote" in err
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
    assert json.loads(out) == {
        "files": {str(path): path.stat().st_size},
        "step_time": Plan.load(plan).prediction.expected_seconds,
    }
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


@pytest.mark.slow
def test_closed_pipe_is_quiet(plan: str) -> None:
    command = f"'{sys.executable}' -m fxpart explain '{plan}' --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "{\n" and done.stderr == ""


@pytest.mark.slow
def test_output_in_a_poor_encoding(plan: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fxpart", "explain", plan],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "\\u2026" in done.stdout
