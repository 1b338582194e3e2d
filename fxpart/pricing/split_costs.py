"""What a backward costs more where it is split, as zero-bubble schedules do.

The runtime (:mod:`fxpart.runtime.executor.split_backward`) defers the weight gradients of products
of an activation and a parameter. For each of them the host finds its node in the autograd graph,
keeps the gradient that arrives there, and starts autograd once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpart.costmodels.op_classes import op_class
from fxpart.pricing.specs import Specs, annotation

if TYPE_CHECKING:
    from torch import fx

    from fxpart.cluster.devices import Device

# Host seconds for each deferred product, measured by tests/benchmarks/split_backward.py.
SECONDS = 1.5e-4
_PRODUCTS = ("matmul", "convolution")


def count_deferred_products(graph: fx.Graph, specs: Specs, blocks: int) -> list[int]:
    """Return by block the number of products that read a trained parameter."""
    found = [0] * blocks
    for node in graph.nodes:
        block = annotation(node).block if node.op == "call_function" else None
        op = None if block is None else specs.op(node)
        if op is None or block is None or op_class(op) not in _PRODUCTS:
            continue
        # a parameter, or a view or part of one
        sources = [(one, *one.all_input_nodes[:1]) for one in node.all_input_nodes]
        found[block] += any(
            one.op == "get_attr" and specs.requires_grad(one) for each in sources for one in each
        )
    return found


def compute_split_seconds(
    products: Sequence[int], backward: Sequence[float], device: Device
) -> tuple[float, ...]:
    """Return by block the seconds that a split backward takes longer than a whole one.

    products: by block. backward: seconds of each block's own. The host of an accelerator works
    ahead while kernels run, so only what exceeds their time counts.
    """
    hidden = backward if device.kind != "cpu" else [0.0] * len(products)
    pairs = zip(products, hidden, strict=True)
    return tuple(max(0.0, SECONDS * count - seconds) for count, seconds in pairs)
