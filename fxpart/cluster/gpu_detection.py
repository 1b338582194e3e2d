"""The GPUs of this host that this process may use, by nvidia-smi; unknown models are estimated."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from typing import Any

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


def nvidia_models() -> list[str]:
    """Return the models of the NVIDIA GPUs that this process may use; [] without nvidia-smi.

    CUDA_VISIBLE_DEVICES selects them by index or UUID. A model without a data file is estimated
    from what torch reports of it. Raises FXP404 where torch cannot, and for a MIG slice.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name,uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [row for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True) if row]
    gpus = [(row[0].strip(), row[1].strip() if len(row) > 1 else "") for row in rows]
    return [match_model(name) or _estimate_model(name) for name in _select_visible(gpus)]


def _select_visible(gpus: list[tuple[str, str]]) -> list[str]:
    """Return the names of the GPUs that CUDA_VISIBLE_DEVICES lists, in its order.

    As in CUDA, the list ends at its first invalid entry.
    """
    value = get_variables().get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return [name for name, _ in gpus]
    found: list[int] = []
    for entry in (word.strip() for word in value.split(",")):
        if entry.startswith("MIG-"):
            raise _unknown_gpu(
                f"CUDA_VISIBLE_DEVICES={value[:80]}", "A MIG slice has a part of the rates of a GPU"
            )
        if entry.isdecimal() and entry.isascii():
            fits = [int(entry)] if len(entry) < 9 and int(entry) < len(gpus) else []
        else:
            named = entry.startswith("GPU-")
            fits = [i for i, (_, uuid) in enumerate(gpus) if named and uuid.startswith(entry)]
        if len(fits) != 1 or fits[0] in found:
            break
        found += fits
    return [gpus[index][0] for index in found]


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
