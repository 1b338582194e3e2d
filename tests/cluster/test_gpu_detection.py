"""GPUs of this host: visible devices, MIG, AMD, unknown models; drivers are scripts or fakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fxpart.cluster import gpu_detection, gpu_sources
from fxpart.cluster.model import Cluster
from fxpart.cluster.presets import device_data, models
from fxpart.errors import FxpartError

# What torch reports of an H100 SXM: 132 multiprocessors, 1.98 GHz, 5120 bits of HBM3 at 2.619 GHz.
H100 = SimpleNamespace(
    name="NVIDIA Prototype", major=9, minor=0, multi_processor_count=132, clock_rate=1_980_000,
    memory_clock_rate=2_619_000, memory_bus_width=5120, total_memory=85_017_493_504,
)  # fmt: skip


def program(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, script: str) -> None:
    """Make a program of this name the only one that can be found besides the system's."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    clear(monkeypatch)


def clear(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = """RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE CUDA_VISIBLE_DEVICES
        HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES"""
    for name in variables.split():
        monkeypatch.delenv(name, raising=False)


def nvidia(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *products: str) -> None:
    lines = "".join(f"echo '{name}, GPU-{index}'\n" for index, name in enumerate(products))
    program(monkeypatch, tmp_path, "nvidia-smi", lines)


SLICES = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5b)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4)
  MIG 1g.5gb      Device  1: (UUID: MIG-0f1e)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-77aa)
"""


def sliced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host with two A100, one of which has two MIG slices."""
    rows = "echo 'NVIDIA A100-SXM4-40GB, GPU-5d5b'; echo 'NVIDIA A100-SXM4-40GB, GPU-77aa'"
    script = f"if [ $1 = -L ]; then printf '{SLICES}'; else {rows}; fi\n"
    program(monkeypatch, tmp_path, "nvidia-smi", script)


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
    assert gpu_detection.find_gpus() == found


@pytest.mark.parametrize(
    ("visible", "profile", "units", "eighths"),
    [("MIG-c6d4", "3g-20gb", 3, 4), ("MIG-0f1e,MIG-c6d4", "1g-5gb", 1, 1)],
)
def test_a_mig_slice_has_its_part_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str, profile: str, units: int,
    eighths: int,
) -> None:  # fmt: skip
    """NVIDIA's user guide: of 7 parts of the multiprocessors, and of 8 parts of the memory."""
    sliced(monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (found,) = Cluster.auto().validate().devices
    whole = device_data("a100-sxm-40gb")
    assert found.kind == "gpu" and found.model == f"a100-sxm-40gb-mig-{profile}"
    assert found.flops["bfloat16"] == pytest.approx(whole["flops"]["bfloat16"] * units / 7)
    assert found.memory == whole["memory"] * eighths // 8
    assert found.bandwidth == pytest.approx(whole["bandwidth"] * eighths / 8)


@pytest.mark.parametrize(
    ("profile", "units", "size", "eighths"),
    [("1g.10gb", 1, 10, 1), ("1g.20gb", 1, 20, 2), ("3g.40gb", 3, 40, 4), ("7g.80gb", 7, 80, 8)],
)
def test_profiles_of_an_h100(profile: str, units: int, size: int, eighths: int) -> None:
    """The profiles of the user guide's table for 80 GB."""
    whole = device_data("h100-sxm")
    data = gpu_detection.divide(whole, profile, units, size)
    assert data["memory"] == whole["memory"] * eighths // 8


def test_a_compute_instance_has_its_slices_of_the_multiprocessors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        gpu_detection, "list_nvidia", lambda: [gpu_sources.ListedGpu("NVIDIA A100-SXM4-40GB")]
    )
    part = gpu_sources.ListedGpu("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", "MIG-1")
    monkeypatch.setattr(gpu_detection, "list_slices", lambda: [part])
    clear(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    (model,) = gpu_detection.find_gpus()
    data, whole = device_data(model), device_data("a100-sxm-40gb")
    assert data["flops"]["float32"] == pytest.approx(whole["flops"]["float32"] / 7)
    assert data["memory"] == whole["memory"] // 2


def test_a_mig_slice_that_the_driver_does_not_list(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sliced(monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-9999")
    with pytest.raises(FxpartError, match="lists no MIG slice"):
        Cluster.auto()


class NvmlError(Exception):
    """The error of the stand-in for pynvml."""


def nvml(monkeypatch: pytest.MonkeyPatch, *names: str | bytes) -> None:
    """A host without nvidia-smi whose pynvml lists these GPUs; the first has one MIG slice."""

    def find_slice(gpu: int, index: int) -> tuple[int, int]:
        if index:
            raise NvmlError
        return (gpu, index)

    module = SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda h: f"{names[h[0]]} MIG 1g.5gb" if type(h) is tuple else names[h],
        nvmlDeviceGetUUID=lambda h: "MIG-1" if type(h) is tuple else f"GPU-{h}",
        nvmlDeviceGetMaxMigDeviceCount=lambda gpu: 2 if gpu == 0 else 0,
        nvmlDeviceGetMigDeviceHandleByIndex=find_slice,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(gpu_sources, "run", lambda *arguments: "")
    clear(monkeypatch)


def test_nvml_where_nvidia_smi_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, "NVIDIA A100-SXM4-40GB", b"NVIDIA L4")
    assert gpu_detection.find_gpus() == ["a100-sxm-40gb", "l4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    assert gpu_detection.find_gpus() == ["l4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert gpu_detection.find_gpus() == ["a100-sxm-40gb-mig-1g-5gb"]


def test_nvml_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NvmlError

    nvml(monkeypatch, "NVIDIA L4")
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", fail)
    assert gpu_sources.list_nvidia() == []


def test_torch_where_nothing_else_lists_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    monkeypatch.setattr(gpu_sources, "run", lambda *arguments: "")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it fails
    clear(monkeypatch)
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB MIG 2g.10gb"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(name=names[i])
    )
    monkeypatch.setattr(gpu_detection, "DRIVER_FILES", (str(tmp_path / "none"),))
    assert gpu_detection.find_gpus() == []
    monkeypatch.setattr(gpu_detection, "DRIVER_FILES", (str(tmp_path),))
    assert gpu_detection.find_gpus() == ["h100-sxm", "a100-sxm-40gb-mig-2g-10gb"]


CARDS = {
    "card10": {"Card Series": "AMD Instinct MI250X", "Unique ID": "0xbb"},
    "card0": {"Card series": "AMD Instinct MI300X", "Card model": "0x74a1", "Unique ID": "0xaa"},
    "system": {"Driver version": "6.7"},
}


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, ["mi300x", "mi250x"]),
        ({"HIP_VISIBLE_DEVICES": "1"}, ["mi250x"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["mi250x"]),  # HIP reads it, too
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, ["mi300x"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-bb", "HIP_VISIBLE_DEVICES": "0"}, ["mi250x"]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_amd_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], found: list[str]
) -> None:
    program(monkeypatch, tmp_path, "rocm-smi", f"echo '{json.dumps(CARDS)}'\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert gpu_detection.find_gpus() == found


@pytest.mark.parametrize("text", ["", "no json", "[]", "3", '{"card0": 1}'])
def test_a_rocm_smi_that_lists_no_cards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    program(monkeypatch, tmp_path, "rocm-smi", f"echo '{text}'\n")
    assert gpu_detection.find_gpus() == []


def test_an_unknown_amd_gpu_is_not_estimated_by_rules_for_nvidia() -> None:
    found = SimpleNamespace(**vars(H100), gcnArchName="gfx90a")
    assert gpu_detection.estimate("AMD Prototype", found) is None


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
