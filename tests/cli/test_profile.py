"""``fxpart profile``: measure, show, merge, use; and on unlike devices under torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest
from fxpart.costmodels.profile_store import (
    ContentionProfile,
    MeasurementEnvironment,
    Profile,
    TimeQuartiles,
)

from fxpart.cli import run
from fxpart.cluster.model import Cluster
from fxpart.plan.model import Plan
from fxpart.profiling.device_group import keep_same_devices

TARGET = """
import torch
from torch import nn
from fxpart import Workload

def workload():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)]
    batch = (torch.randn(8, 16), torch.randn(8, 16))
    return Workload(nn.Sequential(*layers), batch, nn.functional.mse_loss)
"""
HERE = MeasurementEnvironment(device="cpu", chip="x", threads=1, torch="2.11.0")


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "small.py").write_text(TARGET)
    return f"{tmp_path / 'small.py'}:workload"


def profile(path: Path, **values: float) -> Path:
    with Profile(path, create=True) as made:
        made.put(
            "ops", HERE, {k: TimeQuartiles(s, s, s, 3) for k, s in values.items()}, "2026-01-01"
        )
        made.put("crowding", HERE, {"": ContentionProfile(slowdown=(1.0, 1.5), transfer=0.5)})
    return path


@pytest.mark.slow
def test_a_profile_is_made_used_and_not_made_twice(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "small.profile")
    arguments = ["profile", target, "-c", "local:2", "--budget", "8s", "-o", path, "--json"]
    assert run(arguments) == 0
    (first,) = json.loads(capsys.readouterr().out)
    assert first["ops"] > 3 and first["path"] == path
    with Profile(path) as made:
        rows = list(made.rows())
        assert {row[0] for row in rows} >= {"ops"}
    assert run(["profile", "--show", path]) == 0
    assert "op timings" in capsys.readouterr().out
    plan = str(tmp_path / "plan.json")
    assert run(["plan", target, "-c", "local:2", "--profile", path, "-o", plan]) == 0
    saved = json.loads(Path(plan).read_text())
    assert "measured" in saved["provenance"]["compute"]
    assert "torch" in saved["provenance"]["profile"]
    capsys.readouterr()
    assert run(arguments) == 0
    (again,) = json.loads(capsys.readouterr().out)
    assert again["known_ops"] >= first["ops"] and again["ops"] <= first["ops"]


def test_show_and_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = profile(tmp_path / "a.profile", x=1.0), profile(tmp_path / "b.profile", y=2.0, z=3.0)
    whole = str(tmp_path / "all.profile")
    merge = ["profile", "-o", whole, "--merge", str(a), "--merge", str(b)]
    assert run([*merge, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["taken"] == {str(a): 2, str(b): 2}
    assert run(["profile", "--show", whole, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["setting"]["chip"] == "x" and set(found["ops"]) == {"x", "y", "z"}
    assert run(["profile", "--show", whole]) == 0
    text = capsys.readouterr().out
    assert "3 op timings" in text and "of 1 to 2 computing ranks: 1.00, 1.50 times" in text
    assert run(merge) == 0
    assert f"0 measurements from {a}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], "FXP109"),
        (["--show", "none.profile"], "FXP405"),
        (["-o", "x.profile", "--merge", "none.profile"], "FXP405"),
        (["nothing.py:f", "--budget", "soon"], "FXP109"),
        (["nothing.py:f", "--budget", "0s"], "FXP109"),
        (["nothing.py:f"], "FXP107"),
        (["nothing.py:f", "--for", "none.json"], "FXP301"),
        (["nothing.py:f", "--constraint", "x"], "FXP107"),
    ],
)
def test_mistakes(
    arguments: list[str], code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run(["profile", *arguments]) == 2
    assert code in capsys.readouterr().err


def test_no_folder(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", target, "-o", "/nowhere/at/all.profile"]) == 4
    assert "FXP603" in capsys.readouterr().err


def test_plans_refuse_profiles_of_others(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = profile(tmp_path / "a.profile", x=1.0)
    assert run(["plan", target, "-c", "local:2", "--cost-model", str(path)]) == 2
    assert "FXP406" in capsys.readouterr().err


def mixed() -> Cluster:
    local = Cluster.local(2)
    first, second = local.devices
    second = msgspec.structs.replace(second, model="other-cpu")
    return msgspec.structs.replace(local, devices=(first, second))


def test_devices_of_one_kind() -> None:
    """Model, threads and quota."""
    whole = mixed()
    assert keep_same_devices(whole, whole.devices[0]).devices == whole.devices[:1]
    assert keep_same_devices(whole, whole.devices[1]).devices == whole.devices[1:]
    local = Cluster.local(3)
    assert keep_same_devices(local, local.devices[2]) == local
    for change in ({"quota": 0.5}, {"threads": 7}):
        other = msgspec.structs.replace(local.devices[1], **change)
        apart = msgspec.structs.replace(local, devices=(local.devices[0], other, local.devices[2]))
        assert keep_same_devices(apart, other).devices == (other,)
        assert len(keep_same_devices(apart, local.devices[0]).devices) == 2


@pytest.mark.slow
def test_unlike_devices_under_torchrun(target: str, tmp_path: Path) -> None:
    """Each kind is measured by its first rank, and one file holds both."""
    import subprocess

    mixed().dump(tmp_path / "mixed.toml")
    path = tmp_path / "all.profile"
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "--module", "fxpart", "profile", target, "-c", str(tmp_path / "mixed.toml"),
            "--budget", "6s", "-o", str(path), "--json",
        ],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert [one["device"].split()[0] for one in found] == ["cpu", "other-cpu"]
    with Profile(path) as made:
        assert [s.device for s in made.settings()] == ["cpu", "other-cpu"]
        ops = [set(made.get("ops", s, TimeQuartiles)) for s in made.settings()]
    assert ops[0] and ops[1]
    # Then the stages that the plan for both puts on each were measured, by what is known of both.
    plan = tmp_path / "plan.json"
    assert run(["plan", target, "-c", str(tmp_path / "mixed.toml"), "--profile", str(path),
                "-o", str(plan)]) == 0  # fmt: skip
    assert "every stage measured whole" in json.loads(plan.read_text())["provenance"]["choice"]


@pytest.mark.slow
def test_the_stages_of_a_plan(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without time for any of several ranks; what one takes is then known as a whole."""
    path, plan = str(tmp_path / "small.profile"), str(tmp_path / "plan.json")
    profiling = ["profile", target, "-c", "local:2", "-o", path, "--json"]
    planning = ["plan", target, "-c", "local:2", "--profile", path, "-o", plan,
                "--mesh", "dp=2", "--fix", "pp=1", "--fix", "microbatches=2"]  # fmt: skip
    assert run([*profiling, "--no-rehearse", "--budget", "0.1s"]) == 0
    assert run(planning) == 0
    before = json.loads(Path(plan).read_text())
    assert "estimated from its ops" in before["provenance"]["choice"]
    capsys.readouterr()
    assert run([*profiling, "--budget", "4s", "--for", plan]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["stages"] >= 1
    assert run(planning) == 0
    after = json.loads(Path(plan).read_text())
    assert after["stages"] == before["stages"]
    assert "every stage measured whole" in after["provenance"]["choice"]
    capsys.readouterr()
    other = Plan.load(plan)
    devices = [msgspec.structs.replace(d, model="other-cpu") for d in other.cluster.devices]
    cluster = msgspec.structs.replace(other.cluster, devices=tuple(devices))
    msgspec.structs.replace(other, cluster=cluster, cluster_hash=cluster.hash).dump(plan)
    assert run([*profiling, "--budget", "4s", "--for", plan]) == 2
    assert "FXP305" in capsys.readouterr().err


def test_progress_estimates_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxpart.cli import profile

    clock = iter((100.0, 100.0, 104.0, 106.0))
    monkeypatch.setattr(profile.time, "monotonic", lambda: next(clock))
    shown: list[str] = []
    report = profile._format_progress(shown.append)
    assert report is not None and profile._format_progress(None) is None
    report("ops", 0, 10)
    report("ops", 2, 10)
    report("trial runs", 3, 0)
    assert shown == ["ops 0 of 10", "ops 2 of 10, about 16 s left", "trial runs 3"]
