"""List the GPUs of this host as their drivers name them: nvidia-smi, NVML and rocm-smi."""

from __future__ import annotations

import csv
import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_GPU = re.compile(r"GPU \d+: (?P<name>.+) \(UUID: (?P<uuid>[^)]+)\)")
_SLICE = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>[^)]+)\)")


@dataclass(frozen=True)
class ListedGpu:
    """A GPU or a MIG slice. name: product; of a slice, with its profile, as "... MIG 1g.5gb"."""

    name: str
    uuid: str = ""


def list_nvidia() -> list[ListedGpu]:
    """Return the NVIDIA GPUs in the order of the PCI bus, by nvidia-smi or else NVML."""
    table = run("nvidia-smi", "--query-gpu=name,uuid", "--format=csv,noheader")
    rows = [row for row in csv.reader(table.splitlines(), skipinitialspace=True) if row]
    if rows:
        return [ListedGpu(*(word.strip() for word in row[:2])) for row in rows]
    return _read_nvml(slices=False)


def list_slices() -> list[ListedGpu]:
    """Return the MIG slices of the NVIDIA GPUs, by nvidia-smi or else NVML."""
    found, gpu = [], ""
    for line in run("nvidia-smi", "-L").splitlines():
        if whole := _GPU.match(line):
            gpu = whole["name"]
        elif part := _SLICE.match(line):
            found.append(ListedGpu(f"{gpu} MIG {part['profile']}", part["uuid"]))
    return found or _read_nvml(slices=True)


def list_amd() -> list[ListedGpu]:
    """Return the AMD GPUs by rocm-smi."""
    try:
        cards = json.loads(run("rocm-smi", "--showproductname", "--showuniqueid", "--json"))
    except ValueError:
        return []
    if not isinstance(cards, dict):
        return []
    named = {k: v for k, v in cards.items() if re.fullmatch(r"card\d+", k) and isinstance(v, dict)}
    ordered = sorted(named, key=lambda key: int(key.removeprefix("card")))
    return [_read_card(named[key]) for key in ordered]


def _read_card(card: Mapping[str, Any]) -> ListedGpu:
    """Return a card; the keys of rocm-smi differ in case between versions."""
    fields = {str(key).lower(): str(value) for key, value in card.items()}
    names = [fields.get(key, "") for key in ("card series", "card model", "market name")]
    unique = fields.get("unique id", "").removeprefix("0x")
    name = next((n for n in names if n and not n.startswith("0x")), "AMD GPU")
    return ListedGpu(name, f"GPU-{unique}" if unique else "")


def _read_nvml(slices: bool) -> list[ListedGpu]:
    """Return GPUs or MIG slices from NVML; [] without the package nvidia-ml-py or a driver."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # the package is absent, or it raises its own errors without a driver
        return []
    try:
        count = nvml.nvmlDeviceGetCount()
        gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        handles = [part for gpu in gpus for part in _find_slices(nvml, gpu)] if slices else gpus
        return [
            ListedGpu(_text(nvml.nvmlDeviceGetName(h)), _text(nvml.nvmlDeviceGetUUID(h)))
            for h in handles
        ]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()


def _find_slices(nvml: Any, gpu: Any) -> list[Any]:
    """Return the handles of a GPU's MIG slices; [] where it has none."""
    found = []
    try:
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            try:
                found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
            except nvml.NVMLError:  # no slice has this number
                continue
    except nvml.NVMLError:  # the GPU has no MIG
        return []
    return found


def _text(value: str | bytes) -> str:
    """Return a text that older versions of the package return as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def run(name: str, *arguments: str) -> str:
    """Return the output of a driver's program; "" if it is absent or fails."""
    program = shutil.which(name)
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return done.stdout
