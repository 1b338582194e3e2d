"""Bytes that an op reads and writes: each tensor once, all in main memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .partial_draws import count_dropped, is_part
from .tensor_sizes import elements, is_floating, item_bytes, product, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fxpart.costs import OpSpec, Size, TensorSpec

# Ops whose result is a view of their input: nothing is copied. Their backward is a view as well,
# except for those that select a piece (the gradient is padded with zeros) or repeat (it is summed).
_PURE_VIEWS = frozenset(
    """alias view view_as _unsafe_view reshape reshape_as flatten unflatten transpose t permute
    squeeze unsqueeze movedim moveaxis swapaxes swapdims numpy_T mT mH adjoint detach real imag
    view_as_real view_as_complex lift lift_fresh _reshape_alias resolve_conj resolve_neg _conj
    """.split()
)
_PIECES = frozenset(
    """slice select split split_with_sizes chunk unbind narrow diagonal tensor_split as_strided
    unfold hsplit vsplit dsplit unsafe_split unsafe_chunk unsafe_split_with_sizes""".split()
)
_REPEATS = frozenset("expand expand_as broadcast_to".split())
VIEWS = _PURE_VIEWS | _PIECES | _REPEATS

# Ops that copy only if the result has another memory layout or dtype; the op's attribute
# "copies" has this where it is known.
_MAYBE_COPIES = frozenset(
    "contiguous reshape reshape_as flatten to type_as _to_copy float half bfloat16".split()
)
_NOTHING = frozenset(
    """empty empty_like new_empty empty_strided new_empty_strided sym_size sym_numel sym_stride
    sym_storage_offset size _assert_tensor_metadata _assert_async _assert_scalar
    sym_constrain_range sym_constrain_range_for_size scalar_tensor _local_scalar_dense item
    """.split()
)
FILLS = frozenset(
    """arange zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full linspace
    eye rand randn randint rand_like randn_like randint_like randperm tril_indices triu_indices
    fill zero bernoulli""".split()
)
_GATHERS = frozenset(
    """embedding index gather index_select take take_along_dim embedding_bag _embedding_bag
    masked_select""".split()
)
_SCATTERS = frozenset(
    """scatter scatter_add scatter_reduce index_put index_add index_copy index_fill _index_put_impl
    masked_scatter slice_scatter select_scatter diagonal_scatter index_reduce put""".split()
)
_ADDITIONS = frozenset("add sub rsub _to_copy to clone contiguous".split())
_SUMS = frozenset("sum mean".split())
_LOSSES = frozenset("cross_entropy_loss nll_loss nll_loss_nd log_softmax".split())


def traffic(op: OpSpec, backward: bool = False) -> Size:
    """Return the bytes of the op's forward, or of its backward (0 without gradients)."""
    if backward:
        return _backward(op) if op.gradients else 0
    return _forward(op)


def is_free(op: OpSpec) -> bool:
    """Return whether the forward starts no work at all: a view, or a size."""
    if op.key in _MAYBE_COPIES and op.attribute("copies") is not None:
        return op.attribute("copies") is False
    return op.key in VIEWS or op.key in _NOTHING


def is_known(op: OpSpec) -> bool:
    """Return whether the op is one of torch's own, for which these rules are meant."""
    return op.name.startswith("aten.")


def _forward(op: OpSpec) -> Size:
    if is_free(op):
        return 0
    written = _total(op.outputs)
    if is_part(op):  # numbers generated for other ranks: written, and read to be sliced
        written = written + 2 * count_dropped(op) * item_bytes(op.outputs[0].dtype)
    if op.key in FILLS:
        return written
    if op.key in _GATHERS:
        rows = _total(t for t in op.inputs if not is_floating(t.dtype))
        if "embedding_bag" in op.key and len(op.inputs) > 1:
            # one row of the table for each index, whatever the bags are
            table, indices = op.inputs[0], op.inputs[1]
            width = product(table.shape[1:]) * item_bytes(table.dtype)
            return elements(indices) * width + written + rows
        return 2 * written + rows
    if op.key in _SCATTERS:
        return _scatter(op)
    if op.key in _LOSSES:
        # log-probabilities are written and read again
        return 3 * tensor_bytes(op.inputs[0]) + written
    return _total(op.inputs) + written


def _backward(op: OpSpec) -> Size:
    gradients = [t for i, t in enumerate(op.inputs) if op.needs(i)]
    written = _total(gradients)
    incoming = _total(t for t in op.outputs if is_floating(t.dtype))
    if op.key in _REPEATS or op.key in _PIECES or op.key in _SUMS:
        return written + incoming
    if is_free(op):
        return 0
    if op.key in _ADDITIONS:
        # a gradient of the result's shape and dtype is passed on unchanged
        out = op.outputs[0]
        changed = [t for t in gradients if (t.shape, t.dtype) != (out.shape, out.dtype)]
        return _total(changed) + incoming if changed else 0
    if op.key in _GATHERS:
        rows = _total(t for t in op.inputs if not is_floating(t.dtype))
        return written + 2 * incoming + rows
    if op.key in _SCATTERS:
        return written + incoming
    saved = _total(t for t in op.inputs if is_floating(t.dtype))
    return incoming + saved + written


def _scatter(op: OpSpec) -> Size:
    """Return the bytes: the base is copied unless in place; the source is read and written."""
    base, *others = op.inputs
    in_place = op.name.removeprefix("aten.").split(".")[0].endswith("_")
    moved = 2 * _total(t for t in others if is_floating(t.dtype) == is_floating(base.dtype))
    indices = _total(t for t in others if is_floating(t.dtype) != is_floating(base.dtype))
    return moved + indices + (0 if in_place else 2 * tensor_bytes(base))


def _total(tensors: Iterable[TensorSpec]) -> Size:
    total: Size = 0
    for tensor in tensors:
        total = total + tensor_bytes(tensor)
    return total
