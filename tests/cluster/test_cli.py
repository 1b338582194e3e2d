"""fxpart cluster: every verb, what it prints, and what it does with faults."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from cluster_pages import PAGE, filled
from msgspec import UNSET
from sample_plans import plan as sample

from fxpart import cli
from fxpart.cli import cluster as verbs
from fxpart.cluster.completeness import missing_links
from fxpart.cluster.devices import CollectiveCurve, Device, Host, Link
from fxpart.cluster.files import decode
from fxpart.cluster.importers.registry import IMPORTERS
from fxpart.cluster.model import Cluster

DATA = Path(__file__).parent / "data"


def run(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert cli.run(["cluster", *map(str, arguments)]) == status
    caught = capsys.readouterr()
    return caught.out, caught.err


def test_the_page_shows_what_the_commands_print() -> None:
    """python tests/support/cluster_pages.py writes it."""
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text) == text


def test_the_file_on_the_page_is_one() -> None:
    """It has every key there is."""
    text = PAGE.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    cluster = decode(Cluster, text.encode(), ".toml")
    assert missing_links(cluster) == ()
    whole = [cluster, *cluster.devices, *cluster.links]
    whole += [] if cluster.hosts is UNSET else cluster.hosts
    whole += [] if cluster.collectives is UNSET else cluster.collectives
    assert {type(item) for item in whole} == {Cluster, Device, Link, Host, CollectiveCurve}
    for item in whole:
        given = {name for name in item.__struct_fields__ if getattr(item, name) is not UNSET}
        assert set(item.__struct_fields__) - given <= {"extra", "shared"}


def test_each_verb_has_help_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    listed = verbs.command.list_commands(click.Context(verbs.command))
    assert listed == ["detect", "bench", "import", "export", "show", "validate"]
    for verb in listed:
        assert "--json" in run(capsys, verb, "--help")[0]


def test_formats_are_those_of_the_importers() -> None:
    assert verbs.FORMATS == ("auto", *IMPORTERS)
    for name, importer in IMPORTERS.items():
        assert importer.summary and f"`{name}`" in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_neither_torch_nor_solver_is_loaded() -> None:
    code = (
        "import sys\nfrom fxpart import cli\n"
        f"cli.run(['cluster', 'import', {str(DATA / 'topo_8xh100.txt')!r}, '--device', 'h100'])\n"
        "cli.run(['cluster', 'show', '2x8xh100'])\n"
        "cli.run(['cluster', 'validate', 'local:2'])\n"
        "print([m for m in ('torch', 'ortools', 'sympy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_detect_writes_a_file_that_others_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"here{suffix}"
    out, err = run(capsys, "detect", "-o", path)
    assert out == "" and f"wrote {path}" in err
    found = json.loads(run(capsys, "detect", "--json")[0])
    assert len(found["cluster"]["devices"]) == len(Cluster.load(path).devices)


def test_import_then_more_into_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    topo, nccl = DATA / "topo_8xa100.txt", DATA / "nccl_all_reduce_8xa100.txt"
    run(capsys, "import", topo, "--device", "a100", "-o", path)
    run(capsys, "import", nccl, "--into", path, "-o", path)
    cluster = Cluster.load(path)
    assert cluster.link("host0/gpu:0", "host0/gpu:7").bandwidth == 300e9
    shown = json.loads(run(capsys, "show", path, "--json")[0])
    assert shown["hash"] == cluster.hash
    assert [c["operation"] for c in shown["cluster"]["collectives"]] == ["all_reduce"]
    assert "all_reduce      8" in run(capsys, "show", path)[0]


def test_import_and_export_of_paddle(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = DATA / "paddle_2_machines.json"
    path, again, ranks = (tmp_path / name for name in ("c.json", "again.json", "ranks.json"))
    run(capsys, "import", source, "-o", path, "--mapping", DATA / "paddle_ranks.json")
    assert [d.name for d in Cluster.load(path).devices][:2] == ["m0/gpu:1", "m0/gpu:0"]
    out, _ = run(capsys, "export", path, "-o", again, "--mapping", ranks, "--json")
    assert set(json.loads(out)["files"]) == {str(again), str(ranks)}
    made = json.loads(again.read_text())
    own = made.pop("fxpart")  # the order of ranks has no place there
    assert made == json.loads(source.read_text())
    assert [d["name"] for d in own["devices"]][:2] == ["m0/gpu:1", "m0/gpu:0"]
    assert json.loads(ranks.read_text()) == json.loads((DATA / "paddle_ranks.json").read_text())
    assert json.loads(run(capsys, "export", "local:1")[0])["machines"][0]["hostname"] == "local"


def test_ranks_of_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = sample()
    path, ranks, given = (tmp_path / name for name in ("plan.json", "ranks.json", "c.json"))
    plan.dump(path)
    plan.cluster.dump(given)
    run(capsys, "export", given, "--plan", path, "--mapping", ranks)
    found = {int(r) for machine in json.loads(ranks.read_text()) for r in machine["ranks"]}
    count = len(plan.devices or plan.cluster.devices)
    assert found == set(range(count))
    fault = run(capsys, "export", "1xt4", "--plan", path, "--mapping", ranks, status=2)[1]
    assert "FXP305" in fault


def test_faults(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    none = tmp_path / "none.txt"
    assert "FXP401" in run(capsys, "import", none, status=2)[1]
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "FXP407" in run(capsys, "import", binary, status=2)[1]
    text = tmp_path / "text.txt"
    text.write_text("what is this?\n")
    found = json.loads(run(capsys, "import", text, "--json", status=2)[0])
    assert found["error"][0]["code"] == "FXP407" and "paddle:" in found["error"][0]["fix"]
    assert "FXP404" in run(capsys, "show", "8xabacus", status=2)[1]
    source = DATA / "paddle_2_machines.json"
    assert "FXP603" in run(capsys, "export", "local:1", "-o", tmp_path / "no" / "x", status=4)[1]
    assert "FXP401" in run(capsys, "import", source, "--mapping", none, status=2)[1]


def test_validate_finds_every_fault(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad, lonely = tmp_path / "bad.json", tmp_path / "lonely.json"
    raw = json.loads(json.dumps({"name": "x", "links": [], "devices": []}))
    bad.write_text(json.dumps(raw))
    two = Cluster.local(2)
    Cluster(name="two", devices=two.devices, links=()).dump(lonely)
    out, _ = run(capsys, "validate", bad, lonely, "2x8xh100", "--json", status=2)
    first, second, third = json.loads(out)
    assert [p["code"] for p in first["problems"]] == ["FXP402"]
    assert [p["code"] for p in second["problems"]] == ["FXP403"]
    assert third["problems"] == [] and third["missing"]
