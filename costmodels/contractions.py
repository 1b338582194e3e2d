"""FLOPs of contractions: two per multiply-add, as torch's FlopCounterMode counts.

All other ops are memory-bound and have none. Each rule returns the forward's FLOPs and which inputs
are factors: a backward repeats the forward's work once for each factor that needs a gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from .tensor_sizes import elements, product

if TYPE_CHECKING:
    from fxpart.costs import OpSpec, Size

Rule = Callable[["OpSpec"], "Size"]


def _matrices(left: int) -> Rule:
    """Return the rule of matrix and vector products: 2 x outputs x last dim of the left factor."""

    def rule(op: OpSpec) -> Size:
        return 2 * elements(op.outputs[0]) * op.inputs[left].shape[-1]

    return rule


def _addbmm(op: OpSpec) -> Size:
    """Return the FLOPs of batched products that are summed over the batch."""
    return 2 * elements(op.inputs[1]) * op.inputs[2].shape[-1]


def _convolution(op: OpSpec) -> Size:
    """Return 2 x batch x positions x filter elements (the filter is already divided by groups).

    The positions are those of the output, or of the input for a transposed convolution.
    """
    data, weight = op.inputs[0], op.inputs[1]
    transposed = "transpose" in op.key or op.attribute("transposed", "6") is True
    space = len(weight.shape) - 2
    places = (data if transposed else op.outputs[0]).shape[-space:]
    batch = data.shape[0] if len(data.shape) == len(weight.shape) else 1
    return 2 * batch * product(places) * elements(weight)


def _bilinear(op: OpSpec) -> Size:
    return 2 * product(op.inputs[0].shape[:-1]) * elements(op.inputs[2])


def _tensordot(op: OpSpec) -> Size:
    dims = op.attribute("dims_self", "2")
    over = op.inputs[0].shape
    shared = product(over[d] for d in dims) if isinstance(dims, tuple) else over[-1]
    return 2 * elements(op.outputs[0]) * shared


def _experts(op: OpSpec) -> Size:
    """Return the FLOPs of a mixture of experts: two products per token and selected expert.

    Of the forms on several mesh ranks: one that shards only the experts computes its share of the
    selected ones, one that sends rows around as many as it has.
    """
    hidden, index, _, up, down = op.inputs[:5]
    each = product(up.shape[1:]) + product(down.shape[1:])
    choices = 2 * hidden.shape[0] * index.shape[1] * each
    number = op.attribute("1")
    if op.key != "experts_cut" or not isinstance(number, int):
        return choices
    share = choices * up.shape[0]
    return share // number if isinstance(share, int) else share / number


def _einsum(op: OpSpec, backward: bool) -> Size:
    """Return the FLOPs of contractions from left to right, torch.einsum's default path."""
    equation = str(op.attribute("equation", "0")).replace(" ", "")
    left, _, right = equation.partition("->")
    terms, sizes = _letters(left.split(","), [t.shape for t in op.inputs])
    if "->" not in equation:
        counts = Counter(letter for term in terms for letter in set(term))
        right = "".join(sorted(c for c, n in counts.items() if n == 1 or c.isdigit()))
    kept = set(right.replace("...", "")) | {c for term in terms for c in term if c.isdigit()}
    total: Size = 0
    current, trained = set(terms[0]), op.needs(0)
    for index, term in enumerate(terms[1:], start=1):
        later = kept.union(*terms[index + 1 :])
        # letters of one operand that are not needed later are summed before the product
        pair = (current | set(term)) & ((current & set(term)) | later)
        times = trained + op.needs(index) if backward else 1
        total = total + times * 2 * product(sizes[letter] for letter in sorted(pair))
        current, trained = pair & later, trained or op.needs(index)
    return total


def _letters(terms: list[str], shapes: list[tuple[Size, ...]]) -> tuple[list[str], dict[str, Size]]:
    """Return terms with ``...`` as digits counted from the right, and each letter's size."""
    named = []
    sizes: dict[str, Size] = {}
    for term, shape in zip(terms, shapes, strict=True):
        hidden = len(shape) - len(term.replace("...", ""))
        dots = "".join(str(digit) for digit in reversed(range(hidden)))
        term = term.replace("...", dots)
        named.append(term)
        for letter, size in zip(term, shape, strict=True):
            if letter not in sizes or sizes[letter] == 1:
                sizes[letter] = size
    return named, sizes


_LINEAR = _matrices(0)
_ADDED = _matrices(1)

