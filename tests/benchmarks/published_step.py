"""Step time of a published run: fxpart's cost model on its operators, composed by its layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import Any

import published_ops as ops
from fxpart.costmodels.efficiency import copy_bandwidth, update_bandwidth
from fxpart.costmodels.roofline import Roofline
from published_facts import GENERATIONS, GRADIENTS
from published_ops import BlockShape

from fxpart.cluster.devices import Device, Link
from fxpart.costs import OpSpec

MODEL = Roofline()
# Computation and communication slow down each other where they overlap: measured factor 1.13
# (Galvatron, A100).
CONTENTION = 0.13
GRADIENT_OVERLAP = 0.9  # of the backward: the first bucket is complete only after a part of it


@dataclass(frozen=True)
class PublishedRun:
    """A row of the file with what the prediction needs; sizes per rank follow from the layout.

    peers: whether GPUs of a host read each other's memory.
    """

    row: dict[str, Any]
    device: Device
    near: Link
    far: Link | None
    peers: bool = True

    @property
    def layout(self) -> dict[str, Any]:
        """Return the layout."""
        return dict(self.row["layout"])

    def degree(self, name: str) -> int:
        """Return the ranks along one axis."""
        return int(self.layout.get(name) or 1)

    @property
    def peak(self) -> float:
        """Return the data sheet's FLOP/s of 16-bit products, float32 where the run uses it."""
        return self.device.flops.get(dtype_of(self)) or self.device.flops["float32"]

    @property
    def zero(self) -> int:
        """Return the ZeRO stage."""
        return int(self.layout.get("zero") or 0)

    @property
    def attention(self) -> str:
        """Return "math" (three ops), "fused" (a vendor's training library) or "flash"."""
        text = str(self.row.get("attention") or "fused")
        return next((kind for kind in ("math", "fused") if text.startswith(kind)), "flash")

    @property
    def eager(self) -> bool:
        """Return whether the run is composed of PyTorch's own unfused ops: FSDP, not compiled."""
        return not self.compiled and self.zero >= 2 and self.attention != "fused"

    @property
    def compiled(self) -> bool:
        """Return whether torch.compile fuses what is elementwise: conversions, masks, dropout."""
        return bool(self.row.get("compile"))

    @property
    def autocast(self) -> bool:
        """Return whether weights are float32 and every op chooses its precision."""
        return self.zero < 2 and ("amp" in self._printed or "autocast" in self._printed)

    @property
    def half(self) -> bool:
        """Return whether apex keeps weights and gradients in 16 bit (its level O2)."""
        return "apex o2" in self._printed

    @property
    def plain(self) -> bool:
        """Return whether attention is written in PyTorch's ops, as in models trained with AMP."""
        return self.attention == "math" and not self.compiled and (self.autocast or self.half)

    @property
    def _printed(self) -> str:
        return str(self.row["precision"].get("printed")).lower()

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of each gradient that is kept."""
        return 2 if self.half else GRADIENTS.get(self.row["source"], 4)

    @property
    def overlaps(self) -> bool:
        """Return whether the gradient reduction runs beside the backward."""
        parallel = max(self.degree("tp"), self.degree("pp")) > 1
        if not self.peers:
            return False
        return self.attention != "math" or not (parallel or self.zero == 1)

    @property
    def recompute(self) -> str:
        """Return "none", "full", "attention" or "operations"."""
        text = self.row.get("recompute") or "none"
        if text.startswith("selective"):
            return "attention" if "attention" in text else "operations"
        return "full" if text.startswith("full") else "none"

    def ring(self, ranks: int, stride: int) -> tuple[Link, ...]:
        """Return the links of a group of ranks that are ``stride`` apart."""
        per_host = int(self.row["gpus_per_host"])
        inside = max(1, min(ranks, per_host // stride))
        hosts = ceil(ranks / inside)
        if ranks <= 1:
            return ()
        if hosts == 1 or self.far is None:
            return (self.near,) * ranks
        return (self.near,) * (ranks - hosts) + (self.far,) * hosts

    def collective(self, kind: str, size: float, ranks: int, stride: int) -> float:
        """Return the seconds of "all_reduce", "all_gather" or "reduce_scatter"."""
        ways = {
            "all_reduce": ("partial", "replicate"),
            "all_gather": ("shard(0)", "replicate"),
            "reduce_scatter": ("partial", "shard(0)"),
        }
        ring = self.ring(ranks, stride)
        return MODEL.reshard(*ways[kind], size, ring).seconds if ring else 0.0


def block_shape(run: PublishedRun) -> BlockShape:
    """Return the sizes of a block on one rank."""
    model, row = run.row["model"], run.row
    tp, cp = run.degree("tp"), run.degree("cp")
    heads = model["heads"]
    keys = int(row["sequence"])
    return BlockShape(
        samples=int(row["microbatch"]),
        queries=keys // cp,
        keys=keys,
        hidden=model["hidden"],
        ffn=-(-model["ffn"] // tp),
        heads=-(-heads // tp),
        kv_heads=-(-(model.get("kv_heads") or heads) // tp),
        head=model.get("head_dim") or model["hidden"] // heads,
        dtype=dtype_of(run),
        linear="float8_e4m3fn" if "fp8" in row["precision"]["compute"] else dtype_of(run),
        kind=model["kind"],
        fused_attention=run.attention != "math",
        fused=not run.eager,
        dropout=run.attention == "math" and not run.compiled,
        causal=model["kind"] != "bert",
        shard=tp if is_sequence_parallel(run) else 1,
        generation=GENERATIONS.get(row["source"], 3 if run.attention == "fused" else 2),
        delayed_scaling=run.attention == "fused",
        wide=run.autocast and not run.compiled,
        plain=run.plain,
    )


def is_sequence_parallel(run: PublishedRun) -> bool:
    """Return whether norms and residuals are divided along the sequence in the tensor group."""
    tensor = run.degree("tp") > 1
    return tensor and (bool(run.layout.get("sp")) or run.row["model"]["kind"] == "llama")


def dtype_of(run: PublishedRun) -> str:
    """Return the dtype of activations."""
    text = run.row["precision"]["compute"]
    if text.startswith("fp32"):
        return "float32"
    return "float16" if text.startswith("fp16") else "bfloat16"


def seconds(found: Iterable[OpSpec], device: Device, backward: bool) -> float:
    """Return the seconds of ops, one after the other."""
    return sum(MODEL.op(each, device, backward).seconds for each in found)


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a microbatch in one block and in the ends, with tensor-parallel collectives."""

    forward: float
    backward: float
    head_forward: float
    head_backward: float


