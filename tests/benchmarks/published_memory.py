"""Peak memory of a published run on the rank that needs the most."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from published_facts import LOSSES
from published_models import share_of_mixtures
from published_ops import BlockShape
from published_run import PublishedRun, block_shape, dtype_of, mixture_shape
from published_step import weight_groups

# CUDA context and libraries; NCCL's buffers; allocator rounding and fragmentation.
CONTEXT, BUFFERS, FRAGMENTATION = 0.8e9, 0.5e9, 1.03


def predict_bytes(run: PublishedRun) -> float:
    """Return the predicted peak: states, activations of microbatches in flight, the loss.

    The greatest of the first, the second and the last stage; where layers do not divide evenly,
    the stages at the ends have one less.
    """
    model, pp = run.model, run.degree("pp")
    layers = ceil(model["layers"] / pp)
    ends = model["vocab"] * model["hidden"] / run.degree("tp")
    if pp == 1:  # a gated model's embedding and head are two matrices
        return _stage_bytes(run, layers, ends * (2 if model["kind"] == "llama" else 1), 1, True)
    spare, held = layers * pp - model["layers"], _in_flight(run)
    found = [_stage_bytes(run, layers - (spare > 0), ends, held, False)]
    if "first rank" not in str(run.row["measured"].get("peak_memory_kind")):
        found += [_stage_bytes(run, layers - (spare > 1), ends, 1, True)]
        if pp > 2:
            found += [_stage_bytes(run, layers, 0.0, _in_flight(run, 1), False)]
    return max(found)


def _stage_bytes(run: PublishedRun, layers: int, ends: float, held: float, loss: bool) -> float:
    """Return the peak of a stage that holds ``held`` microbatches.

    ends: parameters of embedding and head.
    """
    groups = weight_groups(run)
    weights = layers * sum(group.weights for group in groups) + ends
    states = sum(
        _state_bytes(run, layers, group.weights, 0.0 if index else ends, group.replicas)
        for index, group in enumerate(groups)
    )
    kept, working = _kept_bytes(run), _working_bytes(run)
    held = min(held, int(run.row["microbatches"]))
    used = layers * kept * held + working + (_loss_bytes(run) if loss else 0.0)
    if _frees_gradients(run):  # they grow while activations are freed
        gradients = weights * run.gradient_bytes
        states -= gradients
        used = max(used, gradients + kept + working)
    context = CONTEXT + (BUFFERS if run.row["gpus"] > 1 else 0.0)
    return context + FRAGMENTATION * (states + used)


def _state_bytes(run: PublishedRun, layers: int, block: float, ends: float, replicas: int) -> float:
    """Return the bytes of weights, gradients and Adam's state, in 16 bit with float32 masters."""
    weights = layers * block + ends
    group = min(int(run.layout.get("zero_group") or replicas), replicas)
    single = dtype_of(run) == "float32"
    if run.zero == 3 and run.degree("pp") > 1:  # gathered once per step, with their gradients
        return 16 * weights / group + 6 * weights
    if run.zero == 3:  # float32 shards; two gathered blocks, and a float32 gradient of one
        return 16 * weights / group + 8 * block + 2 * ends + 4 * max(block, ends)
    first, state = (4, 8) if single else (2, 12)
    kept = 4 if single else run.gradient_bytes
    shards = group if run.zero else 1
    return weights * (first + kept / (group if run.zero == 2 else 1) + state / shards)


def _in_flight(run: PublishedRun, stage: int = 0) -> float:
    """Return the microbatches whose activations a stage holds at once, of all its layers."""
    pp, virtual = run.degree("pp"), run.virtual
    if run.schedule.in_flight_form == "all":
        return float(run.row["microbatches"])
    if virtual == 1:
        return pp - stage
    return (2 * (pp - 1 - stage) + (virtual - 1) * pp + 1) / virtual


def _frees_gradients(run: PublishedRun) -> bool:
    """Return whether no gradient exists when the backward starts.

    Not where gradients are accumulated, or kept in the buckets of DistributedDataParallel.
    """
    once = run.row["microbatches"] == 1 and run.degree("pp") == 1 and run.zero == 0
    return once and (run.half or run.degree("dp") == 1)


def _kept_bytes(run: PublishedRun) -> float:
    """Return the bytes that a block keeps of one microbatch until its backward."""
    shape = block_shape(run)
    if run.recompute == "full":
        return 2.0 * shape.rows * shape.hidden / shape.shard
    saved = _all_bytes(run)
    if run.recompute == "attention" and not shape.fused_attention:
        return saved - 5 * shape.rows * shape.keys * shape.heads
    if run.recompute == "elements":  # products of their results keep the operand of these alone
        return saved - _mean(run, lambda s: 2.0 * s.rows * (2 * s.hidden / s.shard + _inner(s)))
    if run.recompute == "operations":  # the input, attention's result, half of the products
        return _mean(run, _operations_bytes)
    return saved


def _mean(run: PublishedRun, count: Callable[[BlockShape], float]) -> float:
    """Return the mean over blocks without and with experts."""
    share, mixture = share_of_mixtures(run.model), mixture_shape(run)
    found = (1 - share) * count(block_shape(run))
    return found if mixture is None else found + share * count(mixture)


def _inner(shape: BlockShape) -> float:
    """Return the width of the results of a block's activations, for each token."""
    return shape.ffn + shape.chosen * shape.capacity * shape.width


def _operations_bytes(shape: BlockShape) -> float:
    own = shape.hidden / shape.shard
    wide = 2 * _inner(shape)
    products = 3 * own + 2 * shape.kv_heads * shape.head + wide
    return 2.0 * shape.rows * (2 * own + products / 2)


def _all_bytes(run: PublishedRun) -> float:
    """Return the bytes of a block's activations without recomputation (Korthikanti et al.).

    A vendor's library keeps operands of float8 products in 8 bit, and one kernel computes a gated
    activation, so that its parts are not kept. Of a mixture also the rows of each expert are kept,
    and what they give, unless the activation is weighted in the place of that.
    """
    fused = run.attention == "fused"
    parts = 2 if fused else 3

    def count(shape: BlockShape) -> float:
        masks = 2 if shape.dropout else 0
        item = 1 if shape.linear.startswith("float8") and shape.delayed_scaling else 2
        outside = (4 + 2 * item + masks) * shape.hidden / shape.shard
        heads = 2 * (2 * shape.heads + 2 * shape.kv_heads) * shape.head
        heads += shape.heads * shape.head * (2 - item)  # the result of attention, a second time
        each = 2 * parts + item if shape.kind == "llama" else 2 + item
        ends = (item + (0 if fused else 2)) * shape.hidden
        rows = shape.chosen * shape.capacity * (each * shape.width + ends)
        scores = 0 if shape.fused_attention else (4 + masks / 2) * shape.keys * shape.heads
        return float(shape.rows * (outside + heads + each * shape.ffn + rows + scores))

    return _mean(run, count)


def _working_bytes(run: PublishedRun) -> float:
    """Return the bytes of one block's recomputed activations and of gradients in its backward."""
    return (0.5 if run.recompute == "none" else 2.0) * _all_bytes(run)


def _loss_bytes(run: PublishedRun) -> float:
    """Return the bytes of logits in 16 bit, in float32, of their softmax and their gradient."""
    if run.model["kind"] == "bert":
        return 0.0
    rows = block_shape(run).rows
    item = LOSSES.get(run.row["source"], 12 if run.eager else 10)
    return rows * run.model["vocab"] / run.degree("tp") * item