# op -> (FLOPs of the forward, positions of the factors among the inputs)
FLOAT8 = frozenset({"fxpart.float8_linear"})  # Products that round their operands to 8 bits.
PRODUCTS: dict[str, tuple[Rule, tuple[int, ...]]] = {
    **dict.fromkeys(("mm", "bmm", "matmul", "__matmul__", "mv", "dot", "vdot"), (_LINEAR, (0, 1))),
    **dict.fromkeys(("inner", "linear", "_grouped_mm", "_scaled_mm"), (_LINEAR, (0, 1))),
    "transformers.grouped_mm_fallback": (_LINEAR, (0, 1)),
    **dict.fromkeys(("fxpart.experts", "experts_cut", "experts_dispatched"), (_experts, (0, 3))),
    "fxpart.grouped_product": (_LINEAR, (0, 1)),
    "fxpart.float8_linear": (_LINEAR, (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "_addmm_activation"), (_ADDED, (1, 2))),
    "addbmm": (_addbmm, (1, 2)),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), (_convolution, (0, 1))),
    **dict.fromkeys(("convolution", "_convolution"), (_convolution, (0, 1))),
    "conv_transpose1d": (_convolution, (0, 1)),
    "conv_transpose2d": (_convolution, (0, 1)),
    "conv_transpose3d": (_convolution, (0, 1)),
    "bilinear": (_bilinear, (0, 1, 2)),
    "tensordot": (_tensordot, (0, 1)),
}


def _attention(op: OpSpec, backward: bool) -> Size:
    """Return the FLOPs of fused attention; the backward recomputes scores, then has four products.

    Causal masks are not counted as half, as in torch's FlopCounterMode.
    """
    query, key = op.inputs[0].shape, op.inputs[1].shape
    return _count_attention(op, backward, product(query[:-1]) * key[-2])


def _count_attention(op: OpSpec, backward: bool, pairs: Size) -> Size:
    """Return the FLOPs for so many pairs of queries and keys."""
    scores, values = 2 * pairs * op.inputs[0].shape[-1], 2 * pairs * op.inputs[2].shape[-1]
    if not backward:
        return scores + values
    through = op.needs(0) or op.needs(1)
    return (
        scores
        + (values if through else 0)
        + (values if op.needs(2) else 0)
        + (scores if op.needs(0) else 0)
        + (scores if op.needs(1) else 0)
    )


def _attention_rows(op: OpSpec, backward: bool) -> Size:
    """Return the FLOPs of the rank whose queries of causal attention read the most keys.

    All queries and keys are counted in full although half of the pairs are masked, so that these
    queries count twice as often as they read a key. Of equal stripes of the sequence it has the
    last queries of each.
    """
    query, key = op.inputs[0].shape, op.inputs[1].shape
    stripes = op.attribute("stripes")
    count = stripes if isinstance(stripes, int) else 1
    rows, more = product(query[:-1]), key[-2] + -1 * query[-2]
    if isinstance(more, int):
        return _count_attention(op, backward, rows * (count * key[-2] + more) // count)
    return _count_attention(op, backward, rows * key[-2] + rows * more / count)


# recurrent op -> number of state tensors between the input and the weights
_STATES = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}
_CELLS = {"lstm_cell": 3, "gru_cell": 2, "rnn_tanh_cell": 2, "rnn_relu_cell": 2}


def _recurrent(op: OpSpec, backward: bool) -> Size:
    """Return 2 x rows x elements: every weight matrix multiplies every row of the input once."""
    first = _CELLS.get(op.key) or 1 + _STATES[op.key]
    weights = [(i, t) for i, t in enumerate(op.inputs) if i >= first and len(t.shape) == 2]
    rows = product(op.inputs[0].shape[:-1])
    if not backward:
        return 2 * rows * _sum(elements(t) for _, t in weights)
    trained = _sum(elements(t) for i, t in weights if op.needs(i))
    through = _sum(elements(t) for _, t in weights)
    if not op.needs(0):  # the first layer's input (of both directions) needs no gradient
        width = op.inputs[0].shape[-1]
        both = 2 if op.attribute("bidirectional", "7") is True else 1
        untouched = [t for _, t in weights[0 : 4 * both : 2] if t.shape[1] == width][:both]
        through = through - _sum(elements(t) for t in untouched)
    return 2 * rows * (trained + through)


def _sum(sizes: object) -> Size:
    total: Size = 0
    for size in sizes:  # type: ignore[attr-defined]
        total = total + size
    return total


SPECIAL: dict[str, Callable[[OpSpec, bool], Size]] = {
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "attention_rows": _attention_rows,
    **dict.fromkeys(_STATES, _recurrent),
    **dict.fromkeys(_CELLS, _recurrent),
}


def flops(op: OpSpec, backward: bool = False) -> Size:
    """Return the FLOPs of the forward, or of the backward for inputs that need a gradient."""
    if backward and not op.gradients:
        return 0
    if op.key in SPECIAL:
        return SPECIAL[op.key](op, backward)
    if op.key not in PRODUCTS:
        return 0
    rule, factors = PRODUCTS[op.key]
    forward = rule(op)
    return forward * sum(op.needs(i) for i in factors) if backward else forward
