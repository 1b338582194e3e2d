"""The devices and links of published runs."""

from __future__ import annotations

from typing import Any

import msgspec
from published_facts import BEYOND, HOST_COPIES, NETWORKS, WITHOUT_PEERS, correct
from published_step import PublishedRun

from fxpart.cluster.gpu_detection import match_model
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


def find_device(gpu: str) -> str | None:
    """Return fxpart's device model of a GPU of the file; None if there is none."""
    return DEVICES.get(gpu) or match_model(gpu)


def describe(row: dict[str, Any]) -> PublishedRun:
    """Return the run with its device and its links within and between hosts."""
    row = correct(row)
    cluster = grid(Cluster, 2, 2, str(find_device(row["gpu"])))
    near = cluster.link("host0/gpu:0", "host0/gpu:1")
    far = cluster.link("host0/gpu:0", "host1/gpu:0")
    key = row["source"], row["gpu"]
    if key in WITHOUT_PEERS:
        near = msgspec.structs.replace(near, bandwidth=min(near.bandwidth, HOST_COPIES))
    if key in NETWORKS:
        far = msgspec.structs.replace(far, bandwidth=NETWORKS[key])
    several = row["gpus"] > row["gpus_per_host"]
    peers = key not in WITHOUT_PEERS
    return PublishedRun(row, cluster.devices[0], near, far if several else None, peers)


def reason_to_skip(row: dict[str, Any]) -> str:
    """Return why a row cannot be predicted; "" if it can."""
    model = row["model"]
    if find_device(row["gpu"]) is None:
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
    return BEYOND.get(row["id"], "")