def stage_times(run: PublishedRun) -> StageTimes:
    """Return the seconds of a block and of the head on one rank."""
    shape, device, tp = block_shape(run), run.device, run.degree("tp")
    groups = {
        "products": ops.products(shape) + ops.quantizations(shape),
        "attention": ops.attention(shape),
        "elements": ops.elements(shape),
    }
    ahead = {name: seconds(found, device, False) for name, found in groups.items()}
    back = {name: seconds(found, device, True) for name, found in groups.items()}
    size = _hidden_bytes(shape)
    exchange = 2 * run.collective("all_reduce", size, tp, 1)
    keys = 4 * shape.samples * shape.keys * shape.kv_heads * shape.head
    ring = run.collective("all_gather", keys, run.degree("cp"), tp)
    forward = sum(ahead.values()) + exchange + ring
    again = {
        "none": 0.0,
        "full": forward,
        "attention": ahead["attention"],
        "operations": ahead["products"] / 2 + ahead["elements"],
    }[run.recompute]
    added = seconds(ops.accumulations(shape), device, False)
    vocabulary = -(-run.row["model"]["vocab"] // tp)
    if run.row["model"]["kind"] == "bert":
        last: list[OpSpec] = []
    else:
        last = ops.head(shape.rows, shape.hidden, vocabulary, shape.dtype, not run.eager)
    return StageTimes(
        forward,
        sum(back.values()) + added + exchange + 2 * ring + again,
        seconds(last, device, False) + exchange / 2,
        seconds(last, device, True) + exchange / 2,
    )


def _hidden_bytes(shape: BlockShape) -> float:
    return float(shape.rows * shape.hidden * (4 if shape.dtype == "float32" else 2))


def block_parameters(run: PublishedRun) -> float:
    """Return the parameters of one block in the whole model."""
    model = run.row["model"]
    hidden, ffn, heads = model["hidden"], model["ffn"], model["heads"]
    head = model.get("head_dim") or hidden // heads
    kv = model.get("kv_heads") or heads
    mlp = (3 if model["kind"] in ops.GATED else 2) * hidden * ffn
    return float(hidden * head * (2 * heads + 2 * kv) + mlp + 4 * hidden)


def model_flops(run: PublishedRun) -> float:
    """Return the model FLOPs of a step: 6 per parameter and token, and attention in full."""
    model, row = run.row["model"], run.row
    head = 0 if model["kind"] == "bert" else model["vocab"] * model["hidden"]
    weights = model["layers"] * block_parameters(run) + head
    attention = 12 * model["layers"] * model["hidden"] * row["sequence"]
    return float((6 * weights + attention) * row["sequence"] * row["global_batch"])


def predict_seconds(run: PublishedRun) -> float:
    """Return the predicted step time."""
    model = run.row["model"]
    times = stage_times(run)
    pp, dp, tp, cp = (run.degree(name) for name in ("pp", "dp", "tp", "cp"))
    microbatches = int(run.row["microbatches"])
    layers = ceil(model["layers"] / pp)
    virtual = int(run.layout.get("virtual") or 1)
    ends = model["vocab"] * model["hidden"] / tp
    weights = block_parameters(run) / tp
    replicas = dp * cp
    if run.zero >= 2 and pp == 1:
        step = _sharded_step(run, times, layers, microbatches, weights, ends, replicas)
    else:
        inner = layers * (times.forward + times.backward)
        last = times.head_forward + times.head_backward
        p2p = _transfer(run, virtual)
        slowest = inner + last + p2p
        bubble = (pp - 1) / virtual * (inner + p2p)
        step = microbatches * slowest + bubble
        step += _gradient_reduction(run, layers * weights + ends, layers * times.backward, replicas)
    owned = layers * weights + ends
    return step + optimizer_seconds(run, owned, replicas)


def _transfer(run: PublishedRun, virtual: int) -> float:
    """Return the seconds that a microbatch waits for its transfers between stages."""
    pp, tp = run.degree("pp"), run.degree("tp")
    if pp == 1 or (virtual > 1 and run.attention == "fused"):  # the library overlaps them
        return 0.0
    size = _hidden_bytes(block_shape(run))
    stride = tp * run.degree("cp") * run.degree("dp")
    leaves = stride * 2 > int(run.row["gpus_per_host"])
    link = run.far if run.far is not None and leaves else run.near
    return 2 * virtual * MODEL.transfer(size / tp, link).seconds


def _gradient_reduction(run: PublishedRun, weights: float, backward: float, ranks: int) -> float:
    """Return the seconds of the gradient reduction that the last backward does not hide."""
    if ranks == 1:
        return 0.0
    item = 2 if run.attention == "math" and not run.autocast else run.gradient_bytes
    took = run.collective("all_reduce", weights * item, ranks, run.degree("tp"))
    if run.overlaps:
        hidden = min(took, GRADIENT_OVERLAP * backward)
        return took - hidden + CONTENTION * hidden
    return took


def overlapped(compute: float, communication: float) -> float:
    """Return the seconds of computation and communication side by side."""
    return max(compute, communication) + CONTENTION * min(compute, communication)


def _sharded_step(
    run: PublishedRun, times: StageTimes, layers: int, microbatches: int, weights: float,
    ends: float, ranks: int,
) -> float:  # fmt: skip
    """Return the seconds of FSDP: gathers one block ahead, reductions beside the backward."""
    tp = run.degree("tp")
    group = int(run.layout.get("zero_group") or ranks)
    gather = run.collective("all_gather", 2 * weights, group, tp)
    scatter = run.collective("reduce_scatter", 4 * weights, group, tp)
    if group < ranks:
        scatter += run.collective("all_reduce", 4 * weights / group, ranks // group, group * tp)
    ahead = overlapped(times.forward, gather)
    again = gather if run.zero == 3 else 0.0
    # gradients are converted to float32 and copied into the buffer of their reduction
    copied = 14 * weights / copy_bandwidth(run.device)
    back = overlapped(times.backward + copied, again + scatter)
    last = times.head_forward + times.head_backward
    edges = run.collective("all_gather", 2 * ends, group, tp) + run.collective(
        "reduce_scatter", 4 * ends, group, tp
    )
    step = layers * (ahead + back) + last + edges
    return microbatches * step


def optimizer_seconds(run: PublishedRun, weights: float, replicas: int) -> float:
    """Return the seconds of Adam on this rank's shard: 28 bytes for each parameter, if fused."""
    group = int(run.layout.get("zero_group") or replicas)
    owned = weights / (group if run.zero >= 1 else 1)
    if run.eager:
        found = owned * 92 / copy_bandwidth(run.device)
    else:
        found = owned * 28 / update_bandwidth(run.device)
    if run.zero in (1, 2):
        found += run.collective("all_gather", 2 * weights, replicas, run.degree("tp"))
    return found
