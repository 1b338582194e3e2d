"""A plain installation has no torch: what works then, and what the other commands report."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cli_calls import call, fresh
from sample_plans import plan as sample_plan

from fxpart.cli import VERBS
from fxpart.cli.completion import _FILES

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        first = name.partition(".")[0]
        if first in ("torch", "functorch", "torchgen"):
            raise ModuleNotFoundError(f"No module named {first!r}", name=first)

sys.meta_path.insert(0, Blocked())
"""
COMMANDS = (
    "--help", "validate a.json", "explain a.json", "explain FXP204", "diff a.json a.json",
    "report a.json -o r.html", "simulate a.json", "export a.json --to torchtitan",
    "schedule show 1f1b -s 2 -m 4", "cluster show 2x8xh100", "launch --slurm -- train.py",
    "completion bash", "env",
)  # fmt: skip
NEEDING = (
    "plan m.py:f", "doctor m.py:f", "train m.py:f", "profile m.py:f -o p.json", "verify m.py:f",
    "export m.py:f -o out", "emulate m.py:f --stages 2", "rules m.py:f",
)  # fmt: skip


@pytest.mark.slow
def test_commands_on_plan_files_need_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sample_plan(4).dump("a.json")
    code = BLOCKED + (
        "from fxpart import cli\n"
        f"print([(c, cli.run(c.split())) for c in {COMMANDS!r}], file=sys.stderr)\n"
        f"print([c for c in {[*VERBS.builtin]!r} if cli.VERBS[c].load() is None])\n"
    )
    done = fresh(code=code)
    assert done.returncode == 0, done.stderr
    statuses = done.stderr.strip().splitlines()[-1]
    assert statuses == str([(command, 0) for command in COMMANDS]), done.stderr


@pytest.mark.slow
def test_other_commands_report_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text("import torch\n")
    code = BLOCKED + (
        "from fxpart import cli\n"
        f"for command in {NEEDING!r}:\n"
        "    print('begin', command, file=sys.stderr)\n"
        "    print('status', cli.run(command.split()), file=sys.stderr)\n"
        "import fxpart\n"
        "for name in ('compile', 'Program', 'annotate', 'capture'):\n"
        "    try:\n"
        "        getattr(fxpart, name)\n"
        "    except fxpart.FxpartError as missing:\n"
        "        print(missing.code, missing.problems[0].fix)\n"
        "print(fxpart.Plan, fxpart.Cluster)\n"
    )
    done = fresh(code=code)
    assert done.returncode == 0, done.stderr
    parts = done.stderr.split("begin ")[1:]
    assert len(parts) == len(NEEDING)
    for part in parts:
        assert "FXP601" in part and "status 4" in part, part
        assert "pip install 'fxpart[train]'" in part and "Traceback" not in part, part
    assert done.stdout.count("FXP601 pip install 'fxpart[train]'") == 4


def test_requirements_are_in_the_conda_recipe() -> None:
    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {"torch": "pytorch", "ortools": "ortools-python"}
    wanted = {f"python {project['requires-python']}"}
    for text in (*project["dependencies"], *project["optional-dependencies"]["train"]):
        name, _, version = text.partition(">=")
        wanted.add(f"{names.get(name, name)} >={version}")
    assert set(recipe["requirements"]["run"]) == wanted
    version = (ROOT / "fxpart/_version.py").read_text(encoding="utf-8")
    assert f'"{recipe["context"]["version"]}"' in version
    assert recipe["build"]["python"]["entry_points"] == ["fxpart = fxpart.cli:main"]


@pytest.mark.parametrize("shell", list(_FILES))
def test_completion_script_is_valid(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, "completion", shell)
    assert "_FXPART_COMPLETE" in out
    if shutil.which(shell) is not None:
        done = subprocess.run([shell, "-n"], input=out, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    found = json.loads(call(capsys, "completion", shell, "--json")[0])
    assert found["script"].strip("\n") == out.strip("\n")


# What each shell does for TAB after "fxpart postm" and "fxpart export --t".
COMPLETIONS = {
    "bash": """
        eval "$(fxpart completion bash)"
        complete_words() { COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _fxpart_completion fxpart; }
        complete_words fxpart postm; echo "${COMPREPLY[*]}"
        complete_words fxpart export --t; echo "${COMPREPLY[*]}"
    """,
    "fish": """
        fxpart completion fish | source
        complete -C "fxpart postm"
        complete -C "fxpart export --t"
    """,
    "zsh": """
        zmodload zsh/zpty
        zpty terminal zsh -f -i
        zpty -w terminal 'PS1=; autoload -U compinit; compinit -u -D'
        zpty -w terminal 'eval "$(fxpart completion zsh)"'
        zpty -w -n terminal $'fxpart postm\\t'
        zpty -r terminal line '*postmortem*'; print -r -- $line
        zpty -w -n terminal $'\\C-ufxpart export --t\\t'
        zpty -r terminal line '*--to*'; print -r -- $line
    """,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("shell", list(_FILES))
def test_shells_complete_commands_and_options(shell: str, tmp_path: Path) -> None:
    """In the shell itself, where it is installed."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    program = tmp_path / "fxpart"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fxpart "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        [shell, "-c", COMPLETIONS[shell]],
        text=True, capture_output=True, check=False, timeout=60,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TERM": "dumb",
             "HOME": str(tmp_path)},
    )  # fmt: skip
    assert "postmortem" in done.stdout and "--to" in done.stdout, done.stdout + done.stderr


def test_completion_completes_commands_and_options() -> None:
    """As bash asks for it: by variables, of a fresh process."""

    def complete(words: str) -> set[str]:
        count = len(words.split()) - (not words.endswith(" "))
        command = [sys.executable, "-c", "from fxpart.cli import main; main()"]
        done = subprocess.run(
            ["env", "_FXPART_COMPLETE=bash_complete", f"COMP_WORDS={words}",
             f"COMP_CWORD={count}", *command],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return {line.partition(",")[2] for line in done.stdout.splitlines()}

    assert complete("fxpart e") == {"explain", "export", "emulate", "env"}
    assert "--to" in complete("fxpart export --t")
    assert shlex.join(["completion"]) in complete("fxpart c")
