"""Every rule against its op: cut, run on mesh ranks, recombine, compare, forward and gradient."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from fxpart.passes.rules import RULES, experts, layout, origin, rule_of
from fxpart.passes.rules.pointwise import LINEAR
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_drawing import Draw, Maker
from rule_examples_backwards import EXAMPLES as BACKWARDS
from rule_examples_layers import EXAMPLES as LAYERS
from rule_examples_lookups import EXAMPLES as LOOKUPS
from rule_examples_lookups import own_rows
from rule_examples_products import EXAMPLES as PRODUCTS
from rule_examples_products import grouped_fallback
from rule_examples_shapes import EXAMPLES as SHAPES
from rule_examples_values import EXAMPLES as VALUES
from rule_soundness import Example, check, node_of

from fxpart.sharding import Mesh, Shard

EXAMPLES: dict[str, Maker] = {**PRODUCTS, **SHAPES, **LOOKUPS, **VALUES, **LAYERS, **BACKWARDS}
if importlib.util.find_spec("transformers") is not None:
    EXAMPLES["transformers.grouped_mm_fallback"] = grouped_fallback


# What every model has runs with the fast tests; the rest of the tables takes a minute.
COMMON = {
    f"aten.{op}"
    for op in (
        "addmm cat cross_entropy_loss dropout embedding layer_norm linear matmul mean "
        "scaled_dot_product_attention softmax split transpose view"
    ).split()
}


def listed(names: Iterable[str], fast: set[str]) -> list[Any]:
    """The names in order, those that are not fast marked."""
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in sorted(names)]


@pytest.mark.slow
@pytest.mark.parametrize("name", listed(EXAMPLES, COMMON))
@settings(max_examples=4)
@given(seed=st.integers(0, 100_000))
def test_sound(name: str, seed: int) -> None:
    check(EXAMPLES[name](Draw(seed)), limit=10)


def test_every_entry_has_an_example() -> None:
    """Mixtures of experts are compared in tests/collectives."""
    names = {name for table in RULES.values() for name in table} - set(experts.TABLE)
    names |= {"transformers.grouped_mm_fallback"} & set(EXAMPLES)
    assert {n for n in names if n in EXAMPLES or n.startswith("aten.")} == set(EXAMPLES)


def test_every_entry_is_an_op_without_the_tag() -> None:
    """Names that torch does not have, or tags as pointwise, are no use in a table."""
    for name in filter(lambda n: n.startswith("aten."), EXAMPLES):
        space, _, packet = name.partition(".")
        overloads = getattr(getattr(torch.ops, space), packet)
        tags = [getattr(overloads, o).tags for o in overloads.overloads()]
        assert not all(torch.Tag.pointwise in each for each in tags), name


def _tagged() -> dict[str, Any]:
    """An overload of every op that torch tags as pointwise: of tensors where there is one."""
    found = {}
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not hasattr(packet, "overloads") or name.endswith("backward"):
            continue
        for overload in ("Tensor", "Tensor_Tensor", "self", "default", *packet.overloads()):
            op = getattr(packet, overload, None)
            if (
                op is not None
                and torch.Tag.pointwise in op.tags
                and "out" not in overload
                and name != "equal"
            ):
                found.setdefault(name, op)
    return found


TAGGED = _tagged()


def _tagged_example(name: str, r: Draw) -> Example | None:
    """Arguments by the schema: tensors that broadcast, 0.5 for numbers; None where none fit."""
    op = TAGGED[name]
    inplace = name.endswith("_") and not name.startswith("__")
    for kind in ("chance", "double", "more", "ints", "bools"):
        args: list[Any] = []
        shape = r.shape()
        for argument in op._schema.arguments:
            if argument.kwarg_only or (argument.has_default_value() and argument.name != "min"):
                break
            if "Tensor" in str(argument.type):
                here = shape if not args else r.broadcast(shape)
                args.append(_values(r, kind, here))
            else:
                args.append({"int": 1, "bool": True}.get(str(argument.type), 0.5))
        if name == "where" or "masked_fill" in name:
            args[1 if "masked_fill" in name else 0] = r.bools(*shape)
        example = Example(op, tuple(args), gradients=not inplace and kind not in ("ints", "bools"))
        try:
            node_of(example)
        except (RuntimeError, ValueError):
            continue
        if example.gradients and not _differentiable(example):
            example = Example(op, tuple(args), gradients=False)
        return example
    return None


def _values(r: Draw, kind: str, shape: list[int]) -> torch.Tensor:
    if kind == "double":
        r.dtype = torch.float64
    if kind in ("chance", "double", "more"):
        return r.chance(*shape) + (1 if kind == "more" else 0)
    return r.bools(*shape) if kind == "bools" else r.ints(3, *shape) + 1


def _differentiable(example: Example) -> bool:
    """Whether autograd takes all floating operands."""
    args = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point()
            else a for a in example.args]  # fmt: skip
    try:
        found = example.op(*args)
        first = found if isinstance(found, torch.Tensor) else found[0]
        if first.requires_grad:
            first.sum().backward()
    except (RuntimeError, NotImplementedError):
        return False
    return True


@pytest.mark.parametrize("name", listed(TAGGED, {"add", "gelu", "mul", "pow", "tanh", "where"}))
@settings(max_examples=2)
@given(seed=st.integers(0, 100_000))
def test_tagged_ops_are_sound(name: str, seed: int) -> None:
    example = _tagged_example(name, Draw(seed))
    assert example is not None, "no arguments are known that the op takes"
    check(example, limit=8)


def test_linear_names_are_ops() -> None:
    for name in LINEAR:
        assert hasattr(torch.ops.aten, name), name


def test_what_no_rule_covers_has_none() -> None:
    """A boolean mask as index, a maximum with whole-batch bins, a bag of unknown bounds."""
    x = torch.rand(4, 5)
    assert rule_of(node_of(Example(torch.ops.aten.index.Tensor, (x, [x[:, 0] > 0.5])))) is None
    assert rule_of(node_of(Example(torch.ops.aten.histc.default, (x, 4)))) is None
    assert rule_of(node_of(Example(torch.ops.aten.nonzero.default, (x,)))) is None


def test_rows_that_an_arange_looks_up_stay_where_they_are() -> None:
    """Each mesh rank's masks are of its own rows; another index of the same shape is no such
    thing."""
    example = own_rows(Draw(1))
    node = node_of(example)
    rule = rule_of(node)
    assert rule is not None and list(rule.forms.values()) == ["index_own_rows"]
    assert check(example, limit=40) > 5
    x, (first, second) = example.args
    other = Example(example.op, (x, [first.tensor.flip(0), second]))
    plain = rule_of(node_of(other))
    assert plain is not None and not plain.forms
    assert origin(node) != origin(node_of(other))


def test_no_lane_is_left_without_a_part() -> None:
    """Four over three mesh ranks by ceil would be 2, 2 and none; five over 2x2 is 2, 1, 1 and 1."""
    rule = rule_of(node_of(Example(torch.ops.aten.relu.default, (torch.rand(4, 5),))))
    assert rule is not None
    assert layout(rule, ("d0",), Mesh.parse("a=3")) is None
    assert layout(rule, ("d1",), Mesh.parse("a=3")) is not None
    assert layout(rule, ("d1", "d1"), Mesh.parse("a=2,b=2")) is not None
    assert layout(rule, ("d1", "d1"), Mesh.parse("a=3,b=2")) is None


def test_views_share_what_divides() -> None:
    """Compound factors, the whole rest where sizes do not divide, and local sizes."""
    node = node_of(Example(torch.ops.aten.view.default, (torch.rand(2, 6, 5), [12, 5])))
    rule = rule_of(node)
    assert rule is not None
    assert rule.operands == ((("f0",), ("f1",), ("f2",)),)
    assert rule.results == ((("f0", "f1"), ("f2",)),)
    known = layout(rule, ("f1",), Mesh.parse("a=2"))
    assert known is not None
    assert (known.operands, known.results) == (((Shard(1),),), ((Shard(0, 2),),))
    assert rule.localise is not None
    args, _ = rule.localise(node, (node.args, {}), [(2, 3, 5)], [(6, 5)])
    assert args[1] == [6, 5]
    odd = rule_of(node_of(Example(torch.ops.aten.view.default, (torch.rand(6, 5), [10, 3]))))
    assert odd is not None
    assert odd.factors == ("f0", "_i0", "_i1", "_o0", "_o1")
