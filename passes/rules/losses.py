"""Rules for losses: sums are Partial if rows are sharded; means need the total count (forms)."""

from __future__ import annotations

from dataclasses import replace

from fxpart.sharding import REPLICATE

from .pointwise import broadcast
from .reductions import shares
from .schema_call import Dim, Entry, SchemaCall, UncoveredCallError
from .sharding_rule import ShardingRule

NONE, MEAN, SUM = 0, 1, 2  # reduction constants of ATen


def _elementwise(call: SchemaCall) -> ShardingRule:
    """Rule for mse_loss and similar losses: one term per element of the broadcast operands."""
    ranks = [len(shape) for _, shape in call.operands]
    rank = max(ranks)
    dims = broadcast(call, rank)
    names: list[Dim] = [f"d{i}" for i in range(rank)]
    reduction = call.given["reduction"]
    if reduction == NONE:
        return call.rule(dims, [names])
    used = {str(d) for each in dims for d in each}
    form = f"{call.name.removeprefix('aten.')}_rows"
    forms = shares(used, form) if reduction == MEAN else {}
    return call.rule(dims, [[]], forms=forms)


def _cross_entropy(call: SchemaCall) -> ShardingRule:
    """Rule for cross-entropy: rows ``n``, and classes ``c`` (the vocabulary) with a sharded form.

    Classes may only be sharded if the target is one index per row and all classes have equal
    weight.
    """
    shape, target = call.shape("self"), call.shape("target")
    reduction = call.given["reduction"]
    if not 1 <= len(shape) <= 2:
        return _places(call)
    rows: list[Dim] = ["n"] if len(shape) == 2 else []
    by_index = len(target) == len(rows)
    plain = by_index and len(rows) == 1 and not call.has("weight")
    plain = plain and not call.given["label_smoothing"]
    kind: Dim = "c" if plain else "_c"
    dims: dict[str, list[Dim]] = {
        "self": [*rows, kind],
        "target": rows if by_index else [*rows, kind],
        "weight": [kind],
    }
    forms = {"c": "cross_entropy_classes"}
    if reduction == MEAN:
        forms |= {"n": "cross_entropy_rows", "n c": "cross_entropy_rows_classes"}
    results = [rows if reduction == NONE else []]
    results_of = {"c": (REPLICATE,)}
    rule = call.rule(dims, results, forms=forms, results_of=results_of)
    return replace(rule, unordered=frozenset("n"))


def _places(call: SchemaCall) -> ShardingRule:
    """Rule for the cross-entropy of images or sequences [n, c, positions...]."""
    shape, target = call.shape("self"), call.shape("target")
    space: list[Dim] = [f"_s{i}" for i in range(len(shape) - 2)]
    by_index = len(target) == len(shape) - 1
    dims: dict[str, list[Dim]] = {
        "self": ["n", "_c", *space],
        "target": ["n", *space] if by_index else ["n", "_c", *space],
        "weight": ["_c"],
    }
    reduction = call.given["reduction"]
    results: list[list[Dim]] = [["n", *space] if reduction == NONE else []]
    forms = {"n": "cross_entropy_rows"} if reduction == MEAN else {}
    return call.rule(dims, results, forms=forms)


def _nll(call: SchemaCall) -> ShardingRule:
    """Rule for nll_loss of log-probabilities [n, c, positions...] and target indices."""
    shape = call.shape("self")
    rows: list[Dim] = ["n"] if len(shape) > 1 else []
    space: list[Dim] = [f"_s{i}" for i in range(len(shape) - 2)]
    dims: dict[str, list[Dim]] = {
        "self": [*rows, "_c", *space],
        "target": [*rows, *space],
        "weight": ["_c"],
    }
    reduction = call.given["reduction"]
    if len(call.results) != 1:
        raise UncoveredCallError
    results: list[list[Dim]] = [[*rows, *space] if reduction == NONE else []]
    forms = {"n": "nll_loss_rows"} if reduction == MEAN else {}
    return call.rule(dims, results, forms=forms)


def _ctc(call: SchemaCall) -> ShardingRule:
    """Rule for ctc_loss of [length, n, classes], padded targets [n, labels] and tensors of lengths.

    Its mean counts every row alike.
    """
    shape = call.shape("targets")
    if not call.op.name().endswith(".Tensor") or len(shape) != 2:
        raise UncoveredCallError
    dims: dict[str, list[Dim]] = {
        "log_probs": ["_t", "n", "_c"],
        "targets": ["n", "_s"],
        "input_lengths": ["n"],
        "target_lengths": ["n"],
    }
    reduction = call.given["reduction"]
    results: list[list[Dim]] = [["n"] if reduction == NONE else []]
    return call.rule(dims, results, forms={"n": "ctc_loss_rows"} if reduction == MEAN else {})


ELEMENTWISE = """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
binary_cross_entropy_with_logits soft_margin_loss kl_div poisson_nll_loss hinge_embedding_loss
""".split()

TABLE: dict[str, Entry] = {
    **{f"aten.{name}": _elementwise for name in ELEMENTWISE},
    "aten.cross_entropy_loss": _cross_entropy,
    "aten.ctc_loss": _ctc,
    **dict.fromkeys(("aten.nll_loss", "aten.nll_loss_nd", "aten.nll_loss2d"), _nll),
}
