"""What is measured of a cluster, where it goes in its file, and who is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fxpart.costmodels.communication import reshard, transfer
from quiet_network import answers as sent
from quiet_network import seconds

from fxpart.cli.cluster_bench import bench as command
from fxpart.cluster.devices import Link
from fxpart.cluster.link_index import LinkIndex
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError
from fxpart.profiling import cluster_benchmark as benching
from fxpart.profiling import collectives
from fxpart.profiling.cluster_benchmark import bench, groups, link_pairs
from fxpart.profiling.collectives import SIZES


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """A machine without noise in the place of processes; who was asked what."""
    asked = []

    def run(
        cluster: Cluster, count: int, target: str, payload: dict[str, Any], *_: object
    ) -> list[dict[str, Any]]:
        asked.append((count, target))
        if target == collectives.TARGET:
            return sent(payload, count)
        hosts = payload["hosts"]
        most = max(map(hosts.count, hosts))
        rates = {**dict.fromkeys(payload["dtypes"], 5e10), "bandwidth": 8e9}
        return [
            {
                "busy": [
                    [0.01 * (1 + c / 4) if hosts[:r].count(hosts[r]) <= c else None]
                    for c in range(most)
                ],
                "beside": [0.012],
                "rates": rates if r < payload["devices"] else {},
                "cores": 4,
            }
            for r in range(count)
        ]

    monkeypatch.setattr(benching, "_run", run)
    return asked


def test_a_local_cluster(quiet: list[tuple[int, str]], tmp_path: Path) -> None:
    before = Cluster.parse("local:2")
    found = bench(before, date="2026-01-01").cluster
    assert [count for count, _ in quiet] == [2, 3], "a third process sees transfers"
    assert not found.problems()
    (link,) = found.links
    assert isinstance(link.curve, tuple)
    assert [size for size, _ in link.curve] == list(SIZES)
    for size in (*SIZES, 3e5):
        assert transfer(size, link).seconds == pytest.approx(seconds("send", size))
    assert link.latency == pytest.approx(50e-6) and link.bandwidth == pytest.approx(2e9)
    assert "2026-01-01" in link.origin and "gloo" in link.origin
    assert isinstance(found.collectives, tuple) and len(found.collectives) == 5
    names = [device.name for device in found.devices]
    ring = (LinkIndex(found)(names[0], names[1]), LinkIndex(found)(names[1], names[0]))
    cost = reshard("partial", "replicate", 3e6, ring, found.collectives)
    assert (
        cost.seconds == pytest.approx(seconds("all_reduce", 3e6))
        and cost.source == "measured collective"
    )
    assert isinstance(found.hosts, tuple)
    assert found.hosts[0].slowdown == pytest.approx((1.0, 1.25))
    for device, old in zip(found.devices, before.devices, strict=True):
        assert isinstance(device.measured, dict) and device.flops == old.flops
        assert device.measured["bandwidth"] == 8e9 and device.measured["float32"] == 5e10
    for name in ("c.toml", "c.json"):
        found.dump(tmp_path / name)
        assert Cluster.load(tmp_path / name) == found


def test_one_device_has_no_links(quiet: list[tuple[int, str]]) -> None:
    found = bench(Cluster.parse("local:1"))
    assert [count for count, _ in quiet] == [1] and found.measured == ()
    assert found.cluster.collectives is msgspec.UNSET
    assert found.hosts["local"].slowdown == (1.0,)


def several(links: tuple[Link, ...]) -> Cluster:
    """Two hosts of two CPU ranks."""
    base = Cluster.parse("local:4")
    devices = tuple(
        msgspec.structs.replace(d, name=f"h{i // 2}/cpu:{i % 2}", host=f"h{i // 2}")
        for i, d in enumerate(base.devices)
    )
    return Cluster(name="two", devices=devices, links=links)


def link(source: str, target: str) -> Link:
    return Link(source=source, target=target, latency=1e-5, bandwidth=1e9, kind="net")


def test_each_link_has_a_pair_at_its_ends() -> None:
    links = (link("h0", "h0"), link("h1", "h0"), link("*", "*"), link("h0/cpu:1", "h1/cpu:1"))
    pairs = link_pairs(several(links))
    assert pairs[links[0]] == [(0, 1), (1, 0)], "both ways"
    assert pairs[links[1]] == [(2, 0)]
    assert pairs[links[2]] == [(0, 2)], "what is left: from h0 to h1, and within h1"
    assert pairs[links[3]] == [(1, 3)]
    cluster = several(links)
    names, found = [d.name for d in cluster.devices], LinkIndex(cluster)
    for each, ways in pairs.items():
        assert all(found(names[a], names[b]) is each for a, b in ways)


def test_groups_divide_all_ranks() -> None:
    assert groups(Cluster.parse("local:4")) == [[0, 1], [0, 1, 2, 3]]
    assert groups(Cluster.parse("local:3")) == [[0, 1, 2]]
    assert groups(Cluster.parse("local:1")) == []
    assert groups(several((link("*", "*"),))) == [[0, 1], [0, 1, 2, 3], [0, 2]]


def test_who_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FxpartError, match="FXP502") as fault:
        bench(several((link("*", "*"),)))
    assert "torchrun" in str(fault.value)
    with pytest.raises(FxpartError, match="FXP602"):
        monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
        bench(Cluster.parse("8xh100"))
    with pytest.raises(FxpartError, match="more than 64"):
        bench(Cluster.parse("local:65"))
    base = Cluster.parse("local:2")
    odd = msgspec.structs.replace(base.devices[1], kind="gpu")
    with pytest.raises(FxpartError, match="FXP109"):
        bench(msgspec.structs.replace(base, devices=(base.devices[0], odd)))
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FxpartError, match="there are 3 processes"):
        bench(base)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--sizes", "1k"], ["--sizes", "1k,x"], ["--sizes", "1k,9999g"], ["--sizes", "2,4k"],
        ["--budget", "soon"], ["--budget", "0"], ["--budget", "9999999"], ["--sizes", ""],
    ],
)  # fmt: skip
def test_options_that_make_no_sense(arguments: list[str], quiet: list[tuple[int, str]]) -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        command.main(["-c", "local:2", *arguments], standalone_mode=False)
    assert not quiet


def test_the_verb(
    quiet: list[tuple[int, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "c.toml")
    arguments = ["-c", "local:2", "--sizes", "1k,64k,2MiB", "--budget", "1m", "-o", out]
    command.main(arguments, standalone_mode=False)
    text = capsys.readouterr().out
    assert "all_reduce" in text and "0 -> 1" in text and "1.00, 1.25" in text
    command.main([*arguments, "--json"], standalone_mode=False)
    data = json.loads(capsys.readouterr().out)
    send = next(each for each in data["measured"] if each["operation"] == "send")
    assert [size for size, _ in send["points"]] == [1024, 65536, 2 << 20]
    assert data["hosts"]["local"]["slowdown"] == pytest.approx([1.0, 1.25])
    assert msgspec.convert(data["cluster"], Cluster) == Cluster.load(out)


@pytest.mark.slow
def test_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "c.toml")
    command.main(
        ["-c", "local:2", "--sizes", "1k,64k", "--budget", "1s", "-o", out], standalone_mode=False
    )
    assert "all_gather" in capsys.readouterr().out
    assert not Cluster.load(out).problems()


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    from ranks import torchrun

    script, out = tmp_path / "run.py", tmp_path / "c.json"
    arguments = ["-c", "local:2", "--sizes", "1k,64k", "--budget", "1s", "-o", str(out)]
    script.write_text(
        "from fxpart.cli.cluster_bench import bench\n"
        f"bench.main({arguments!r}, standalone_mode=False)\n"
    )
    done = torchrun(script, ranks=2, timeout=180.0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("local:2: measured") == 1, "one rank speaks"
    assert not Cluster.load(out).problems()
