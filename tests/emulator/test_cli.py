"""``fxpart emulate``: its table, JSON and picture; what it refuses; and the page's outputs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from asynchronous_pages import PAGE, filled, table

from fxpart.cli import run
from fxpart.schedule.weight_modes import MODES

TARGETS = str(Path(__file__).parent.parent / "support" / "emulated_targets.py")
SMALL = ["--stages", "3", "--steps", "12", "--lr", "0.1", "--momentum", "0.9"]


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Status, answer and notes of ``fxpart emulate``."""
    status = run(["emulate", *arguments])
    found = capsys.readouterr()
    return status, found.out, found.err


@pytest.mark.slow
def test_table_json_and_picture_say_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    svg = tmp_path / "losses.svg"
    target = f"{TARGETS}:mlp"
    options = [target, *SMALL, "--weights", "spectrain,stash,flush", "--seeds", "2"]
    status, out, notes = called(capsys, *options, "--out", str(svg), "--smooth", "1")
    assert status == 0 and f"wrote {svg}" in notes
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows] == ["weights", "spectrain", "stash", "sync"]
    status, out, _ = called(capsys, *options, "--json")
    found: dict[str, Any] = json.loads(out)
    assert status == 0 and found["seeds"] == [0, 1] and found["stages"] == 3
    sync = found["modes"][2]
    for row, mode in zip(rows[1:], found["modes"], strict=True):
        assert mode["weights"] == row[0]
        assert f"{mode['final_loss']:.4f}" == row[1]
        assert f"{mode['spread']:.4f}" == row[2]
        assert mode["to_sync"] == pytest.approx(mode["final_loss"] - sync["final_loss"])
        assert [len(one["losses"]) for one in mode["runs"]] == [12, 12]
        finals = [one["losses"][-1] for one in mode["runs"]]
        assert mode["final_loss"] == pytest.approx(sum(finals) / 2)  # a tenth of 12: the last one
    first, second = (one["losses"][0] for one in sync["runs"])
    assert first != second, "each seed has its own weights"
    assert found["modes"][0]["runs"][0]["staleness"] == [2, 1, 0]
    text = svg.read_text(encoding="utf-8")
    names = [e.text for e in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}title")]
    assert names[1:] == ["spectrain", "stash", "sync"]


@pytest.mark.slow
def test_a_model_with_its_own_loss_and_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, notes = called(
        capsys,
        f"{TARGETS}:without_data",
        "--steps",
        "4",
        "--weights",
        "sync",
        "--optimizer",
        "muon",
    )
    assert status == 0 and "the example batch is repeated" in notes
    assert out.splitlines()[1].startswith("sync")


@pytest.mark.slow
def test_all_modes_but_those_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, notes = called(capsys, f"{TARGETS}:mlp", *SMALL, "--weights", "all")
    names = [line.split()[0] for line in out.splitlines()[1:]]
    assert status == 0 and "without 2bw: With 1 microbatches per update" in notes
    assert "pipemare" in names and "nadam-stash" in names and not {"2bw", "2bw-ef"} & {*names}
    assert names[0] == "sync" and names.count("sync") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "options", "status", "words"),
    [
        ("mlp", ["--weights", "spektrain"], 2, "Unknown weight mode"),
        ("mlp", ["--weights", ","], 2, "no mode is given"),
        ("mlp", ["--weights", "sync,2bw"], 2, "4 microbatches or more"),
        ("mlp", ["--stages", "20"], 3, "at most 7 stages"),
        ("mlp", ["--stages", "40"], 2, "32"),
        ("mlp", ["--optimizer", "none-such"], 2, "fxpart.optim has an optimizer of this name"),
        ("mlp", ["--optimizer", "adamw", "--momentum", "0.9"], 2, "--momentum 0.9"),
        ("mlp", ["--lr", "-1"], 2, "Invalid learning rate"),
        ("faulty", ["--stages", "2"], 2, "the disk is gone"),
        ("nothing", [], 2, "the module has no nothing"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(
    capsys: pytest.CaptureFixture[str], target: str, options: list[str], status: int, words: str
) -> None:
    found, out, notes = called(capsys, f"{TARGETS}:{target}", *options)
    assert (found, out) == (status, "")
    assert words in notes
    assert ("sync, seed" in notes) == (target == "faulty")


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from fxpart.cli import run; run(['emulate', '--help'])\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--weights" in done.stdout and "spectrain-v2" in done.stdout


_NUMBER = re.compile(r"[+-]?\d+\.\d+")


def test_the_page_has_the_table_of_modes() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in table() for name in MODES)


def test_the_page_shows_what_its_commands_print() -> None:
    """``python tests/support/asynchronous_pages.py`` writes it; other CPUs round otherwise."""
    text = PAGE.read_text(encoding="utf-8")
    again = filled(text)
    assert _NUMBER.sub("#", re.sub(" +", " ", again)) == _NUMBER.sub("#", re.sub(" +", " ", text))
    shown = [float(number) for number in _NUMBER.findall(text)]
    found = [float(number) for number in _NUMBER.findall(again)]
    assert found == pytest.approx(shown, abs=0.05)
