"""Sizes: the nodes and the text that stand for an expression compute what sympy computes."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fxpart.codegen.size_builder import SizeBuilder, solvable
from fxpart.codegen.size_expressions import UnsupportedExpressionError, dim_text, fold
from fxpart.errors import FxpartError
from fxpart.program.spec import dim_value, number_value

S0, S1 = sympy.symbols("s0 s1", integer=True, positive=True)


class FloorDiv(sympy.Function):
    """Stands for torch's own, which is private; told apart by its name as that is."""


class PythonMod(sympy.Function):
    pass


class Max(sympy.Function):
    pass


VALUES: dict[Any, Any] = {
    FloorDiv: lambda a, b: a // b,
    PythonMod: lambda a, b: a % b,
    Max: max,
}

leaves = st.one_of(st.sampled_from([S0, S1]), st.integers(-4, 9).map(sympy.Integer))
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: a * b, inner, inner),
        st.builds(lambda a, b: FloorDiv(a, b), inner, st.integers(1, 5)),
        st.builds(lambda a, b: PythonMod(a, b), inner, st.integers(1, 5)),
        st.builds(lambda a, b: Max(a, b), inner, inner),
    ),
    max_leaves=6,
)


def truth(expr: sympy.Expr, values: dict[Any, int]) -> int:
    """Evaluate by substitution, with the functions' meaning."""
    if expr.args and type(expr) in VALUES:
        return int(VALUES[type(expr)](*(truth(a, values) for a in expr.args)))
    if expr.args:
        return int(expr.func(*(truth(a, values) for a in expr.args)))
    return int(values.get(expr, expr))


class Size:
    """Looks like a symbolic integer."""

    def __init__(self, expr: sympy.Expr) -> None:
        self.node = self
        self.expr = expr


@pytest.mark.slow
@given(expressions, st.integers(2, 9), st.integers(2, 9))
def test_text_and_nodes_compute_the_expression(expr: sympy.Expr, a: int, b: int) -> None:
    expected = truth(expr, {S0: a, S1: b})
    assert dim_value(dim_text(Size(expr)), {"s0": a, "s1": b}) == expected
    graph = fx.Graph()
    x = graph.placeholder("x")
    sizes = SizeBuilder(graph, {S0: (x, 0, S0), S1: (x, 1, 2 * S1 + 1)})
    graph.output(sizes.integer(expr))
    module = fx.GraphModule(torch.nn.Module(), graph)
    assert module(torch.empty(a, 2 * b + 1)) == expected


def test_a_product_that_divides_is_divided_by_as_a_whole() -> None:
    from torch.utils._sympy.functions import FloorDiv

    expr = FloorDiv(2 * S0 * S1 + S1 - 1, 2 * S1)
    assert dim_value(dim_text(Size(expr)), {"s0": 5, "s1": 4}) == 5


def test_quotients_of_sums_stay_whole() -> None:
    half = (S0 + 1) / 2 + S1 / 2
    text = dim_text(Size(half))
    assert dim_value(text, {"s0": 3, "s1": 4}) == 4


def test_each_size_is_computed_once() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    sizes = SizeBuilder(graph, {S0: (x, 0, S0)})
    assert sizes.integer(S0 * 3 + 1) is sizes.integer(S0 * 3 + 1)
    sizes.integer(S0 * 3)
    assert sum(1 for n in graph.nodes if n.op == "call_function") == 3  # size, product, sum


def test_what_is_no_integer_is_refused() -> None:
    with pytest.raises(UnsupportedExpressionError):
        fold(sympy.sqrt(S0), str, lambda f, a, b: "")


@pytest.mark.parametrize(
    ("expr", "expected"),
    [(S0, S0), (2 * S0 + 3, S0), (S0 * S1, None), (S0**2, None), (-S0, None), (S0 / 2, None)],
)
def test_which_dims_give_a_symbol(expr: sympy.Expr, expected: sympy.Symbol | None) -> None:
    assert solvable(expr) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("s0", 3),
        ("2*s0 + 1", 7),
        ("(s0 // 2)*s1", 4),
        ("max(s0, s1, 9)", 9),
        ("min(s0, s1)", 3),
        ("-s0 + 5", 2),
        ("s0**2", 9),
        (6, 6),
    ],
)
def test_dim_values(text: str | int, value: int) -> None:
    assert dim_value(text, {"s0": 3, "s1": 4}) == value


@pytest.mark.parametrize(
    "text",
    [
        "s9",
        "__import__('os')",
        "s0.real",
        "s0 / 2",
        "9**9**9",
        "s0 // 0",
        "",
        "f(s0)",
        "1.5",
        "(",
    ],
)
def test_only_sizes_are_evaluated(text: str) -> None:
    with pytest.raises(FxpartError) as caught:
        dim_value(text, {"s0": 3})
    assert caught.value.code == "FXP109"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("FloatPow(ToFloat(s0), 0.5)", 3.0),
        ("IntTrueDiv(6, s0)", 6 / 9),
        ("FloorDiv(s0, 2) + 0.5", 4.5),
        ("OpaqueUnaryFn_log(ToFloat(s0))", 2.1972245773362196),
        ("Max(1, -s0 + 12)", 3),
        ("1/s0", 1 / 9),
    ],
)
def test_numbers_of_sizes(text: str, value: float) -> None:
    """As torch writes them; a dim is none of them."""
    assert number_value(text, {"s0": 9}) == value
    if isinstance(value, float):
        with pytest.raises(FxpartError, match="is not a size"):
            dim_value(text, {"s0": 9})
    for wrong in ("s0/0", "open(s0)", "s1", "Max()", "ToFloat(s0, 2)"):
        with pytest.raises(FxpartError, match="FXP109"):
            number_value(wrong, {"s0": 9})
