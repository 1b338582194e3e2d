"""Rules that are found by running ops: those that are known, and one for an op without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fxpart.passes.rules import ShardingRule, rule_of
from fxpart.passes.rules.rule_discovery import ADDED, RuleProposal, discover, example
from rule_soundness import Example, node_of

ATEN = torch.ops.aten


def real(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64)


def known_factors(rule: ShardingRule) -> set[tuple[tuple[int | None, ...], tuple[int | None, ...]]]:
    """Per factor that may be cut without a form: its dim in each operand and result."""

    def dim(dims: tuple[tuple[str, ...], ...], factor: str) -> int | None:
        return next((i for i, each in enumerate(dims) if each == (factor,)), None)

    found = set()
    for factor in rule.factors:
        if factor not in rule.whole and factor not in rule.forms:
            results = tuple(dim(d, factor) for d in rule.results)
            summed = None in results
            operands = tuple(
                ADDED if summed and i in rule.additive else dim(d, factor)
                for i, d in enumerate(rule.operands)
            )
            found.add((operands, results))
    return found


def found_factors(
    proposal: RuleProposal,
) -> set[tuple[tuple[int | None, ...], tuple[int | None, ...]]]:
    return {(f.operands, f.results) for f in proposal.factors}


KNOWN: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mm": (ATEN.mm.default, (real(4, 6), real(6, 8))),
    "addmm": (ATEN.addmm.default, (real(8), real(4, 6), real(6, 8))),
    "linear": (ATEN.linear.default, (real(4, 10, 6), real(8, 6), real(8))),
    "bmm": (ATEN.bmm.default, (real(4, 6, 8), real(4, 8, 10))),
    "softmax": (ATEN.softmax.int, (real(4, 6), -1)),
    "layer_norm": (ATEN.layer_norm.default, (real(4, 6, 8), [8], real(8), real(8))),
    "sum": (ATEN.sum.dim_IntList, (real(4, 6), [1])),
    "amax": (ATEN.amax.default, (real(4, 6), [1])),
    "topk": (ATEN.topk.default, (real(4, 6), 2)),
    "gather": (ATEN.gather.default, (real(4, 6), 1, torch.arange(32).view(4, 8) % 6)),
    "mul": (ATEN.mul.Tensor, (real(4, 6), real(6))),
    "where": (ATEN.where.self, (torch.arange(4) > 1, real(6, 4), real(6, 4))),
    "transpose": (ATEN.transpose.int, (real(4, 6, 8), 0, 2)),
    "stack": (ATEN.stack.default, ([real(4, 6), real(4, 6)], 1)),
    "conv1d": (ATEN.conv1d.default, (real(4, 6, 9), real(8, 6, 3), real(8))),
    "attention": (
        ATEN.scaled_dot_product_attention.default,
        (real(4, 6, 8, 5), real(4, 6, 9, 5), real(4, 6, 9, 10)),
    ),
    "roll": (ATEN.roll.default, (real(4, 6), [1], [0])),
}


@pytest.mark.parametrize("name", KNOWN)
def test_finds_the_known_rule(name: str) -> None:
    op, args = KNOWN[name]
    rule = rule_of(node_of(Example(op, args)))
    assert rule is not None
    proposal = discover(op, args)
    assert found_factors(proposal) == known_factors(rule)
    assert set(rule.linear) <= set(proposal.linear)


def test_rows_of_a_table_need_a_form_and_are_not_proposed() -> None:
    indices = torch.arange(8).view(4, 2) + 1
    proposal = discover(ATEN.embedding.default, (real(10, 6), indices))
    assert proposal.notation == "_o00 a, b c -> b c a"
    assert proposal.linear == (frozenset({0}),)


def test_a_scaled_sum_is_not_taken_for_a_sum() -> None:
    """The traps: a mean is no sum, a number is added on each mesh rank, a square is not linear."""
    assert discover(ATEN.mean.dim, (real(4, 6), [1])).notation == "a _o01 -> a"
    assert discover(ATEN.add.Scalar, (real(4, 6), 2.0)).linear == ()
    assert discover(ATEN.square.default, (real(4, 6),)).linear == ()


def test_an_op_without_a_rule() -> None:
    """A system of equations: batches, and the columns of the right side."""
    op = ATEN.linalg_solve.default
    assert rule_of(node_of(Example(op, (real(4, 6, 6), real(4, 6, 8))))) is None
    proposal = discover(op, (real(4, 6, 6), real(4, 6, 8)))
    assert proposal.notation == "a _o01 _o02, a _o11 b -> a _r01 b"
    assert proposal.linear == (frozenset({1}),)
    assert proposal.entry.startswith('"aten.linalg_solve": notation("a ')
    assert proposal.entry.endswith(' linear=["B"]),')


@pytest.mark.slow
def test_arguments_are_found() -> None:
    found = example(ATEN.bmm.default)
    assert found is not None
    shapes = {name: tuple(t.shape) for name, t in found[1].items()}
    (b, _, k), (same, rows, _) = shapes["self"], shapes["mat2"]
    assert b == same and k == rows
    assert len({size for shape in shapes.values() for size in shape}) == 4
    assert example(ATEN.chain_matmul.default) is None
