"""Peak memory of a published run on the rank that needs the most."""

from __future__ import annotations

from math import ceil

from published_facts import LOSSES
from published_step import PublishedRun, block_parameters, block_shape, dtype_of

# CUDA context and libraries; NCCL's buffers; allocator rounding and fragmentation.
CONTEXT, BUFFERS, FRAGMENTATION = 0.8e9, 0.5e9, 1.03


def predict_bytes(run: PublishedRun) -> float:
    """Return the predicted peak: states, activations of microbatches in flight, the loss.

    The greatest of the first, the second and the last stage; where layers do not divide evenly,
    the stages at the ends have one less.
    """
    model, pp = run.row["model"], run.degree("pp")
    layers = ceil(model["layers"] / pp)
    ends = model["vocab"] * model["hidden"] / run.degree("tp")
    if pp == 1:  # a gated model's embedding and head are two matrices
        return _stage_bytes(run, layers, ends * (2 if model["kind"] == "llama" else 1), 1, True)
    spare, held = layers * pp - model["layers"], _in_flight(run)
    found = [_stage_bytes(run, layers - (spare > 0), ends, held, False)]
    if "first rank" not in run.row["measured"].get("peak_memory_kind", ""):
        found += [_stage_bytes(run, layers - (spare > 1), ends, 1, True)]
        if pp > 2:
            found += [_stage_bytes(run, layers, 0.0, _in_flight(run, 1), False)]
    return max(found)


def _stage_bytes(run: PublishedRun, layers: int, ends: float, held: float, loss: bool) -> float:
    """Return the peak of a stage that holds ``held`` microbatches.

    ends: parameters of embedding and head.
    """
    block = block_parameters(run) / run.degree("tp")
    weights = layers * block + ends
    states = _state_bytes(run, weights, block, ends, run.degree("dp") * run.degree("cp"))
    kept, working = _kept_bytes(run), _working_bytes(run)
    held = min(held, int(run.row["microbatches"]))
    used = layers * kept * held + working + (_loss_bytes(run) if loss else 0.0)
    if _frees_gradients(run):  # they grow while activations are freed
        gradients = weights * run.gradient_bytes
        states -= gradients
        used = max(used, gradients + kept + working)
    context = CONTEXT + (BUFFERS if run.row["gpus"] > 1 else 0.0)
    return context + FRAGMENTATION * (states + used)


def _state_bytes(
    run: PublishedRun, weights: float, block: float, ends: float, replicas: int
) -> float:
    """Return the bytes of weights, gradients and Adam's state, in 16 bit with float32 masters."""
    group = int(run.layout.get("zero_group") or replicas)
    if dtype_of(run) == "float32":
        return 16 * weights
    if run.zero == 3:  # float32 shards; two gathered blocks, and a float32 gradient of one
        return 16 * weights / group + 8 * block + 2 * ends + 4 * max(block, ends)
    return weights * (2 + run.gradient_bytes + 12 / (group if run.zero else 1))


def _in_flight(run: PublishedRun, stage: int = 0) -> float:
    """Return the microbatches whose activations a stage holds at once, of all its layers."""
    pp, virtual = run.degree("pp"), run.degree("virtual")
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
    if run.recompute == "operations":  # the input, attention's result, half of the products
        own = shape.hidden / shape.shard
        products = 3 * own + 2 * shape.kv_heads * shape.head + 2 * shape.ffn
        return 2.0 * shape.rows * (2 * own + products / 2)
    return saved


def _all_bytes(run: PublishedRun) -> float:
    """Return the bytes of a block's activations without recomputation (Korthikanti et al.).

    A vendor's library keeps operands of float8 products in 8 bit, and one kernel computes a gated
    activation, so that its parts are not kept.
    """
    shape = block_shape(run)
    masks = 2 if shape.dropout else 0
    item = 1 if shape.linear.startswith("float8") and shape.delayed_scaling else 2
    outside = (4 + 2 * item + masks) * shape.hidden / shape.shard
    heads = 2 * (2 * shape.heads + 2 * shape.kv_heads) * shape.head
    heads += shape.heads * shape.head * (2 - item)  # the result of attention, a second time
    parts = 2 if run.attention == "fused" else 3
    inside = heads + (2 * parts + item if shape.kind == "llama" else 2 + item) * shape.ffn
    scores = 0 if shape.fused_attention else (4 + masks / 2) * shape.keys * shape.heads
    return float(shape.rows * (outside + inside + scores))


def _working_bytes(run: PublishedRun) -> float:
    """Return the bytes of one block's recomputed activations and of gradients in its backward."""
    return (0.5 if run.recompute == "none" else 2.0) * _all_bytes(run)


def _loss_bytes(run: PublishedRun) -> float:
    """Return the bytes of logits in 16 bit, in float32, of their softmax and their gradient."""
    if run.row["model"]["kind"] == "bert":
        return 0.0
    rows = block_shape(run).rows
    item = LOSSES.get(run.row["source"], 12 if run.eager else 10)
    return rows * run.row["model"]["vocab"] / run.degree("tp") * item
