"""Step time of a published run: fxpart's cost model on its operators, composed by its layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

import published_ops as ops
from fxpart.costmodels.efficiency import copy_bandwidth, update_bandwidth
from published_models import dense_parameters, expert_parameters, share_of_mixtures
from published_ops import BlockShape
from published_run import MODEL, PublishedRun, block_shape, mixture_shape

from fxpart.cluster.devices import Device
from fxpart.costs import OpSpec

# Computation and communication slow down each other where they overlap: measured factor 1.13
# (Galvatron, A100).
CONTENTION = 0.13
GRADIENT_OVERLAP = 0.9  # of the backward: the first bucket is complete only after a part of it


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


@dataclass(frozen=True)
class WeightGroup:
    """Weights of a block on one rank, and the ranks that hold the same, ``stride`` apart."""

    weights: float
    replicas: int
    stride: int


def stage_times(run: PublishedRun) -> StageTimes:
    """Return the seconds of a block, the mean of all, and of the head on one rank."""
    shape, device, tp = block_shape(run), run.device, run.degree("tp")
    share = share_of_mixtures(run.model)
    forward, backward = _block_seconds(run, shape) if share < 1 else (0.0, 0.0)
    if mixture := mixture_shape(run):
        found = _block_seconds(run, mixture)
        forward, backward = (
            (1 - share) * dense + share * mixed
            for dense, mixed in zip((forward, backward), found, strict=True)
        )
    exchange = 2 * run.collective("all_reduce", _hidden_bytes(shape), tp, 1)
    vocabulary = -(-run.model["vocab"] // tp)
    last: list[OpSpec] = []
    if run.model["kind"] != "bert":
        last = ops.head(shape.rows, shape.hidden, vocabulary, shape.dtype, not run.eager)
    return StageTimes(
        forward,
        backward,
        seconds(last, device, False) + exchange / 2,
        seconds(last, device, True) + exchange / 2,
    )


def _block_seconds(run: PublishedRun, shape: BlockShape) -> tuple[float, float]:
    """Return the seconds of a block's forward, and of its backward with what it computes again."""
    device, tp = run.device, run.degree("tp")
    groups = {
        "products": ops.products(shape) + ops.quantizations(shape),
        "attention": ops.attention(shape),
        "experts": ops.experts(shape),
        "elements": ops.elements(shape),
    }
    ahead = {name: seconds(found, device, False) for name, found in groups.items()}
    back = {name: seconds(found, device, True) for name, found in groups.items()}
    for times in (ahead, back):  # a short window costs next to nothing
        times["attention"] *= 1 - float(run.model.get("windowed") or 0)
    exchange = 2 * run.collective("all_reduce", _hidden_bytes(shape), tp, 1)
    exchange += _dispatch_seconds(run, shape)
    keys = 2 * shape.samples * shape.keys * shape.kv_heads * (shape.head + shape.values)
    ring = run.collective("all_gather", keys, run.degree("cp"), tp)
    forward = sum(ahead.values()) + exchange + ring
    again = {
        "none": 0.0,
        "full": forward,
        "attention": ahead["attention"],
        "elements": ahead["elements"],
        "operations": ahead["products"] / 2 + ahead["experts"] / 2 + ahead["elements"],
    }[run.recompute]
    added = seconds(ops.accumulations(shape), device, False)
    return forward, sum(back.values()) + added + exchange + 2 * ring + again


def _dispatch_seconds(run: PublishedRun, shape: BlockShape) -> float:
    """Return the seconds in which rows are sent to the ranks of their experts and back."""
    ranks = run.degree("ep")
    if not shape.experts or ranks == 1:
        return 0.0
    size = shape.chosen * shape.capacity * _hidden_bytes(shape) / shape.shard
    stride = run.degree("tp") * run.degree("cp")
    return 2 * run.collective("all_to_all", size * ranks, ranks, stride)


def _hidden_bytes(shape: BlockShape) -> float:
    return float(shape.rows * shape.hidden * (4 if shape.dtype == "float32" else 2))


