"""Quantities with units in cluster files."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxpart import Cluster, FxpartError
from fxpart.units import parse_bandwidth, parse_rate, parse_seconds, parse_size

FILE = """
name = "lab"
[[devices]]
name = "a"
kind = "gpu"
model = "made"
host = "here"
memory = {memory}
bandwidth = "2 TB/s"
flops = {{ bfloat16 = "312 TFLOPS" }}
launch = "3us"
[[links]]
source = "*"
target = "*"
latency = "5 µs"
bandwidth = "400Gbit/s"
"""


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80e9", 80 * 10**9),
        ("80000000000", 80 * 10**9),
        ('"80GB"', 80 * 10**9),
        ('"80 GiB"', 80 * 2**30),
        ('"512 MiB"', 2**29),
        ('"80e9"', 80 * 10**9),
    ],
)
def test_cluster_file(tmp_path: Path, text: str, size: int) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(FILE.format(memory=text))
    found = Cluster.load(path)
    (device,), (link,) = found.devices, found.links
    assert device.memory == size and isinstance(device.memory, int)
    assert (device.bandwidth, device.flops, device.launch) == (2e12, {"bfloat16": 3.12e14}, 3e-6)
    assert (link.latency, link.bandwidth) == (5e-6, 5e10)
    found.dump(tmp_path / "again.json")
    assert Cluster.load(tmp_path / "again.json") == found


@pytest.mark.parametrize("text", ['"80 parsecs"', '"GB"', '"80G"', "8.5", '"-1 GB"'])
def test_other_text_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(FILE.format(memory=text))
    with pytest.raises(FxpartError) as caught:
        Cluster.load(path)
    assert caught.value.code == "FXP401"
    assert "memory" in str(caught.value)


def test_readers() -> None:
    assert parse_size("1.5 KiB") == 1536 and parse_size("1 kB") == 1000
    assert parse_bandwidth("25 GB/s") == 25e9 and parse_bandwidth("200 Gbps") == 25e9
    assert parse_rate("989TFLOP/s") == 989e12 and parse_rate("2e11") == 2e11
    assert parse_seconds("1.2 ms") == 1.2e-3 and parse_seconds("7") == 7.0
    for read in (parse_size, parse_bandwidth, parse_rate, parse_seconds):
        assert read("a lot") is None and read("") is None and read("1 furlong") is None
