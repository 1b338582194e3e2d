"""Compute linear products in 8-bit floating point where the precision asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpart.compiler.float8_linear import KEY, MULTIPLE
from fxpart.compiler.graph_edit import value
from fxpart.compiler.node_annotation import Level
from fxpart.errors import error

_LINEAR = torch.ops.aten.linear.default
_FLOAT8 = torch.ops.fxpart.float8_linear.default


@dataclass(frozen=True)
class QuantizeLinearsPass:
    """Replace ``aten.linear`` in bfloat16 by ``fxpart.float8_linear``.

    Only in a graph that was captured in the precision fp8. The width of the input and of the output
    must be multiples of 16; other products stay in bfloat16. FXP109 if no product can be replaced.
    """

    name: ClassVar[str] = "quantize_linears"
    requires: ClassVar[Level] = Level.CAPTURED
    ensures: ClassVar[Level] = Level.CAPTURED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Replace the products."""
        if not graph_module.meta.get(KEY):
            return graph_module
        nodes = graph_module.graph.find_nodes(op="call_function", target=_LINEAR)
        chosen = [node for node in nodes if _is_possible(node)]
        if not chosen:
            sizes = ", ".join(sorted({str(tuple(value(node.args[1]).shape)) for node in nodes}))
            raise error(
                "FXP109", where="precision='fp8'",
                why=f"no linear product has sizes that are multiples of {MULTIPLE}; its weights "
                f"are {sizes or 'none'}",
                fix='use precision="bf16"',
            )  # fmt: skip
        for node in chosen:
            node.target = _FLOAT8
        return graph_module


def _is_possible(node: fx.Node) -> bool:
    """Return whether a product is in bfloat16, of a matrix whose sizes the hardware supports."""
    x, weight = (value(a) for a in node.args[:2])
    sizes = tuple(weight.shape)
    known = all(isinstance(size, int) and size % MULTIPLE == 0 for size in sizes)
    return len(sizes) == 2 and known and x.dtype == weight.dtype == torch.bfloat16