def weight_groups(run: PublishedRun) -> list[WeightGroup]:
    """Return a block's weights, the mean of all: experts lie inside of data parallelism."""
    tp, replicas, ep = run.degree("tp"), run.degree("dp") * run.degree("cp"), run.degree("ep")
    found = [WeightGroup(dense_parameters(run.model) / tp, replicas, tp)]
    if experts := expert_parameters(run.model):
        found.append(WeightGroup(experts / tp / ep, max(1, replicas // ep), tp * ep))
    return found


def model_flops(run: PublishedRun) -> float:
    """Return the model FLOPs of a step: 6 per parameter and token, and attention in full."""
    model, row = run.model, run.row
    head = 0 if model["kind"] == "bert" else model["vocab"] * model["hidden"]
    block = dense_parameters(model) + expert_parameters(model, active=True)
    width = model["heads"] * (model["head_dim"] + (model.get("value_dim") or model["head_dim"])) / 2
    attention = 12 * model["layers"] * width * row["sequence"]
    weights = model["layers"] * block + head
    return float((6 * weights + attention) * row["sequence"] * row["global_batch"])


def predict_seconds(run: PublishedRun) -> float:
    """Return the predicted step time."""
    model = run.model
    times, groups = stage_times(run), weight_groups(run)
    pp, microbatches = run.degree("pp"), int(run.row["microbatches"])
    layers = ceil(model["layers"] / pp)
    ends = model["vocab"] * model["hidden"] / run.degree("tp")
    if run.zero >= 2 and pp == 1:
        step = microbatches * _sharded_microbatch(run, times, layers, groups, ends)
    else:
        adding = sum(accumulation_seconds(run, g.weights) for g in groups) * (microbatches > 1)
        inner = layers * (times.forward + times.backward + adding + run.blocked)
        last = times.head_forward + times.head_backward
        p2p = _transfer_seconds(run)
        bubble = run.schedule.fill * (pp - 1) / run.virtual * (inner + p2p)
        step = microbatches * (inner + last + p2p) + bubble
        step += _gradient_reduction(run, layers, groups, ends, layers * times.backward)
    return step + optimizer_seconds(run, layers, groups, ends)


def accumulation_seconds(run: PublishedRun, weights: float) -> float:
    """Return the seconds in which the gradients of a microbatch are added to those kept.

    Two reads and one write of memory, or what a product that adds to its result moves more.
    """
    kept = gradient_item(run)
    moved = 0 if run.attention == "fused" else 2 + 2 * kept
    return weights * moved / copy_bandwidth(run.device)


def gradient_item(run: PublishedRun) -> int:
    """Return the bytes of each gradient that is kept and reduced."""
    return 2 if run.attention == "math" and not run.autocast else run.gradient_bytes


def _transfer_seconds(run: PublishedRun) -> float:
    """Return the seconds that a microbatch waits for its transfers between stages."""
    pp, tp = run.degree("pp"), run.degree("tp")
    if pp == 1 or (run.virtual > 1 and run.attention == "fused"):  # the library overlaps them
        return 0.0
    size = _hidden_bytes(block_shape(run))
    stride = tp * run.degree("cp") * run.degree("dp")
    leaves = stride * 2 > int(run.row["gpus_per_host"])
    link = run.far if run.far is not None and leaves else run.near
    return 2 * run.virtual * MODEL.transfer(size / tp, link).seconds


def _gradient_reduction(
    run: PublishedRun, layers: int, groups: list[WeightGroup], ends: float, backward: float
) -> float:
    """Return the seconds of the gradient reduction that the last backward does not hide.

    Weights that are sharded as well are gathered once per step.
    """
    took = 0.0
    for index, group in enumerate(groups):
        weights = layers * group.weights + (0.0 if index else ends)
        size = weights * gradient_item(run)
        took += run.collective("all_reduce", size, group.replicas, group.stride)
        if run.zero == 3:
            took += run.collective("all_gather", 2 * weights, group.replicas, group.stride)
    if run.overlaps:
        hidden = min(took, GRADIENT_OVERLAP * backward)
        return took - hidden + CONTENTION * hidden
    return took


def overlapped(compute: float, communication: float) -> float:
    """Return the seconds of computation and communication side by side."""
    return max(compute, communication) + CONTENTION * min(compute, communication)


def _sharded_microbatch(
    run: PublishedRun, times: StageTimes, layers: int, groups: list[WeightGroup], ends: float
) -> float:
    """Return the seconds of FSDP: gathers one block ahead, reductions beside the backward."""
    gather = scatter = 0.0
    for one in groups:
        group = _sharding_ranks(run, one)
        gather += run.collective("all_gather", 2 * one.weights, group, one.stride)
        scatter += run.collective("reduce_scatter", 4 * one.weights, group, one.stride)
        if group < one.replicas:
            size, stride = 4 * one.weights / group, group * one.stride
            scatter += run.collective("all_reduce", size, one.replicas // group, stride)
    ahead = overlapped(times.forward, gather)
    again = gather if run.zero == 3 else 0.0
    # gradients are converted to float32 and copied into the buffer of their reduction
    copied = 14 * sum(one.weights for one in groups) / copy_bandwidth(run.device)
    back = overlapped(times.backward + copied, again + scatter)
    last = times.head_forward + times.head_backward
    group, tp = _sharding_ranks(run, groups[0]), groups[0].stride
    edges = run.collective("all_gather", 2 * ends, group, tp) + run.collective(
        "reduce_scatter", 4 * ends, group, tp
    )
    return layers * (ahead + back) + last + edges


def _sharding_ranks(run: PublishedRun, group: WeightGroup) -> int:
    """Return the ranks that share a weight's state, at most its replicas."""
    return min(int(run.layout.get("zero_group") or group.replicas), group.replicas)


def optimizer_seconds(
    run: PublishedRun, layers: int, groups: list[WeightGroup], ends: float
) -> float:
    """Return the seconds of Adam on this rank's shard: 28 bytes for each parameter, if fused."""
    found = 0.0
    for index, group in enumerate(groups):
        weights = layers * group.weights + (0.0 if index else ends)
        owned = weights / (_sharding_ranks(run, group) if run.zero >= 1 else 1)
        if run.eager:
            found += owned * 92 / copy_bandwidth(run.device)
        else:
            found += owned * 28 / update_bandwidth(run.device)
        if run.zero == 1 or (run.zero == 2 and run.degree("pp") > 1):
            found += run.collective("all_gather", 2 * weights, group.replicas, group.stride)
    return found
