"""The command: what it writes and prints, exit statuses, Ctrl-C, no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.maxload import __main__ as command
from benchmarks.maxload import portfolio
from benchmarks.maxload.instance import Instance, evaluate, faults
from benchmarks.maxload.instances import random_instance, transformer

ROOT = Path(__file__).resolve().parents[4]


def write(instance: Instance, path: Path, **changes: Any) -> str:
    """The instance as a max-load file."""
    place = instance.nodes
    data = {
        "maxFPGAs": instance.accelerators,
        "maxCPUs": instance.cpus,
        "maxSizePerFPGA": instance.memory,
        "nodes": [
            {
                "id": n.id, "name": n.name, "fpgaLatency": n.accelerator, "cpuLatency": n.cpu,
                "size": n.bytes, "supportedOnFpga": n.runs, "isBackwardNode": n.backward,
                **({} if n.group is None else {"colorClass": n.group}),
            }
            for n in place
        ],
        "edges": [
            {"sourceId": place[u].id, "destId": place[v].id, "cost": place[u].transfer}
            for u, v in instance.edges
        ],
    }  # fmt: skip
    path.write_text(json.dumps({**data, **changes}))
    return str(path)


def run(*arguments: str) -> int:
    return command.run(list(arguments))


@pytest.fixture
def small(tmp_path: Path) -> tuple[Instance, str]:
    instance = transformer(1, 2, cpus=1)
    return instance, write(instance, tmp_path / "graph.json")


def test_it_writes_the_split(small: tuple[Instance, str], tmp_path: Path, capsys: Any) -> None:
    instance, file = small
    out = tmp_path / "split.json"
    assert run(file, "-o", str(out)) == 0
    split = json.loads(out.read_text())
    assert sorted(split) == ["assignment", "gap", "lower_bound", "objective", "status"]
    names = list(instance.devices)
    assignment = [names.index(split["assignment"][str(n.id)]) for n in instance.nodes]
    assert len(split["assignment"]) == len(instance.nodes)
    assert faults(instance, assignment, "chain") == []
    assert split["objective"] == evaluate(instance, assignment) == split["lower_bound"]
    assert (split["status"], split["gap"]) == ("optimal", 0.0)
    shown = capsys.readouterr()
    assert f"wrote {out}" in shown.err
    lines = shown.out.splitlines()
    assert lines[0].endswith("35 nodes on 2 accelerators, 1 CPU core, mode chain")
    assert lines[1].startswith("optimal: largest load") and "gap 0 % (solver dp)" in lines[1]
    assert [line.split()[0] for line in lines[2:]] == names


def test_json_tells_the_same_and_each_device(small: tuple[Instance, str], capsys: Any) -> None:
    instance, file = small
    assert run(file, "--json", "--mode", "any", "--solver", "cp-sat") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    found = json.loads(shown.out)
    assert (found["mode"], found["solver"]) == ("any", "cp-sat")
    rows = found["devices"]
    assert [row["device"] for row in rows] == list(instance.devices)
    assert max(row["load"] for row in rows) == found["objective"]
    assert sum(row["nodes"] for row in rows) == len(instance.nodes)


def test_equal_calls_write_equal_bytes(small: tuple[Instance, str], tmp_path: Path) -> None:
    written = []
    for name in ("a.json", "b.json"):
        assert run(small[1], "-o", str(tmp_path / name), "--seed", "3") == 0
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]


def test_options_take_the_place_of_what_the_file_says(
    small: tuple[Instance, str], capsys: Any
) -> None:
    assert run(small[1], "--devices", "3", "--cpus", "0", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["devices"]) == 3


@pytest.mark.parametrize(
    "changes,options,words",
    [
        ({"maxSizePerFPGA": 3.5}, ["--cpus", "0"], "have to lie together"),
        ({"maxSizePerFPGA": 8}, ["--cpus", "0"], "at least 3 accelerators"),
        ({"maxSizePerFPGA": 8}, ["--cpus", "0", "--mode", "any", "--devices", "1"], "bytes in all"),
    ],
)
def test_infeasible_instances_say_why(
    changes: dict[str, Any], options: list[str], words: str, tmp_path: Path, capsys: Any
) -> None:
    file = write(transformer(1, 2), tmp_path / "graph.json", **changes)
    assert run(file, *options) == 3
    assert "FXP204" in (text := capsys.readouterr().err) and words in text


def test_a_packing_that_does_not_exist(tmp_path: Path, capsys: Any) -> None:
    """Three nodes of 3 bytes on two accelerators of 5: enough in all, and no way to do it."""
    from benchmarks.maxload.instance import Node

    nodes = tuple(Node(id=i, accelerator=1.0, bytes=3.0) for i in range(3))
    instance = Instance(nodes=nodes, edges=(), accelerators=2, memory=5.0)
    for options in ([], ["--mode", "any"], ["--solver", "cp-sat"]):
        assert run(write(instance, tmp_path / "graph.json"), *options) == 3
        assert "no split fits" in capsys.readouterr().err


def test_bad_input_is_status_two(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "bad.json").write_text('{"maxFPGAs": 2')
    for arguments in (
        [str(tmp_path / "bad.json")],
        [str(tmp_path / "none.json")],
        [write(random_instance(0), tmp_path / "a.json"), "--bandwidth", "5"],
        [write(random_instance(0), tmp_path / "a.json"), "--mode", "ring"],
    ):
        assert run(*arguments) == 2
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err and shown.out == "" and shown.err


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe that nobody writes would block for ever; a device may never end."""
    os.mkfifo(tmp_path / "pipe.json")
    os.symlink("/dev/zero", tmp_path / "zero.json")
    for name in ("pipe.json", "zero.json"):
        assert run(str(tmp_path / name)) == 2


def test_ctrl_c_gives_the_best_so_far(
    small: tuple[Instance, str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pressed once the first answer is there; the search would go on otherwise."""
    start = portfolio.start

    def pressed(*arguments: Any) -> Any:
        found = start(*arguments)
        signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(portfolio, "start", pressed)
    before = signal.getsignal(signal.SIGINT)
    assert run(small[1], "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] != "optimal" and found["lower_bound"] < found["objective"]
    assert signal.getsignal(signal.SIGINT) is before


def test_progress_is_for_terminals(
    small: tuple[Instance, str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(small[1]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(small[1]) == 0
    shown = capsys.readouterr()
    assert "no less than" in shown.err and "s left" in shown.err


@pytest.mark.slow
def test_neither_torch_nor_a_solver_is_needed_to_start(small: tuple[Instance, str]) -> None:
    code = (
        "import sys\nfrom tests.benchmarks.maxload.__main__ import run\n"
        f"assert run([{small[1]!r}, '--json']) == 0\n"
        "assert 'torch' not in sys.modules and 'ortools' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
