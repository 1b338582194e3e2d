"""The GPUs of this host that this process may use; MIG slices and unknown models are estimated."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fxpart.cluster.gpu_sources import (
    ListedGpu,
    list_amd,
    list_nvidia,
    list_slices,
)
from fxpart.cluster.presets import add_estimate, device_data, models
from fxpart.environment import get_variables
from fxpart.errors import FxpartError, error

# Dense FLOP per multiprocessor and cycle by compute capability: float32, and the 16-bit product of
# the tensor cores with float32 accumulation (NVIDIA's architecture whitepapers).
_PER_CYCLE = {
    (7, 0): (128, 1024), (7, 5): (128, 1024), (8, 0): (128, 2048), (8, 6): (256, 512),
    (8, 9): (256, 1024), (9, 0): (256, 4096), (10, 0): (256, 8192), (10, 3): (256, 8192),
    (12, 0): (256, 1024),
}  # fmt: skip
_ARCHITECTURES = {7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell", 12: "ada"}
_NO_BFLOAT16 = ((7, 0), (7, 5))
# Files of the drivers; torch is imported for a list only where one exists.
DRIVER_FILES = ("/dev/nvidiactl", "/dev/kfd")
# "NVIDIA A100-SXM4-40GB MIG 1g.5gb"; a compute instance of 1 in a slice of 3: "1c.3g.20gb"
_PROFILE = re.compile(
    r"(?P<gpu>.+) MIG (?P<profile>(?=(?:\d+c\.)?\d+g\.)(?P<units>\d+)[cg]\.(?:\d+g\.)?"
    r"(?P<memory>\d+)gb\S*)"
)


def find_gpus() -> list[str]:
    """Return the models of the GPUs that this process may use; [] without GPUs.

    They are those of nvidia-smi, else of NVML (package nvidia-ml-py), rocm-smi or torch.
    CUDA_VISIBLE_DEVICES selects them by index or UUID, for AMD also ROCR_VISIBLE_DEVICES and
    HIP_VISIBLE_DEVICES. A MIG slice has its part of a GPU's rates. A model without a data file is
    estimated from what torch reports of it. Raises FXP404 where torch cannot.
    """
    variables = get_variables()
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    found = list_nvidia()
    if found and visible is not None and visible.lstrip().startswith("MIG-"):
        return [_find_model(_select_slice(visible).name)]
    if found:
        return [_find_model(gpu.name) for gpu in _select(found, visible)]
    found = list_amd()
    if found:
        inner = variables.get("HIP_VISIBLE_DEVICES", visible)
        kept = _select(_select(found, variables.get("ROCR_VISIBLE_DEVICES")), inner)
        return [_find_model(gpu.name) for gpu in kept]
    return [_find_model(gpu.name) for gpu in _list_by_torch()]  # torch has applied the variables


def _list_by_torch() -> list[ListedGpu]:
    """Return the GPUs that torch can use; [] where no driver has its file in /dev."""
    if not any(Path(name).exists() for name in DRIVER_FILES):
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    return [ListedGpu(torch.cuda.get_device_properties(i).name) for i in range(count)]


def _select(gpus: list[ListedGpu], value: str | None) -> list[ListedGpu]:
    """Return the GPUs that a list of visible devices has, in its order.

    As in CUDA, the list ends at its first invalid entry.
    """
    if value is None:
        return gpus
    found: list[int] = []
    for entry in (word.strip() for word in value.split(",")):
        if entry.isdecimal() and entry.isascii():
            fits = [int(entry)] if len(entry) < 9 and int(entry) < len(gpus) else []
        else:
            named = entry.startswith("GPU-")
            fits = [i for i, gpu in enumerate(gpus) if named and gpu.uuid.startswith(entry)]
        if len(fits) != 1 or fits[0] in found:
            break
        found += fits
    return [gpus[index] for index in found]


def _select_slice(value: str) -> ListedGpu:
    """Return the first MIG slice of the list: a process can use one. Raises FXP404 without it."""
    wanted = value.split(",")[0].strip()
    fits = [part for part in list_slices() if part.uuid.startswith(wanted)]
    if len(fits) != 1:
        raise _unknown_gpu(
            f"CUDA_VISIBLE_DEVICES={value[:80]}", "The driver lists no MIG slice with this UUID"
        )
    return fits[0]


def _find_model(product: str) -> str:
    """Return the device model of a product name; adds the data of slices and unknown models."""
    part = _PROFILE.fullmatch(product)
    if part is None:
        return match_model(product) or _estimate_model(product)
    gpu = match_model(part["gpu"])
    if gpu is None:
        raise _unknown_gpu(f"GPU {product!r}", "There is no data file for the GPU of this slice")
    data = divide(device_data(gpu), part["profile"], int(part["units"]), int(part["memory"]))
    add_estimate(data)
    return str(data["name"])


def divide(data: dict[str, Any], profile: str, units: int, size: int) -> dict[str, Any]:
    """Return the device data of a MIG slice.

    units: slices of the multiprocessors, of 7. size: of its memory in GiB, in eighths of the GPU's.
    """
    eighths = min(8, max(1, round(8 * size * 2**30 / data["memory"])))
    return data | {
        "name": f"{data['name']}-mig-{re.sub(r'[^a-z0-9]+', '-', profile.lower())}",
        "aliases": [],
        "products": [],
        "memory": data["memory"] * eighths // 8,
        "bandwidth": data["bandwidth"] * eighths / 8,
        "flops": {name: rate * units / 7 for name, rate in data["flops"].items()},
        "source": f"MIG slice {profile}: {units}/7 of the rates and {eighths}/8 of the memory of "
        f"{data['name']} (NVIDIA Multi-Instance GPU User Guide); {data['source']}",
    }


def match_model(product: str) -> str | None:
    """Return the device model with the most ``products`` words that occur in a product name."""
    words = product.lower().replace("-", " ").split()
    best: tuple[int, str] | None = None
    for model in models():
        for required in device_data(model).get("products", ()):
            terms = required.lower().split()
            if all(term in words for term in terms) and (best is None or len(terms) > best[0]):
                best = (len(terms), model)
    return best[1] if best else None


def _estimate_model(product: str) -> str:
    """Return the name under which the estimated data of a GPU without a data file is known.

    Raises FXP404 where torch does not report the properties of a GPU of this name.
    """
    data = estimate(product, _report_properties(product))
    if data is None:
        raise _unknown_gpu(f"GPU {product!r}", "There is no data file for this GPU")
    add_estimate(data)
    return str(data["name"])


def estimate(product: str, properties: Any) -> dict[str, Any] | None:
    """Return the device data of a GPU from torch's properties of it; None where one is missing.

    Rates: multiprocessors x clock x FLOP per cycle of the compute capability. Links and launch
    costs are those of the RTX 4090, a card without NVLink.
    """
    if hasattr(properties, "gcnArchName"):  # an AMD GPU counts its generations otherwise
        return None
    capability = (getattr(properties, "major", 0), getattr(properties, "minor", 0))
    clock, width = (getattr(properties, n, 0) for n in ("clock_rate", "memory_bus_width"))
    memory_clock = getattr(properties, "memory_clock_rate", 0)
    if capability not in _PER_CYCLE or not (clock and width and memory_clock):
        return None
    cycles = properties.multi_processor_count * clock * 1e3
    single, half = (per_cycle * cycles for per_cycle in _PER_CYCLE[capability])
    rates = {"float32": single, "float16": half}
    if capability not in _NO_BFLOAT16:
        rates |= {"tf32": half / 2, "bfloat16": half}
    name = re.sub(r"[^a-z0-9]+", "-", product.lower()).strip("-")
    return device_data("rtx-4090") | {
        "name": name if name[:1].isalpha() else f"gpu-{name}",
        "aliases": [],
        "products": [],
        "architecture": _ARCHITECTURES[capability[0]],
        "memory": properties.total_memory,
        "bandwidth": 2 * memory_clock * 1e3 * width / 8,
        "flops": rates,
        "source": f"estimate: {properties.multi_processor_count} multiprocessors at "
        f"{clock / 1e6:.2f} GHz, compute capability {capability[0]}.{capability[1]}, from torch",
        "date": "at detection",
    }


def _report_properties(product: str) -> Any:
    """Return torch's properties of a visible GPU of this name; None if torch reports none."""
    import torch

    if not torch.cuda.is_available():
        return None
    every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return next((found for found in every if found.name == product), None)


def _unknown_gpu(where: str, why: str) -> FxpartError:
    return error(
        "FXP404",
        where=where,
        why=f"{why}, and torch does not report its rates.",
        fix="Describe the cluster in a .toml or .json file, name a similar preset such as 8xh100, "
        "or use local:1 to plan for the CPU.",
    )
