"""Every kind of fx argument is written so that it reads back as itself, or is refused."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fxpart import rng
from fxpart.codegen.literals import NameScope, call, literal
from fxpart.errors import FxpartError

numbers = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.just(...),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.complex64]),
    st.sampled_from([torch.strided, torch.sparse_coo]),
    st.sampled_from([torch.contiguous_format, torch.channels_last, torch.preserve_format]),
    st.builds(slice, st.integers(), st.none(), st.integers()),
)
arguments = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=8,
)


def back(text: str) -> Any:
    """What the text stands for, in a module that imports what the names ask for."""
    return eval(text, {"torch": torch, "math": math})  # noqa: S307


@pytest.mark.slow
@given(arguments)
def test_values_read_back(value: Any) -> None:
    read = back(literal(value, NameScope(), "here"))
    assert repr(read) == repr(value)  # equal, and equal in type, NaN and minus zero included


def test_devices_follow_the_stage() -> None:
    for device in ("cpu", "cuda:3", "meta"):
        assert literal(torch.device(device), NameScope(), "here") == "self.device"


class Odd:
    def __repr__(self) -> str:
        return "__import__('os')"


@pytest.mark.parametrize(
    "value", [Odd(), torch.zeros(2), {"a": {1}}, [Odd()], len, object, torch.Generator()]
)
def test_what_cannot_be_written_is_refused(value: Any) -> None:
    with pytest.raises(FxpartError) as caught:
        literal(value, NameScope(), "node x")
    assert caught.value.code == "FXP108"
    assert caught.value.problems[0].where == "node x"


def expression(target: Any, *args: Any, **kwargs: Any) -> tuple[str, NameScope]:
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in ("x", "y")}
    args = tuple(nodes.get(a, a) if isinstance(a, str) else a for a in args)
    names = NameScope()
    if isinstance(target, str):
        node = graph.create_node("call_method", target, args, kwargs)
    else:
        node = graph.call_function(target, args, kwargs)
    return call(node, names, "here"), names


@pytest.mark.parametrize(
    ("target", "args", "text"),
    [
        (operator.add, ("x", -1), "x + (-1)"),
        (operator.floordiv, ("x", "y"), "x // y"),
        (operator.pow, (-2, "y"), "(-2) ** y"),
        (operator.neg, ("x",), "-x"),
        (operator.not_, ("x",), "not x"),
        (operator.getitem, ("x", 0), "x[0]"),
        (operator.getitem, ("x", slice(None, 2)), "x[slice(None, 2, None)]"),
        (operator.getitem, (3.0, 0), "(3.0)[0]"),
        (torch.ops.aten.sym_size.int, ("x", 1), "x.size(1)"),
        (max, ("x", 3), "max(x, 3)"),
        (torch.ops.aten.relu.default, ("x",), "aten_relu(x)"),
        (torch.ops.aten.add.Tensor, ("x", math.inf), "aten_add_Tensor(x, math.inf)"),
        ("view", ("x", -1, 4), "x.view(-1, 4)"),
    ],
)
def test_calls(target: Any, args: Any, text: str) -> None:
    assert expression(target, *args)[0] == text


def test_operations_are_bound_to_module_names() -> None:
    text, names = expression(rng.seeded, "x", 3, torch.ops.aten.dropout.default, "y", 0.5, True)
    assert text == "seeded(x, 3, aten_dropout, y, 0.5, True)"
    assert names.operations == {"aten_dropout": "torch.ops.aten.dropout.default"}
    assert "fxpart.rng" in names.modules
    text, names = expression(torch.sym_max, "x", 2)
    assert (text, names.operations) == ("sym_max(x, 2)", {"sym_max": "torch.sym_max"})
    text, names = expression(math.floor, "x")
    assert names.operations == {"math_floor": "math.floor"}
    text, names = expression(torch.nn.functional.relu, "x")
    assert names.operations == {"nn_functional_relu": "torch.nn.functional.relu"}


def test_keyword_arguments() -> None:
    op = getattr(torch.ops.aten.random, "from")
    text, names = expression(op, "x", **{"from": 0, "to": 3})
    assert text == 'aten_random_from(x, **{"from": 0}, to=3)'
    assert names.operations == {"aten_random_from": 'getattr(torch.ops.aten.random, "from")'}
    assert back(names.operations["aten_random_from"]) is op
    text, _ = expression(torch.ops.aten.ones.default, [2], device="cpu", pin_memory=False)
    assert text == "aten_ones([2], device=self.device, pin_memory=False)"


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (lambda x: x, ("x",)),
        (print, ("x",)),
        (getattr, ("x", "shape")),
        ("__reduce__", ("x",)),
        ("no_such_method", ("x",)),
        (torch.load, ("x",)),
    ],
)
def test_foreign_calls_are_refused(target: Any, args: Any) -> None:
    with pytest.raises(FxpartError) as caught:
        expression(target, *args)
    assert caught.value.code == "FXP108"
