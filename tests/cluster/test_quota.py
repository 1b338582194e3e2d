"""What a container's CPU quota leaves: made folders of control groups, and the cluster it makes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fxpart.cluster import host_detection
from fxpart.cluster.cpu_quota import quota
from fxpart.cluster.model import Cluster


def groups(folder: Path, listed: str, **files: str) -> float | None:
    """The quota of a process in the groups that are listed, over files of mounted groups."""
    listing = folder / "cgroup"
    listing.write_text(listed)
    for path, text in files.items():
        file = folder / "mounts" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return quota(listing, folder / "mounts")


def old(folder: str, allowed: str, period: str = "100000\n") -> dict[str, str]:
    """The files of version 1."""
    return {f"{folder}/cpu.cfs_quota_us": allowed, f"{folder}/cpu.cfs_period_us": period}


def test_of_version_2(tmp_path: Path) -> None:
    found = groups(tmp_path, "0::/a/b\n", **{"a/b/cpu.max": "50000 100000\n"})
    assert found == 0.5


def test_the_least_of_the_groups_above(tmp_path: Path) -> None:
    files = {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "25000 10000\n", "cpu.max": "9 1\n"}
    assert groups(tmp_path, "0::/a/b\n", **files) == 2.5


@pytest.mark.parametrize("mounted", ["cpu", "cpu,cpuacct"])
def test_of_version_1(tmp_path: Path, mounted: str) -> None:
    listed = "5:memory:/x\n4:cpu,cpuacct:/docker/1f\n0::/\n"
    files = old(f"{mounted}/docker/1f", "4500\n", "10000\n") | old(mounted, "-1\n")
    assert groups(tmp_path, listed, **files) == 0.45


def test_within_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    """The path that is listed is the host's."""
    files = old("cpu", "150000\n")
    assert groups(tmp_path, "4:cpu:/docker/1f\n", **files) == 1.5
    assert groups(tmp_path, "0::/../../x\n", **{"unified/cpu.max": "1 4\n"}) == 0.25


@pytest.mark.parametrize(
    "text", ["", "max 100000", "-1 5", "0 100000", "5 0", "5", "x y", "nan 5", "1 2 3", "5 -5"]
)
def test_what_is_no_limit(tmp_path: Path, text: str) -> None:
    assert groups(tmp_path, "0::/\n", **{"cpu.max": text}) is None
    assert groups(tmp_path, "4:cpu:/\nnothing\n", **old("cpu", text, "x")) is None
    assert groups(tmp_path, "4:cpu:/\n", **old("cpu", "5", text)) is None or text == "5"


def test_without_control_groups(tmp_path: Path) -> None:
    assert quota(tmp_path / "none", tmp_path) is None


def within(monkeypatch: pytest.MonkeyPatch, cores: float, ranks: int) -> Cluster:
    monkeypatch.setattr(host_detection, "quota", lambda: cores)
    monkeypatch.setattr(host_detection.os, "sched_getaffinity", lambda _: set(range(8)))
    return Cluster.local(ranks).validate()


def test_a_cluster_in_half_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = within(monkeypatch, 1.0, 1).devices[0]
    half = within(monkeypatch, 0.5, 1).devices[0]
    assert whole.quota is msgspec.UNSET and whole.share == 1
    assert half.quota == half.share == 0.5 and half.threads == 1
    assert half.flops["float32"] == whole.flops["float32"] / 2
    assert half.bandwidth == whole.bandwidth / 2
    assert "0.5 cores x" in half.source
    assert [d.quota for d in within(monkeypatch, 0.5, 2).devices] == [0.25, 0.25]


def test_a_cluster_in_some_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    two = within(monkeypatch, 2.5, 1)
    assert two.devices[0].threads == 2 and two.devices[0].quota is msgspec.UNSET
    assert two.hosts is not msgspec.UNSET and two.hosts[0].cores == 3
    assert within(monkeypatch, 64.0, 1).devices[0].threads == 8


def test_a_quota_is_kept_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = within(monkeypatch, 0.5, 1)
    for name in ("c.toml", "c.json"):
        cluster.dump(tmp_path / name)
        assert Cluster.load(tmp_path / name) == cluster
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        device = msgspec.structs.replace(cluster.devices[0], quota=wrong)
        (problem,) = msgspec.structs.replace(cluster, devices=(device,)).problems()
        assert "quota is" in problem.why
