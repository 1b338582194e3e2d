"""What a backward costs more where it is split, as zero-bubble schedules do.

The runtime (:mod:`fxpart.runtime.executor.split_backward`) defers the weight gradients of products
of an activation and a parameter. For each of them the host finds its node in the autograd graph,
keeps the gradient that arrives there, and starts autograd once more. Between the halves, the
product's operand and that gradient are kept; what all other ops saved is freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpart.costmodels.op_classes import op_class
from fxpart.costmodels.tensor_sizes import tensor_bytes
from fxpart.pricing.specs import Specs, annotation
from fxpart.solver.problem import SplitBackward

if TYPE_CHECKING:
    from torch import fx

    from fxpart.cluster.devices import Device
    from fxpart.pricing.variants import Sizes

# Host seconds for each deferred product: what tests/benchmarks/split_backward.py measures, rounded.
SECONDS = 2e-4
_PRODUCTS = ("matmul", "convolution")


class SplitCosts:
    """The deferred products of a graph, priced at each microbatch size."""

    def __init__(self, graph: fx.Graph, specs: Specs, blocks: int) -> None:
        """graph: with blocks. blocks: their number."""
        self._specs = specs
        self._products: list[list[fx.Node]] = [[] for _ in range(blocks)]
        for node in graph.nodes:
            block = annotation(node).block if node.op == "call_function" else None
            if block is not None and self._is_deferred(node):
                self._products[block].append(node)

    def price(self, sizes: Sizes, rows: Sequence[tuple[Device, Sequence[float]]]) -> SplitBackward:
        """Return the costs. rows: each kind of device, with the seconds of each block's backward.

        The host of an accelerator works ahead while kernels run: only what exceeds them counts.
        """
        host = [SECONDS * len(nodes) for nodes in self._products]
        return SplitBackward(
            seconds=tuple(
                tuple(
                    max(0.0, more - (back if device.kind != "cpu" else 0.0))
                    for more, back in zip(host, backward, strict=True)
                )
                for device, backward in rows
            ),
            kept=tuple(
                sum(self._count_kept(node, sizes) for node in nodes) for nodes in self._products
            ),
        )

    def _is_deferred(self, node: fx.Node) -> bool:
        """Return whether the op is a product that reads a trained parameter, or a part of one."""
        op = self._specs.op(node)
        if op is None or op_class(op) not in _PRODUCTS:
            return False
        read = [one for arg in node.all_input_nodes for one in (arg, *arg.all_input_nodes[:1])]
        return any(one.op == "get_attr" and self._specs.requires_grad(one) for one in read)

    def _count_kept(self, node: fx.Node, sizes: Sizes) -> int:
        """Return the bytes of the product's activation and of its result's gradient."""
        return sum(
            sizes.number(tensor_bytes(tensor))
            for one in (node, *node.all_input_nodes)
            if one.op != "get_attr"
            for tensor in self._specs.tensors(one)
        )
