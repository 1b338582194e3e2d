"""The devices and links of published runs, and why a row cannot be predicted."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import Any

import msgspec
from fxpart.costmodels.efficiency import find_efficiency
from published_facts import BEYOND, HOST_COPIES, NETWORKS, WITHOUT_PEERS, correct
from published_memory import predict_bytes
from published_models import complete_model
from published_rows import read_row
from published_run import PublishedRun, dtype_of
from published_step import predict_seconds

from fxpart.cluster.devices import Device
from fxpart.cluster.gpu_detection import match_model
from fxpart.cluster.model import Cluster
from fxpart.cluster.presets import device_data, grid
from fxpart.errors import FxpartError

# GPU of the file -> device model of fxpart, where its name does not tell.
DEVICES = {
    "H100-SXM5-80GB": "h100-sxm", "H100-SXM-96GB-HBM2e-500W": "h100-sxm-96gb",
    "GB200 (one GPU)": "gb200", "GB300 (one GPU)": "gb300",
}  # fmt: skip
RECOMPUTED = ("none", "selective (elements)", "selective", "full")
AXES = ("dp", "tp", "cp", "pp", "ep")
# "8 HDR adapters of 200 Gbit/s a host", "1.6 Tb/s per node", "400 Gbit/s RDMA for each GPU".
_RATE = re.compile(
    r"(?:(?P<count>\d+)\s*(?:x\s*(?:[A-Za-z][\w-]*\s+){0,3}|(?:[A-Za-z][\w-]*\s+){1,4}of\s+))?"
    r"(?P<rate>\d+(?:\.\d+)?)\s*"
    r"(?P<unit>[GT])(?P<bit>bit|bps|b|B)(?:/s|ps)?"
)
_EACH = re.compile(r"(?:each|per|a|/)\s*(?:GPU|device|accelerator)", re.IGNORECASE)


def find_device(gpu: str) -> str | None:
    """Return fxpart's device model of a GPU of the file; None if there is none."""
    if gpu in DEVICES:
        return DEVICES[gpu]
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[RG]TX)(?=\w)|(?<=\d{4})(?=[A-Z])", " ", gpu)
    for name in (gpu, spaced):
        if found := match_model(name.replace("(", " ").replace(")", " ")):
            return found
    try:
        return str(device_data(re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-"))["name"])
    except FxpartError:
        return None


def network_bandwidth(row: dict[str, Any]) -> float | None:
    """Return the bytes/s of a GPU's share of the printed network; None if none is printed."""
    text = str(row.get("interconnect") or "")
    for clause in text.split(";"):
        family = re.match(r"\s*([A-Z]+\d+)\s*:", clause)
        if family and not str(row["gpu"]).startswith(family[1]):
            continue
        found = _RATE.search(clause)
        if found is None or "nvlink" in clause[: found.start()].lower():
            continue
        rate = float(found["rate"]) * (1e12 if found["unit"] == "T" else 1e9)
        rate *= int(found["count"] or 1) * (1.0 if found["bit"] == "B" else 1 / 8)
        return rate / (1 if _EACH.search(clause) else int(row["gpus_per_host"]))
    return None


def describe(row: dict[str, Any]) -> PublishedRun:
    """Return the run with its device and its links within and between hosts.

    Of a microbatch that is not printed the fastest power of two that fits in memory is taken, of
    recomputation the least. Raises ValueError where the row has something that is not known.
    """
    row = correct(read_row(row))
    row |= {
        "model": complete_model(row["model"]),
        "gpus_per_host": int(row.get("gpus_per_host") or min(8, int(row["gpus"]))),
        "layout": _complete_layout(row),
    }
    cluster = grid(Cluster, 2, 2, str(find_device(row["gpu"])))
    near = cluster.link("host0/gpu:0", "host0/gpu:1")
    far = cluster.link("host0/gpu:0", "host1/gpu:0")
    key = row["source"], row["gpu"]
    if key in WITHOUT_PEERS:
        near = msgspec.structs.replace(near, bandwidth=min(near.bandwidth, HOST_COPIES))
    if key in NETWORKS:
        far = msgspec.structs.replace(far, bandwidth=NETWORKS[key])
    elif printed := network_bandwidth(row):
        achieved = device_data(cluster.devices[0].model)["network"]["achieved"]
        far = msgspec.structs.replace(far, bandwidth=printed * achieved)
    several = int(row["gpus"]) > row["gpus_per_host"]
    device = _in_precision(cluster.devices[0], str(row["precision"]["compute"]))
    run = PublishedRun(row, device, near, far if several else None, key not in WITHOUT_PEERS)
    runs = [_recomputing(one) for one in _splits(run)]
    return runs[0] if len(runs) == 1 else min(runs, key=_rank)


def _complete_layout(row: dict[str, Any]) -> dict[str, Any]:
    """Return the layout; GPUs that no other degree uses are data parallel."""
    layout = row["layout"]
    others = prod(int(layout.get(axis) or 1) for axis in ("tp", "cp", "pp"))
    return {"dp": max(1, int(row["gpus"]) // others)} | layout


def _rank(run: PublishedRun) -> tuple[bool, float]:
    return predict_bytes(run) > run.device.memory, predict_seconds(run)


def _splits(run: PublishedRun) -> list[PublishedRun]:
    """Return the run with its microbatch, or with each that it may have."""
    row, dp = run.row, run.degree("dp")
    size, count = row.get("microbatch"), row.get("microbatches")
    local = float(row.get("global_batch") or 0) / dp
    if not local and not (size and count):
        raise ValueError("neither the batch nor the microbatches are printed")
    if not size and count:
        size = local / count
    sizes = [size] if size else [2**n for n in range(int(local).bit_length()) if local % 2**n == 0]
    found = []
    for each in sizes:
        number = (count if size else None) or local / each
        split = {"microbatch": each, "microbatches": max(1, round(number))}
        split["global_batch"] = row.get("global_batch") or each * split["microbatches"] * dp
        found.append(replace(run, row=row | split))
        _check(found[-1])
    return found


def _recomputing(run: PublishedRun) -> PublishedRun:
    """Return a run whose recomputation is not printed with the least that fits; none if none does.

    The weights, the layout and the microbatch are known, so that memory decides.
    """
    if run.row.get("recompute") is not None:
        return run
    for mode in RECOMPUTED:
        found = replace(run, row=run.row | {"recompute": mode})
        if predict_bytes(found) <= run.device.memory:
            return found
    return replace(run, row=run.row | {"recompute": "none"})


def _in_precision(device: Device, printed: str) -> Device:
    """Return the device, with the rate of TF32 in the place of float32's if a run uses it."""
    efficiency = find_efficiency(device.model)
    if "tf32" not in printed.lower() or efficiency is None or "tf32" not in device.flops:
        return device
    rate = device.flops["tf32"] * efficiency.matmul / efficiency.float32
    return msgspec.structs.replace(device, flops=device.flops | {"float32": rate})


def _check(run: PublishedRun) -> None:
    """Raise ValueError where the layout, precision or schedule of a run has no meaning."""
    row = run.row
    dp, tp, cp, pp, ep = (run.degree(axis) for axis in AXES)
    if dp * tp * cp * pp != int(row["gpus"]):
        raise ValueError("the degrees do not multiply to the number of GPUs")
    if pp > run.model["layers"]:
        raise ValueError("there are more stages than layers")
    if ep > 1 and not run.model.get("expert_ffn"):
        raise ValueError("the model has no experts to distribute")
    dtype_of(run)
    _ = run.virtual


def reason_to_skip(row: Any) -> str:
    """Return why a row cannot be predicted; "" if it can."""
    found = find_run(row)
    return found if isinstance(found, str) else ""


def find_run(row: Any) -> PublishedRun | str:
    """Return the run of a row, or why it cannot be predicted."""
    try:
        return _find_run(correct(read_row(row)))
    except ValueError as known:
        return str(known)
    except (ArithmeticError, AttributeError, FxpartError, LookupError, TypeError) as unknown:
        return f"the row cannot be read: {type(unknown).__name__}"


def _find_run(row: dict[str, Any]) -> PublishedRun | str:
    if find_device(row["gpu"]) is None:
        return f"no device data for {row['gpu']}"
    if row.get("use") == "incomplete":
        return "the layout is not known"
    complete_model(row["model"])
    if not row["measured"].get("step_seconds"):
        return "no step time is printed"
    if row.get("use") == "absolute" and row.get("anomaly"):
        return "anomaly of the source"
    return BEYOND.get(row["id"]) or describe(row)
