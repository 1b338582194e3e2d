"""Names and strings from a model never become code."""

from __future__ import annotations

import ast
import keyword
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fxpart.codegen.identifiers import attributes, comment, identifier, place, quoted
from fxpart.codegen.module_emitter import emit
from fxpart.codegen.stage_loader import load_stage
from fxpart.codegen.stage_split import StageGraph
from fxpart.compiler import KEY, NodeAnnotation
from fxpart.program.spec import StageSpec, StateSpec, ValueSpec

HOSTILE = (
    "a'); import os  # ",
    'a"\n    import os\n',
    "'''\nraise SystemExit\n'''",
    '"""',
    "class",
    "None",
    "print",
    "match",
    "self",
    "key",
    "torch",
    "NAMES",
    "Stage0",
    "__init__",
    "__class__",
    "__debug__",
    "forward",
    "1st",
    "",
    "naïve",
    "ﬁ",
    "\u2028import os",
    "\x0cimport os",
    "\\",
    "\\N{DIGIT ONE}",
    "\ud800",
    "\0",
    "x" * 300,
    "{injected}",
    "a\rimport os",
)
texts = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=30))


def stage(names: list[str], strings: list[str]) -> StageGraph:
    """A stage whose every name and string is given: model, block, module, source, values, state."""
    model, block, module, source, inputs, weight, buffer, value = names
    tensor = torch.empty(2, 2)
    graph = fx.Graph()
    key = graph.placeholder("rng_key")
    key.meta["val"] = 0
    x = graph.placeholder("x")
    w = graph.get_attr(weight)
    b = graph.get_attr(buffer)
    first = graph.call_function(torch.ops.aten.linear.default, (x, w, b))
    second = graph.call_function(torch.ops.aten.gelu.default, (first,), {"approximate": strings[0]})
    third = graph.call_function(torch.ops.aten.einsum.default, (strings[1], [second, w]))
    first._rename(value)
    for node in (x, w, b, first, second, third):
        node.meta["val"] = tensor
        node.meta[KEY] = NodeAnnotation(module=module, source=source, stage=0)
    graph.output((third,))
    escaped = attributes([(weight, "parameter"), (buffer, "buffer")])
    state = tuple(
        StateSpec(attribute=escaped[n], name=n, kind=k, dtype="float32", shape=(2, 2))
        for n, k in ((weight, "parameter"), (buffer, "buffer"))
    )
    spec = StageSpec(
        index=0,
        inputs=(ValueSpec(name=inputs, dtype="float32", shape=(2, 2)),),
        sources=(-1,),
        outputs=(ValueSpec(name=value, dtype="float32", shape=(2, 2)),),
        targets=((1,),),
        state=state,
    )
    return StageGraph(spec, graph, (block, block), model)


BENIGN = ["model", "block", "module", "file.py:1", "inputs", "weight", "buffer", "value"]


def shape(source: str) -> list[type]:
    return [type(node) for node in ast.walk(ast.parse(source))]


BENIGN_SHAPE = shape(emit(stage(BENIGN, ["none", "ij,jk->ik"])))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.lists(texts, min_size=8, max_size=8), st.lists(texts, min_size=2, max_size=2))
def test_the_program_has_the_same_structure_whatever_the_names(
    names: list[str], strings: list[str]
) -> None:
    if names[5] == names[6]:
        names[6] += "2"
    source = emit(stage(names, strings))
    assert source.isascii()
    assert shape(source) == BENIGN_SHAPE
    tree = ast.parse(source)
    table = next(
        node.value for node in tree.body if isinstance(node, ast.Assign) and _name(node) == "NAMES"
    )
    assert set(ast.literal_eval(table).values()) == {names[5], names[6]}
    constants = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    assert strings[0] in constants
    assert strings[1] in constants


@settings(deadline=None, max_examples=30)
@given(st.lists(texts, min_size=8, max_size=8))
def test_a_module_with_hostile_names_runs(names: list[str]) -> None:
    if names[5] == names[6]:
        names[6] += "2"
    built = stage(names, ["none", "ij,jk->ik"])
    module = load_stage(emit(built), built.spec)
    weight, bias, x = torch.randn(2, 2), torch.randn(2, 2), torch.randn(2, 2)
    values = [weight, bias]
    for state, value in zip(built.spec.state, values, strict=True):
        parameter = torch.nn.Parameter(value) if state.kind == "parameter" else value
        setattr(module, state.attribute, parameter)
    (result,) = module(7, x)
    inner = torch.nn.functional.gelu(torch.ops.aten.linear.default(x, weight, bias))
    assert torch.equal(result, torch.einsum("ij,jk->ik", inner, weight))


def _name(node: ast.Assign) -> Any:
    target = node.targets[0]
    return target.id if isinstance(target, ast.Name) else None


@given(st.lists(texts, max_size=20))
def test_identifiers_are_fresh_plain_names(names: list[str]) -> None:
    taken: set[str] = set()
    made = [identifier(name, taken) for name in names]
    assert len(set(made)) == len(made)
    for name in made:
        assert name.isidentifier()
        assert name.isascii()
        assert not keyword.iskeyword(name)
        assert not name.startswith("__")


def test_attributes_keep_clear_of_the_module_class() -> None:
    names = ["training", "forward", "register_buffer", "_parameters", "state.dict", "state_dict"]
    escaped = attributes([(name, "parameter") for name in names])
    assert len(set(escaped.values())) == len(names)
    assert not any(hasattr(torch.nn.Module(), name) for name in escaped.values())


@given(texts)
def test_quoted_text_reads_back_and_comments_stay_on_their_line(text: str) -> None:
    assert ast.literal_eval(quoted(text)) == text
    for line in (comment(text), place(text)):
        assert line.isascii()
        assert len(f"# {line}".splitlines()) == 1


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("model.py:12", "model.py:12"),
        ("/home/someone/project/model.py:12", "project/model.py:12"),
        ("/venv/lib/site-packages/transformers/models/x.py:3", "transformers/models/x.py:3"),
        ("C:\\work\\model.py:4", "work/model.py:4"),
        ("", ""),
    ],
)
def test_places_have_no_absolute_path(source: str, expected: str) -> None:
    assert place(source) == expected
