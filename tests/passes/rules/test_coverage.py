"""How much of the zoo has rules, and which ops have none on purpose."""

from __future__ import annotations

import operator

import pytest
import torch
from fxpart.passes.rules import operands, rule_of
from torch import fx
from zoo import ZOO
from zoo_graphs import prepared

from fxpart.compiler.effects import op_of, packet_name
from fxpart.compiler.tensor_sizes import tensors
from fxpart.pricing.rule_coverage import Coverage, OpCoverage, coverage

# Their results depend on all values at once, or hold no tensor that a rule could speak of.
WITHOUT: set[str] = set()
NAMES = [name for name, entry in ZOO.items() if entry.available]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_op_of_the_zoo_has_a_rule(name: str) -> None:
    missing = set()
    for node in prepared(name).graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if not tensors(node.meta.get("val")):
            continue
        rule = rule_of(node)
        if rule is None:
            missing.add(packet_name(op_of(node)))
            continue
        assert len(rule.operands) == len(operands(node))
        assert len(rule.results) == len(tensors(node.meta["val"]))
    assert missing <= WITHOUT


@pytest.mark.slow
def test_flops_of_the_zoo_can_be_cut() -> None:
    found = coverage(prepared(name).graph for name in NAMES)
    assert found.flops > 0
    assert found.flops_cut >= 0.99 * found.flops
    assert found.ruled >= 0.99 * found.calls


def test_coverage_counts() -> None:
    """By hand: a product of 4x6 and 6x8 that can be cut, an arange, and an op without a rule."""
    graph = fx.Graph()
    shapes = {"x": (4, 6), "w": (6, 8)}
    x, w = (graph.placeholder(n) for n in shapes)
    for node, shape in ((x, (4, 6)), (w, (6, 8))):
        node.meta["val"] = torch.rand(shape)
    calls = [
        (torch.ops.aten.mm.default, (x, w)),
        (torch.ops.aten.mm.default, (x, w)),
        (torch.ops.aten.arange.default, (4,)),
        (torch.ops.aten.nonzero.default, (x,)),
    ]
    for op, args in calls:
        node = graph.call_function(op, args)
        real = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        node.meta["val"] = op(*real)
    work = 2 * 2 * 4 * 6 * 8
    assert coverage([graph]) == Coverage(
        (
            OpCoverage("aten.mm.default", 2, 2, 0, work, work),
            OpCoverage("aten.arange.default", 1, 0, 1, 0, 0),
            OpCoverage("aten.nonzero.default", 1, 0, 0, 0, 0),
        )
    )
