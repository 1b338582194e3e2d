"""Operators of a transformer block and of a language model's ends, on the shards of one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fxpart.costmodels.mixtures import list_parts
from published_models import GATED, ROPE

from fxpart.costs import OpSpec, TensorSpec

GROUPED = "fxpart.grouped_product"  # name of the products of all experts of a rank


@dataclass(frozen=True)
class BlockShape:
    """Sizes of one rank's part of a block, for one microbatch.

    rows: tokens. hidden: of the model. ffn, heads, kv_heads: of the rank. linear: dtype of the
    matrix products, which is float8 where only they are quantized. shard: ranks that divide the
    rows outside of attention and MLP (sequence parallelism). plain: scale, mask and transposed
    heads are kernels of their own. value: elements of a head of the values, if not ``head``.
    ranks: of latent attention's queries and keys.

    experts: on the rank; of all ``whole`` experts a token uses ``chosen``, each of ``width``, and
    ``capacity`` times an even share of rows is computed. ffn is then the width of shared experts.
    """

    samples: int
    queries: int
    keys: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head: int
    dtype: str
    linear: str
    kind: str
    fused_attention: bool
    fused: bool
    dropout: bool
    causal: bool
    shard: int
    generation: int = 2
    wide: bool = False
    delayed_scaling: bool = False
    plain: bool = False
    value: int = 0
    ranks: tuple[int, int] = (0, 0)
    experts: int = 0
    whole: int = 0
    chosen: int = 0
    width: int = 0
    capacity: float = 1.0

    @property
    def values(self) -> int:
        """Return the elements of a head of the values."""
        return self.value or self.head

    @property
    def rows(self) -> int:
        """Return the tokens of the microbatch on this rank."""
        return self.samples * self.queries


def op(
    name: str, inputs: list[TensorSpec], output: TensorSpec, gradients: int = 1, **given: Any
) -> OpSpec:
    """Return an op whose first inputs need a gradient."""
    return OpSpec(f"aten.{name}", tuple(inputs), (output,), tuple(given.items()), gradients)


def linear(rows: int, width: int, out: int, dtype: str) -> OpSpec:
    """Return a linear layer without bias."""
    weight = TensorSpec((out, width), dtype)
    x, y = TensorSpec((rows, width), dtype), TensorSpec((rows, out), dtype)
    return op("linear.default", [x, weight], y, 2)


def elementwise(rows: int, width: int, dtype: str, inputs: int, name: str = "mul.Tensor") -> OpSpec:
    """Return an elementwise op of equal tensors."""
    x = TensorSpec((rows, width), dtype)
    return op(name, [x] * inputs, x, inputs)


def norm(rows: int, width: int, dtype: str) -> OpSpec:
    """Return a normalization of rows."""
    x = TensorSpec((rows, width), dtype)
    return op("layer_norm.default", [x], x)


def attention(s: BlockShape) -> list[OpSpec]:
    """Return fused attention, or its products with scale, mask, softmax and dropout between."""
    q = TensorSpec((s.samples, s.heads, s.queries, s.head), s.dtype)
    k = TensorSpec((s.samples, s.kv_heads, s.keys, s.head), s.dtype)
    v = TensorSpec((s.samples, s.kv_heads, s.keys, s.values), s.dtype)
    if s.fused_attention:
        name = "scaled_dot_product_attention.default"
        out = TensorSpec((*q.shape[:3], s.values), s.dtype)
        return [op(name, [q, k, v], out, 3, is_causal=s.causal, generation=s.generation)]
    batch = s.samples * s.heads
    flat = TensorSpec((batch, s.queries, s.head), s.dtype)
    turned = TensorSpec((batch, s.head, s.keys), s.dtype)
    scores = TensorSpec((batch, s.queries, s.keys), s.dtype)
    high = TensorSpec(scores.shape, "float32" if s.wide else s.dtype)
    values = TensorSpec((batch, s.keys, s.values), s.dtype)
    result = TensorSpec((batch, s.queries, s.values), s.dtype)
    found = [op("bmm.default", [flat, turned], scores, 2)]
    if s.plain:
        heads = TensorSpec((s.rows, s.heads * s.head), s.dtype)
        found += [op("mul.Tensor", [scores], scores), op("add.Tensor", [scores], scores)]
        found += [op("abs.default", [heads], heads)] * 4  # queries, keys, values, result
    if s.wide:  # autocast computes the softmax in float32 and converts its operand and result
        found += [op("abs.default", [scores], high), op("abs.default", [high], scores)]
    found += [op("_softmax.default", [high], high)]
    if s.dropout:
        found += [op("native_dropout.default", [scores], scores)]
    return [*found, op("bmm.default", [scores, values], result, 2)]


def projections(s: BlockShape) -> list[OpSpec]:
    """Return the linear layers of attention; latent attention has two for queries and for keys."""
    inner = s.heads * s.values
    if not s.ranks[1]:
        qkv = s.heads * s.head + s.kv_heads * (s.head + s.values)
        found = [linear(s.rows, s.hidden, qkv, s.linear)]
    else:
        first, second = s.ranks
        queries = s.heads * s.head
        found = [linear(s.rows, s.hidden, first + second + ROPE, s.linear)]
        found += [linear(s.rows, first or s.hidden, queries, s.linear)]
        found += [linear(s.rows, second, s.heads * (s.head - ROPE + s.values), s.linear)]
    return [*found, linear(s.rows, inner, s.hidden, s.linear)]


def products(s: BlockShape) -> list[OpSpec]:
    """Return the linear layers of a block; without those of its experts."""
    found = projections(s)
    if not s.ffn:
        return found
    gates = 2 if s.kind in GATED else 1
    found.append(linear(s.rows, s.ffn, s.hidden, s.linear))
    if s.fused:
        return [*found, linear(s.rows, s.hidden, gates * s.ffn, s.linear)]
    return found + [linear(s.rows, s.hidden, s.ffn, s.linear)] * gates


def experts(s: BlockShape) -> list[OpSpec]:
    """Return the router's ops and those of fxpart's mixture of experts; [] without experts.

    As many rows come from other ranks as are sent to them. In 8 bits only products are.
    """
    if not s.experts:
        return []
    rows = max(1, round(s.rows * s.capacity))
    gates = 2 if s.kind in GATED else 1
    hidden, index = (TensorSpec((rows, n), s.dtype) for n in (s.hidden, s.chosen))
    up = TensorSpec((s.experts, gates * s.width, s.hidden), s.dtype)
    down = TensorSpec((s.experts, s.hidden, s.width), s.dtype)
    scores = TensorSpec((s.rows, s.whole), "float32")
    picked = TensorSpec((s.rows, s.chosen), "float32")
    mixture = OpSpec("fxpart.experts.default", (hidden, index, index, up, down), (hidden,), (), 5)
    return [
        linear(s.rows, s.hidden, s.whole, s.dtype),
        op("_softmax.default", [scores], scores),
        op("topk.default", [scores], picked),
        *(_in_precision(part, s.linear) for part in list_parts(mixture)),
    ]


def _in_precision(part: OpSpec, dtype: str) -> OpSpec:
    """Return a product with operands of this dtype, any other op as it is."""
    if not part.name.startswith(GROUPED):
        return part
    return replace(part, inputs=tuple(replace(t, dtype=dtype) for t in part.inputs))


def quantizations(s: BlockShape) -> list[OpSpec]:
    """Return the conversions of the operands of float8 products; none in 16 bit.

    Each operand is read for its maximum, read again and written in two layouts. With delayed
    scaling the maximum is known, and weights stay converted.
    """
    if not s.linear.startswith("float8"):
        return []
    found = []
    grouped = [part for part in experts(s) if part.name.startswith(GROUPED)]
    for product in products(s) + grouped:
        x, weight = (TensorSpec(t.shape, s.dtype) for t in product.inputs[:2])
        y, other = (TensorSpec(t.shape, s.linear) for t in product.inputs[:2])
        if s.delayed_scaling:
            found.append(op("abs.default", [x], y))
        else:
            found.append(op("abs.default", [x, x, y], y))
            found.append(op("abs.default", [weight, weight, other], other))
    return found


def accumulations(s: BlockShape) -> list[OpSpec]:
    """Return what autograd adds to a block's backward: sums of the gradients of its two branches.

    In eager execution also the concatenated gradients of queries, keys and values.
    """
    rows = -(-s.rows // s.shard)
    found = [elementwise(rows, s.hidden, "float32" if s.wide else s.dtype, 2)] * 2
    if not s.fused:
        found += [elementwise(s.rows, (s.heads + 2 * s.kv_heads) * s.head, s.dtype, 1)]
    return found


def elements(s: BlockShape) -> list[OpSpec]:
    """Return the norms, activations, residual additions and, in eager execution, their parts."""
    rows = -(-s.rows // s.shard)
    dtype = "float32" if s.wide else s.dtype
    found = [norm(rows, s.hidden, dtype)] * 2
    if s.wide:  # results of products in 16 bit are converted, and inputs of products back
        narrow, high = (TensorSpec((rows, s.hidden), name) for name in (s.dtype, dtype))
        found += [op("abs.default", [narrow], high), op("abs.default", [high], narrow)] * 2
    heads = (s.heads + s.kv_heads) * s.head
    if s.kind in GATED:
        if s.ffn:
            found += [elementwise(s.rows, s.ffn, s.dtype, 2)] * (1 if s.fused else 2)
        found += [elementwise(s.rows, heads, s.dtype, 1)] * (1 if s.fused else 4)
    elif s.ffn:
        found += [elementwise(s.rows, s.ffn, s.dtype, 1, "gelu.default")]
    found += [elementwise(rows, s.hidden, dtype, 2)] * 2
    if s.dropout:
        found += [elementwise(rows, s.hidden, dtype, 1, "native_dropout.default")] * 2
    return found


def head(rows: int, hidden: int, vocabulary: int, dtype: str, fused: bool) -> list[OpSpec]:
    """Return the last norm, the product with the vocabulary, and the loss in float32."""
    logits = TensorSpec((rows, vocabulary), dtype)
    wide = TensorSpec((rows, vocabulary), "float32")
    loss = op("cross_entropy_loss.default", [wide], TensorSpec((), "float32"))
    found = [norm(rows, hidden, dtype), linear(rows, hidden, vocabulary, dtype), loss]
    return found if fused else [*found, op("_to_copy.default", [logits], wide)]
