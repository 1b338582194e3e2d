"""Where this process measures: device, chip, threads, torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from fxpart.profile import Setting


def setting(model: str, device: torch.device | None = None) -> Setting:
    """The setting of this process. model: of the device, as the cluster says it."""
    if device is not None and device.type == "cuda":
        chip, threads = torch.cuda.get_device_name(device), 0
    else:
        chip, threads = f"{cpu()} x {cores()}", torch.get_num_threads()
    return Setting(device=model, chip=chip, threads=threads, torch=torch.__version__)


def cpu() -> str:
    """The processor's own name, as Linux gives it, or else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
