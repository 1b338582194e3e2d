"""The devices and links of published runs."""

from __future__ import annotations

from typing import Any

import msgspec
from published_step import PublishedRun

from fxpart.cluster.model import Cluster
from fxpart.cluster.presets import grid

# GPU of the file -> device model of fxpart.
DEVICES = {
    "H100-SXM5-80GB": "h100-sxm", "A100-SXM4-80GB": "a100-sxm-80gb",
    "A100-SXM4-40GB": "a100-sxm-40gb", "V100-SXM2-32GB": "v100-sxm2-32gb",
    "V100-SXM2-16GB": "v100-sxm2-16gb", "H100-SXM-96GB-HBM2e-500W": "h100-sxm-96gb",
    "H200-SXM-141GB": "h200-sxm", "B200-SXM": "b200", "B300-SXM": "b300",
    "GB200 (one GPU)": "gb200", "GB300 (one GPU)": "gb300", "RTX3090-24GB": "rtx-3090",
    "RTX4090-24GB": "rtx-4090", "RTXA6000-48GB": "a6000", "A10-24GB": "a10",
    "QuadroRTX8000-48GB": "quadro-rtx-8000", "H100-PCIe-80GB": "h100-pcie",
    "RTX6000Ada-48GB": "rtx-6000-ada",
}  # fmt: skip
# Bytes/s between hosts for each GPU, where the source's network is not that of the device's preset.
# bigscience: V100 as its own all-reduces of 4 GB (7 to 11 GB/s for a host of 4, kernels.json); A100
# with four adapters of 100 Gbit/s a host, of which a fifth: their first test reached a tenth.
NETWORKS = {
    ("bigscience", "A100-SXM4-80GB"): 1.25e9,
    ("bigscience", "V100-SXM2-32GB"): 8.5e9 / 4,
    ("bigscience", "V100-SXM2-16GB"): 8.5e9 / 4,
    ("neox20b", "A100-SXM4-40GB"): 1.25e10 * 0.9,
}


def describe(row: dict[str, Any]) -> PublishedRun:
    """Return the run with its device and its links within and between hosts."""
    model = DEVICES[row["gpu"]]
    cluster = grid(Cluster, 2, 2, model)
    near = cluster.link("host0/gpu:0", "host0/gpu:1")
    far = cluster.link("host0/gpu:0", "host1/gpu:0")
    known = NETWORKS.get((row["source"], row["gpu"]))
    if known is not None:
        far = msgspec.structs.replace(far, bandwidth=known)
    several = row["gpus"] > row["gpus_per_host"]
    return PublishedRun(row, cluster.devices[0], near, far if several else None)


def reason_to_skip(row: dict[str, Any]) -> str:
    """Return why a row cannot be predicted; "" if it can."""
    model = row["model"]
    if row["gpu"] not in DEVICES:
        return f"no device data for {row['gpu']}"
    if model["kind"] not in ("gpt", "llama", "bert"):
        return f"this benchmark composes no model of kind {model['kind']}"
    if not model.get("ffn"):
        return "the width of the MLP is not printed"
    if row["use"] == "incomplete":
        return "the layout is not known"
    if not row.get("microbatch") or not row.get("microbatches"):
        return "the microbatch is not printed"
    if not row["measured"].get("step_seconds"):
        return "no step time is printed"
    if row["use"] == "absolute" and row.get("anomaly"):
        return "anomaly of the source"
    return ""
