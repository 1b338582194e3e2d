"""fxpart schedule: every verb, what it prints, and what it does with faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from built_schedules import BUILDERS
from cli_calls import call
from schedule_pages import PAGE, filled

from fxpart.cli.schedule import command
from fxpart.schedule.action import ActionKind
from fxpart.schedule.dependence import chain
from fxpart.schedule.files import load
from fxpart.schedule.make import make
from fxpart.schedule.simulate import simulate
from fxpart.schedule.text import draw, to_text
from fxpart.schedule.torch_csv import to_torch_csv
from fxpart.schedule.version_annotation import annotate_versions
from fxpart.schedule.weight_modes import MODES

Capsys = pytest.CaptureFixture[str]


def test_the_page_shows_what_the_commands_print() -> None:
    """python tests/support/schedule_pages.py writes it."""
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text) == text
    assert all(f"| `{name}` |" in text for name in BUILDERS)


def test_each_verb_has_help_and_json(capsys: Capsys) -> None:
    assert sorted(command.commands) == ["import", "show", "simulate", "validate"]
    for verb in command.commands:
        assert "--json" in call(capsys, "schedule", verb, "--help")[0]


@pytest.mark.parametrize("name", BUILDERS)
def test_every_named_schedule(name: str, capsys: Capsys) -> None:
    sizes = ["-s", "4", "-m", "4"]
    found = json.loads(call(capsys, "schedule", "validate", name, *sizes, "--json")[0])
    several = name in ("interleaved", "breadth-first", "zb-v")
    placed = [0, 1, 1, 0] if name == "zb-v" else [0, 1, 0, 1] if several else [0, 1, 2, 3]
    assert (found["valid"], found["stage_rank"]) == (True, placed)
    made = make(name, placed, 4, chain(4))
    assert call(capsys, "schedule", "show", name, *sizes)[0] == draw(made) + "\n"
    assert call(capsys, "schedule", "show", name, *sizes, "--text")[0] == to_text(made)
    wanted = simulate(made, chain(4), [1.0] * 4, [2.0] * 4)
    out, _ = call(capsys, "schedule", "simulate", name, *sizes, "--json")
    assert json.loads(out) == json.loads(json.dumps(wanted.as_dict()))


def test_costs_of_each_stage(capsys: Capsys, tmp_path: Path) -> None:
    forward, backward, late = [1.0, 2.0], [2.0, 3.0], [0.5, 2.0]
    trace = tmp_path / "trace.json"
    out, err = call(
        capsys, "schedule", "simulate", "zb-h1", "-s", "2", "-m", "4", "--forward", "1,2",
        "--backward", "2,3", "--weight", "0.5,2", "--transfer", "0.25,0.75", "--sends", "buffered",
        "--trace", str(trace), "--json",
    )  # fmt: skip
    made = make("zb-h1", (0, 1), 4, chain(2), forward=forward, backward=backward)
    wanted = simulate(
        made, chain(2), forward, backward, lambda stage, peer, kind: (0.25, 0.75)[stage],
        split=[(b - w, w) for b, w in zip(backward, late, strict=True)], sends="buffered",
    )  # fmt: skip
    assert json.loads(out)["step_seconds"] == wanted.step_seconds
    assert "wrote" in err and json.loads(trace.read_text())["traceEvents"]


def test_files_of_both_forms(capsys: Capsys, tmp_path: Path) -> None:
    """CSV to text and back; what is read is what was written, and is shown as it is."""
    made = make("interleaved", (0, 1, 0, 1), 4, chain(4))
    csv, text = tmp_path / "a.csv", tmp_path / "b.txt"
    csv.write_text(to_torch_csv(made), newline="")
    call(capsys, "schedule", "import", str(csv), "-o", str(text), "--name", "interleaved")
    assert load(text) == made
    assert call(capsys, "schedule", "import", str(text))[0] == csv.read_text()
    assert call(capsys, "schedule", "show", str(csv), "--csv")[0] == csv.read_text()
    found = json.loads(call(capsys, "schedule", "show", str(text), "--json")[0])
    assert [" ".join(r) for r in found["ranks"]] == [
        line.partition(": ")[2] for line in to_text(made).splitlines()[1:]
    ]
    for path in (csv, text):
        assert "valid" in call(capsys, "schedule", "validate", str(path))[0]


def test_computations_alone_get_transfers(capsys: Capsys, tmp_path: Path) -> None:
    path = tmp_path / "bare.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert "valid (transfers added)" in call(capsys, "schedule", "validate", str(path))[0]
    assert "step 9.00 s" in call(capsys, "schedule", "simulate", str(path))[0]
    path.write_text("0F0,0F1,0B0\n1F0,1F1,1B1\n")
    _, err = call(capsys, "schedule", "validate", str(path), status=2)
    assert err.count("The computation is missing") == 2  # every fault, not the first


def test_forwards_alone_are_evaluation(capsys: Capsys, tmp_path: Path) -> None:
    path = tmp_path / "bare.csv"
    path.write_text("0F0,0F1\n1F0,1F1\n")
    found = json.loads(call(capsys, "schedule", "validate", str(path), "--json")[0])
    assert (found["name"], found["in_flight"]) == ("forward", [0, 0])


def test_copies_and_given_edges(capsys: Capsys, tmp_path: Path) -> None:
    """A file with copies says its graph by its transfers; the same graph may be given."""
    sizes = ["-s", "5", "-m", "7", "--replicas", "0,1|2,3,4"]
    out, _ = call(capsys, "schedule", "show", "1f1b", *sizes, "--text")
    path = tmp_path / "copies.txt"
    path.write_text(out)
    edges = "0-2,0-3,0-4,1-2,1-3,1-4"
    for more in ([], ["--edges", edges]):
        said, _ = call(capsys, "schedule", "validate", str(path), *more)
        assert f"stage graph {edges}" in said and "replicas 0,1|2,3,4" in said
    _, err = call(capsys, "schedule", "validate", str(path), "--edges", "0-2,1-2", status=2)
    assert "Other replicas lack the edge: 0 -> 3, 0 -> 4" in err
    wrong = out.replace("2F3", "2F4")
    assert wrong != out
    path.write_text(wrong)
    _, err = call(capsys, "schedule", "validate", str(path), status=2)
    assert "Another replica of the stage runs this microbatch" in err


def test_skips_are_seen(capsys: Capsys, tmp_path: Path) -> None:
    edges = "0-1,0-2:forward,1-2"
    sizes = ["-s", "3", "-m", "2", "--edges", edges]
    out, _ = call(capsys, "schedule", "show", "gpipe", *sizes, "--text")
    path = tmp_path / "skip.txt"
    path.write_text(out)
    assert f"stage graph {edges}\n" in call(capsys, "schedule", "validate", str(path))[0]
    _, err = call(capsys, "schedule", "show", str(path), "--csv", status=2)
    assert "FXP109" in err


@pytest.mark.parametrize(
    ("arguments", "finding"),
    [
        (["show", "1f1b"], "pass --stages and --microbatches"),
        (["show", "nowhere.txt"], "No such file"),
        (["show", "nowhere.txt", "-s", "2"], "is a file and not a schedule's name"),
        (["show", "1f1b", "-s", "4", "-m", "4", "--virtual", "3"], "a multiple of 3"),
        (["show", "zb-v", "-s", "3", "-m", "4"], "two stages per rank"),
        (["show", "1f1b", "-s", "4096", "-m", "65536"], "too many to list"),
        (["show", "1f1b", "-s", "2", "-m", "2", "--replicas", "0,x"], "not a list of stages"),
        (["show", "1f1b", "-s", "2", "-m", "2", "--replicas", "0,7"], "only 2 stages"),
        (["show", "1f1b", "-s", "2", "-m", "2", "--edges", "0>1"], "not of the form SOURCE-TARGET"),
        (["show", "1f1b", "-s", "2", "-m", "2", "--edges", "1-0"], "to a later stage"),
        (["validate", "1f1b", "-s", "3", "-m", "4", "--memory", "2"], "3 microbatches in flight"),
        (
            ["validate", "1f1b", "-s", "3", "-m", "4", "--memory", "2,2"],
            "2 numbers are given",
        ),
        (["simulate", "1f1b", "-s", "3", "-m", "4", "--forward", "a"], "not a list of numbers"),
        (["simulate", "1f1b", "-s", "3", "-m", "4", "--forward=-1"], "negative"),
        (["simulate", "1f1b", "-s", "3", "-m", "4", "--weight", "3"], "finite nonnegative values"),
        (["import", "nowhere.csv"], "No such file"),
    ],
)
def test_faults_are_status_2(arguments: list[str], finding: str, capsys: Capsys) -> None:
    _, err = call(capsys, "schedule", *arguments, status=2)
    assert finding in err


def test_a_file_that_is_no_schedule(capsys: Capsys, tmp_path: Path) -> None:
    path = tmp_path / "x"
    for content, code in (
        (b"\xff\xfe", "FXP301"), (b"", "FXP303"), (b"0F0,huh", "FXP303"),
        (b"fxpart-schedule x", "FXP303"), (b'"' + b"0" * 200_000, "FXP303"),
    ):  # fmt: skip
        path.write_bytes(content)
        assert code in call(capsys, "schedule", "show", str(path), status=2)[1]
    path.write_text("fxpart-schedule x stages=1 microbatches=1 stage_rank=0\n0: 0F0 5F0")
    for verb in ("show", "validate", "simulate"):
        assert "There are only 1 stages" in call(capsys, "schedule", verb, str(path), status=2)[1]
    path.write_text("0F0,0B0")
    _, err = call(capsys, "schedule", "import", str(path), "--name", "No Name", status=2)
    assert "lower-case letters" in err


def test_versions_are_of_a_stash(capsys: Capsys, tmp_path: Path) -> None:
    path = tmp_path / "stash.txt"
    path.write_text(
        "fxpart-schedule x stages=1 microbatches=2 stage_rank=0\n0: 0F0@1 0B0@1 0F1 0B1"
    )
    _, err = call(capsys, "schedule", "validate", str(path), status=2)
    assert err.count("does not name the weight version") == 2
    path.write_text(path.read_text().replace("F1", "F1@2").replace("B1", "B1@2"))
    call(capsys, "schedule", "validate", str(path))
    assert load(path).ranks[0][2].kind is ActionKind.F


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_weights_of_a_stream(name: str, capsys: Capsys, tmp_path: Path) -> None:
    """Named, written, read from a file, proved and run in time, in every mode."""
    given = ["async", "-s", "3", "-m", "9", "--weights", name, "--every", "3"]
    named = annotate_versions(make("async", range(3), 9, chain(3)), name, 3)
    text, _ = call(capsys, "schedule", "show", *given, "--text")
    assert text == to_text(named)
    path = tmp_path / "stream.txt"
    path.write_text(text)
    for source in (given, [str(path), *given[5:]]):
        said, _ = call(capsys, "schedule", "validate", *source)
        assert f"reads the version of {name};" in said or "without weight versions" in said
        said, _ = call(capsys, "schedule", "simulate", *source)
        assert "step 33.0 s" in said  # an update of M: M t, or (M + K - 1) t where it drains
        gain = "an update takes 9.00 s once the pipeline is full, 15.0 s with a flush after each"
        assert (gain in said) == (not MODES[name].flush)
    picture, _, table = call(capsys, "schedule", "show", *given)[0].partition("\n\n")
    assert picture.rstrip() == draw(named)
    assert len(table.splitlines()) == (0 if name == "flush" else 5)
    found = json.loads(call(capsys, "schedule", "show", *given, "--json")[0])
    if name != "flush":
        stages = found["weights"]["stages"]
        assert [row["staleness"] for row in stages] == (
            [[0, 0]] * 3 if name == "lookahead" else [[0, 1], [0, 1], [0, 0]]
        )
        assert (found["weights"]["every"], found["weights"]["lag"]) == (3, 2)


def test_versions_of_a_file_are_counted(capsys: Capsys, tmp_path: Path) -> None:
    """A wrong version, and a mode that needs more microbatches to an update."""
    given = ["async", "-s", "3", "-m", "6", "--weights", "stash"]
    text, _ = call(capsys, "schedule", "show", *given, "--text")
    path = tmp_path / "stream.txt"
    path.write_text(text.replace("0F5@3", "0F5@2").replace("0B5@3", "0B5@2"))
    call(capsys, "schedule", "validate", str(path))  # some stash it is
    _, err = call(capsys, "schedule", "validate", str(path), "--weights", "stash", status=2)
    assert err.count("stash reads version 3") == 2
    more = ["--weights", "2bw", "--every", "2"]
    _, err = call(capsys, "schedule", "show", *given[:5], *more, status=2)
    assert "With 2 microbatches per update and 3 in flight on stage 0" in err
    _, err = call(capsys, "schedule", "show", *given[:5], "--every", "2", status=2)
    assert "pass --weights, too" in err
    _, err = call(capsys, "schedule", "show", "1f1b", *given[1:5], "--weights", "huh", status=2)
    assert "Unknown weight mode" in err
