"""Backward memory of CPU kernels that fake tensors do not show.

Fake kernels return shapes only. A few CPU kernels allocate more than the shape, or save a tensor
whose size only the library knows. This module computes these bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch

from fxpart.compiler.tensor_sizes import expression, nbytes

Size: TypeAlias = int | sympy.Expr
_SMALL = 2**22  # elements of a layer's input or states up to which the workspace is measured
_STEPS = 8


class LstmWorkspace(sympy.Function):  # type: ignore[misc]
    """Bytes that oneDNN's LSTM layer saves for its backward, from (steps, rows, inputs, states).

    Evaluated only if all four are numbers: the layer then runs once on zeros and its result is
    measured.
    """

    nargs = 4
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, *sizes: sympy.Expr) -> sympy.Expr | None:
        """Return a number if all sizes are numbers; otherwise None, which keeps the expression."""
        if not all(size.is_Integer for size in sizes):
            return None
        return sympy.Integer(lstm_workspace(*map(int, sizes)))


@lru_cache(maxsize=4096)
def lstm_workspace(steps: int, rows: int, inputs: int, states: int) -> int:
    """Return the workspace bytes on this machine; they depend on the instruction set.

    Long sequences are extrapolated from short ones: all parts except padding are linear in the
    steps.
    """
    if steps > 2 * _STEPS and steps * rows * max(inputs, states) > _SMALL:
        short, longer = (lstm_workspace(n * _STEPS, rows, inputs, states) for n in (1, 2))
        return short + -(-(longer - short) * (steps - _STEPS) // _STEPS)
    if min(steps, rows, inputs, states) < 1:
        return 0
    x, h = torch.zeros(steps, rows, inputs, requires_grad=True), torch.zeros(rows, states)
    weights = [torch.zeros(4 * states, n) for n in (inputs, states)]
    biases = [torch.zeros(4 * states) for _ in range(2)]
    with torch.enable_grad():  # without gradients there is no workspace
        *_, workspace = torch.ops.aten.mkldnn_rnn_layer(
            x, *weights, *biases, h, h, False, [], 2, states, 1, True, False, False, True
        )
    return int(nbytes(workspace))


def result_bytes(name: str, index: int, tensor: torch.Tensor) -> Size:
    """Return the storage bytes of an op's result ``index``. name: such as "aten.embedding_bag"."""
    size = expression(nbytes(tensor))
    if name == "aten.embedding_bag" and index == 1 and tensor.device.type == "cpu" and size != 0:
        return size + tensor.element_size()  # the kernel allocates one more element
    return size


def lstm_saved(
    args: tuple[Any, ...], kept: dict[str, Any]
) -> tuple[tuple[str, int, Size], ...] | None:
    """Return what oneDNN's LSTM saves: ("operand" | "result" | "private", index, bytes).

    args, kept: positional and keyword arguments of ``aten.lstm.input``. Operands are numbered as
    the tensors of ``args``. Return None if torch does not use oneDNN for this call. Each layer and
    direction saves the states before and after, the sequence before and after, and a workspace; see
    ``mkldnn_rnn_layer`` in torch's derivatives.yaml.
    """
    x, (h, c), weights, biased, layers, dropout, train, both, batch_first = args
    ways = 2 if both else 1
    if kept or not _onednn(x) or len(weights) != (4 if biased else 2) * layers * ways:
        return None  # projections add weights
    if not any(t.requires_grad for t in (x, h, c, *weights)):
        return ()
    steps, rows = x.shape[:2][::-1] if batch_first else x.shape[:2]
    states, one = h.shape[-1], x.element_size()
    state, sequence = rows * states * one, steps * rows * states * one
    saved: list[tuple[str, int, Any]] = [("operand", 1, 0), ("operand", 2, 0)]

    def private(size: Any) -> None:
        saved.append(("private", len(saved), size))

    if batch_first:
        private(nbytes(x))  # transposed copy
    else:
        saved.append(("operand", 0, 0))
    for layer in range(layers):
        inputs = states * ways if layer else x.shape[-1]
        if layer and both:
            private(sequence * ways)  # concatenation of both directions
        if layer and dropout and train:
            private(sequence * ways)  # dropout mask and result
            private(sequence * ways)
        for _ in range(ways):
            if layer == layers - 1 and not both:
                saved.append(("result", 0, 0))
            else:
                private(sequence)
            private(state)
            private(state)
            if not biased:  # zeros, as large as the weights
                private(4 * states * inputs * one)
                private(4 * states * states * one)
            lengths = (sympy.sympify(expression(n)) for n in (steps, rows, inputs, states))
            private(LstmWorkspace(*lengths))
    return tuple((kind, index, expression(size)) for kind, index, size in saved)


def _onednn(x: torch.Tensor) -> bool:
    """Return whether torch runs this input through oneDNN."""
    used = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return bool(used) and x.device.type == "cpu" and x.dtype == torch.float32
