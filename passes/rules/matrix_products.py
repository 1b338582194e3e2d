"""Rules for matrix products: a sharded contraction is Partial, and a bias is added once."""

from __future__ import annotations

from .schema_call import (
    Dim,
    Entry,
    SchemaCall,
    UncoveredCallError,
    is_one,
    name_broadcast_dims,
    notation,
)
from .sharding_rule import ShardingRule, Size


def _matmul(call: SchemaCall) -> ShardingRule:
    """Rule for torch.matmul: vectors, matrices, and leading dims that broadcast."""
    left, right = (len(shape) for _, shape in call.operands)
    if not left or not right:
        raise UncoveredCallError
    first: list[Dim] = ["k"] if left == 1 else [*name_broadcast_dims(left - 2), "m", "k"]
    second: list[Dim] = ["k"] if right == 1 else [*name_broadcast_dims(right - 2), "k", "n"]
    out = name_broadcast_dims(max(left, right, 2) - 2)
    out += ["m"] if left > 1 else []
    out += ["n"] if right > 1 else []
    names = [name for name, _ in call.operands]
    return call.rule([first, second], [out], linear=names)


def _added(text: str) -> Entry:
    """Rule for beta * self + alpha * a @ b, where self broadcasts to the result."""
    _, out = text.split("->")
    first, second = text.partition("->")[0].split(",")

    def make(call: SchemaCall) -> ShardingRule:
        (name, shape), (a, _), (b, _) = call.operands
        bias = out.split()[len(out.split()) - len(shape) :]
        return call.rule(
            [bias, first.split(), second.split()],
            [out.split()],
            additive=[name],
            linear=[f"{name} {a}", f"{name} {b}"],
        )

    return make


def _einsum(call: SchemaCall) -> ShardingRule:
    """Rule for einsum: letters are factors; a letter repeated in one term is not sharded."""
    equation = str(call.given["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow:
        raise UncoveredCallError
    terms = [_letters(t, len(s)) for t, (_, s) in zip(left.split(","), call.operands, strict=True)]
    out = _letters(right, len(call.results[0]))
    diagonal = {f for term in terms for f in term if term.count(f) > 1}
    # Only one operand may be Partial, since the operands are multiplied.
    linear = [frozenset({i}) for i in range(len(terms))]
    return call.rule(terms, [out], whole=[str(f) for f in diagonal], linear=linear)


def _letters(term: str, rank: int) -> list[Dim]:
    found: list[Dim] = []
    hidden = rank - len(term.replace("...", ""))
    for part in term.replace("...", ".").strip():
        found += name_broadcast_dims(hidden) if part == "." else [part]
    return found


def _tensordot(call: SchemaCall) -> ShardingRule:
    (_, a), (_, b) = call.operands
    first = [int(d) % len(a) for d in call.given["dims_self"]]
    second = [int(d) % len(b) for d in call.given["dims_other"]]
    left: list[Dim] = [f"m{i}" for i in range(len(a))]
    right: list[Dim] = [f"n{i}" for i in range(len(b))]
    for k, (i, j) in enumerate(zip(first, second, strict=True)):
        left[i] = right[j] = f"k{k}"
    kept = [f for f in (*left, *right) if not str(f).startswith("k")]
    return call.rule([left, right], [kept], linear=[name for name, _ in call.operands])


def _grouped(call: SchemaCall) -> ShardingRule:
    """Rule for grouped products: rows sorted by group; rows and groups are not sharded.

    torch's kernel requires widths that are multiples of 16 bytes, so factors count these units.
    """
    rows, weights = (shape for _, shape in call.operands[:2])
    if len(rows) != 2 or len(weights) != 3 or call.has("bias"):
        raise UncoveredCallError
    unit = 16 // call.nodes[0].meta["val"].element_size() if call.name == "aten._grouped_mm" else 1
    width, out = weights[1:]
    if not isinstance(width, int) or not isinstance(out, int) or width % unit or out % unit:
        raise UncoveredCallError
    sizes: dict[str, Size] = {"k": width // unit, "n": out // unit, "_u": unit}
    k, n = ("k", "_u"), ("n", "_u")
    dims: list[list[Dim]] = [["_t", k], ["_e", k, n]]
    if len(call.operands) > 2:
        dims.append(["_e"])
    names = [name for name, _ in call.operands[:2]]
    return call.rule(dims, [["_t", n]], sizes=sizes, linear=names)


def _outer(call: SchemaCall) -> ShardingRule:
    names = [name for name, _ in call.operands]
    return call.rule([["m"], ["n"]], [["m", "n"]], linear=names)


def _bilinear(call: SchemaCall) -> ShardingRule:
    """Rule for x1 W x2 + bias, with one matrix per output."""
    rank = len(call.results[0])
    dots = name_broadcast_dims(rank - 1)
    return call.rule(
        {"input1": [*dots, "i"], "input2": [*dots, "j"], "weight": ["n", "i", "j"], "bias": ["n"]},
        [[*dots, "n"]],
        additive=["bias"],
        linear=["input1 bias", "input2 bias", "weight bias"],
    )


def _dot(call: SchemaCall) -> ShardingRule:
    names = [name for name, _ in call.operands]
    if any(is_one(shape[0]) for _, shape in call.operands):
        raise UncoveredCallError  # dot does not broadcast
    return call.rule([["k"], ["k"]], [[]], linear=names)


TABLE: dict[str, Entry] = {
    "aten.linear": notation(
        "... k, n k, n -> ... n", additive="bias", linear=["input bias", "weight bias"]
    ),
    # Rows have scales of their own, but a sum over shards of a row would round otherwise.
    "fxpart.float8_linear": notation("... _k, _n _k, _n -> ... _n"),
    "aten.mm": notation("m k, k n -> m n", linear=["self", "mat2"]),
    "aten.bmm": notation("b m k, b k n -> b m n", linear=["self", "mat2"]),
    "aten.mv": notation("m k, k -> m", linear=["self", "vec"]),
    "aten.matmul": _matmul,
    "aten.dot": _dot,
    "aten.vdot": _dot,
    "aten.inner": notation("... k, n k -> ... n", linear=["self", "other"]),
    "aten.outer": _outer,
    "aten.ger": _outer,
    "aten.addmm": _added("m k, k n -> m n"),
    "aten.addmv": _added("m k, k -> m"),
    "aten.addbmm": _added("b m k, b k n -> m n"),
    "aten.baddbmm": _added("b m k, b k n -> b m n"),
    "aten.addr": _added("m, n -> m n"),
    "aten.einsum": _einsum,
    "aten.tensordot": _tensordot,
    "aten.bilinear": _bilinear,
    "aten._grouped_mm": _grouped,
    "transformers.grouped_mm_fallback": _grouped,
}
