"""GPUs of this host: visible devices, unknown models; nvidia-smi is a script."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fxpart.cluster import gpu_detection
from fxpart.cluster.model import Cluster
from fxpart.cluster.presets import device_data, models
from fxpart.errors import FxpartError

# What torch reports of an H100 SXM: 132 multiprocessors, 1.98 GHz, 5120 bits of HBM3 at 2.619 GHz.
H100 = SimpleNamespace(
    name="NVIDIA Prototype", major=9, minor=0, multi_processor_count=132, clock_rate=1_980_000,
    memory_clock_rate=2_619_000, memory_bus_width=5120, total_memory=85_017_493_504,
)  # fmt: skip


def nvidia(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *products: str) -> None:
    lines = "".join(f"echo '{name}, GPU-{index}'\n" for index, name in enumerate(products))
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{lines}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("1", ["l4"]),
        ("1,0", ["l4", "a100-sxm-80gb"]),
        ("GPU-1", ["l4"]),
        ("0,7,1", ["a100-sxm-80gb"]),  # CUDA ignores what follows an invalid entry
        ("-1", []),
        ("", []),
    ],
)
def test_visible_devices_are_selected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str, found: list[str]
) -> None:
    nvidia(monkeypatch, tmp_path, "NVIDIA A100-SXM4-80GB", "NVIDIA L4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_detection.nvidia_models() == found


def test_mig_slice_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvidia(monkeypatch, tmp_path, "NVIDIA A100-SXM4-80GB")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0f1e")
    with pytest.raises(FxpartError, match="FXP404"):
        Cluster.auto()


def test_unknown_gpu_is_never_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvidia(monkeypatch, tmp_path, "NVIDIA Prototype", "NVIDIA Prototype")
    monkeypatch.setattr(gpu_detection, "_report_properties", lambda product: None)
    with pytest.raises(FxpartError, match="FXP404"):
        Cluster.auto()
    monkeypatch.setattr(gpu_detection, "_report_properties", lambda product: H100)
    found = Cluster.auto().validate()
    assert [(d.kind, d.model) for d in found.devices] == [("gpu", "nvidia-prototype")] * 2
    assert "estimate" in found.devices[0].source


def test_estimate_of_an_h100_is_near_its_data_sheet() -> None:
    data = gpu_detection.estimate("NVIDIA Prototype", H100)
    known = device_data("h100-sxm")
    assert data is not None
    # 132 x 1.98 GHz x 4096 = 1070 TFLOP/s; the data sheet's 989.4 are at 1.83 GHz
    assert data["flops"]["bfloat16"] == pytest.approx(1.0705e15, rel=1e-3)
    assert data["flops"]["bfloat16"] == pytest.approx(known["flops"]["bfloat16"], rel=0.1)
    assert data["bandwidth"] == pytest.approx(known["bandwidth"], rel=0.01)


def test_device_of_another_generation_cannot_be_estimated() -> None:
    assert gpu_detection.estimate("x", SimpleNamespace(major=6, minor=1)) is None


def test_every_gpu_of_the_design_has_a_data_file() -> None:
    names = """b200 gb200 h200-sxm h20 gh200 a10g l4 l40s rtx-3090 rtx-4090 rtx-5090 a6000 t4 mi250x
        mi300x mi355x""".split()
    assert set(names) <= set(models())
    for name in models():
        data = device_data(name)
        assert data["source"] and data["date"], name
