"""The pass manager: pipeline text, levels, verification, observers, reproducers."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fxpart.passes import PASSES, PREPARE, all_passes
from hypothesis import given, settings
from hypothesis import strategies as st
from inplace_programs import Builder
from torch import fx, nn
from zoo_graphs import captured

from fxpart.capture.fingerprint import canonical_lines
from fxpart.compiler import KEY, LEVEL_KEY, Level, PassManager, format_pipeline, parse_pipeline
from fxpart.compiler.argument_json import decode, encode
from fxpart.compiler.graph_json import graph_from_json, graph_to_json
from fxpart.compiler.pass_manager import rerun
from fxpart.compiler.pass_observers import GraphDiffPrinter, GraphDumper, GraphPrinter, PassTimer
from fxpart.errors import FxpartError

aten = torch.ops.aten


@dataclass(frozen=True)
class Sample:
    """A pass with an option of each type; does nothing."""

    count: int = 1
    share: float = 0.5
    flag: bool = False
    text: str = ""
    maybe: int | None = None
    name: ClassVar[str] = "sample"
    requires: ClassVar[Level] = Level.CAPTURED
    ensures: ClassVar[Level] = Level.CAPTURED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Nothing."""
        return graph_module


@dataclass(frozen=True)
class Needy:
    """A pass with an option that has no default."""

    starts: str
    name: ClassVar[str] = "needy"
    requires: ClassVar[Level] = Level.CAPTURED
    ensures: ClassVar[Level] = Level.CAPTURED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Nothing."""
        return graph_module


TABLE: dict[str, type[Any]] = {"sample": Sample, "needy": Needy}

samples = st.builds(
    Sample,
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.text(),
    st.none() | st.integers(),
)


@pytest.mark.slow
@given(st.lists(samples | st.builds(Needy, st.text())))
def test_text_round_trip(passes: list[Any]) -> None:
    text = format_pipeline(passes)
    assert list(parse_pipeline(text, TABLE)) == passes
    assert format_pipeline(parse_pipeline(text, TABLE)) == text


def test_reading_by_hand() -> None:
    text = ' sample{ count=3, text="0,5" , flag=true,maybe=null},needy{starts=a} ,sample '
    assert parse_pipeline(text, TABLE) == (
        Sample(count=3, text="0,5", flag=True),
        Needy("a"),
        Sample(),
    )
    assert parse_pipeline("", TABLE) == ()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("sampel", ["unknown pass 'sampel'", "did you mean sample?", "needy, sample"]),
        ("sample{cuont=1}", ["unknown option 'cuont'", "did you mean count?", "share, flag"]),
        ("needy", ["option starts is missing"]),
        ("sample{count=x}", ['count="x" is not of type int']),
        ("sample{flag=1}", ["flag=1 is not of type bool"]),
        ("sample{count=true}", ["count=true is not of type int"]),
        ("sample{count=1", ["column 15", "expected ','"]),
        ("sample needy", ["column 8", "expected ','"]),
        ('sample{text="a}', ["a closed string"]),
        ("sample{count=1,count=2}", ["is a duplicate"]),
        (",", ["the name of a pass"]),
    ],
)
def test_wrong_text(text: str, parts: list[str]) -> None:
    with pytest.raises(FxpartError) as caught:
        parse_pipeline(text, TABLE)
    assert caught.value.code == "FXP109"
    for part in parts:
        assert part in str(caught.value)


def test_all_wrong_passes_at_once() -> None:
    with pytest.raises(FxpartError) as caught:
        parse_pipeline("sampel,sample{a=1,b=2},needy{starts=1}", TABLE)
    assert len(caught.value.problems) == 4


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='ab{}=,"0. _\\\n', max_size=20))
def test_any_text_gives_passes_or_fxp109(text: str) -> None:
    try:
        parse_pipeline(text, TABLE)
    except FxpartError as failure:
        assert {p.code for p in failure.problems} == {"FXP109"}


def small() -> fx.GraphModule:
    builder = Builder(weight=nn.Parameter(torch.ones(4, 4)))
    y = builder.call(aten.linear.default, builder.input(3, 4), builder.get("weight"))
    return builder.finish(builder.call(aten.dropout.default, y, 0.5, True))


def test_the_given_graph_is_not_changed() -> None:
    module = small()
    before = [n.format_node() for n in module.graph.nodes]
    result = PassManager(all_passes()).run(PREPARE, module)
    assert [n.format_node() for n in module.graph.nodes] == before
    assert module.meta[LEVEL_KEY] is Level.CAPTURED
    assert result.meta[LEVEL_KEY] is Level.ANNOTATED
    assert result.weight is module.weight


def test_levels_are_checked_before_anything_runs() -> None:
    for pipeline in ('assign{starts="0"}', "group_blocks,simplify"):
        timing = PassTimer()
        with pytest.raises(FxpartError, match="level"):
            PassManager(all_passes(), observers=(timing,)).run(pipeline, small())
        assert not timing.rows
    module = small()
    del module.meta[LEVEL_KEY]
    with pytest.raises(FxpartError, match="no level"):
        PassManager(all_passes()).run("simplify", module)


def breaking(change: Callable[[fx.GraphModule], None]) -> type[Any]:
    """A pass that breaks the graph."""

    @dataclass(frozen=True)
    class Breaking(Sample):
        name: ClassVar[str] = "breaking"

        def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
            change(graph_module)
            return graph_module

    return Breaking


def _find(module: fx.GraphModule, target: Any) -> fx.Node:
    return next(n for n in module.graph.nodes if n.target is target)


def no_value(module: fx.GraphModule) -> None:
    del _find(module, aten.linear.default).meta["val"]


def no_annotation(module: fx.GraphModule) -> None:
    del _find(module, aten.linear.default).meta[KEY]


def twice_named(module: fx.GraphModule) -> None:
    _find(module, aten.linear.default).name = _find(module, aten.dropout.default).name


def wrong_order(module: fx.GraphModule) -> None:
    _find(module, aten.sum.default).append(_find(module, aten.linear.default))


def no_tuple(module: fx.GraphModule) -> None:
    output = module.graph.find_nodes(op="output")[0]
    output.args = (output.args[0][0],)


def a_method(module: fx.GraphModule) -> None:
    with module.graph.inserting_after(_find(module, aten.linear.default)):
        node = module.graph.call_method("relu", (_find(module, aten.linear.default),))
    node.meta["val"] = None


BREAKS = {
    no_value: "no value",
    no_annotation: "no annotation",
    twice_named: "not unique",
    wrong_order: "malformed",
    no_tuple: "a tuple",
    a_method: "call_method",
}


@pytest.mark.parametrize("change", list(BREAKS), ids=lambda c: c.__name__)
def test_broken_graphs_are_found_before_and_after(change: Callable[..., None]) -> None:
    table = {**PASSES, "breaking": breaking(change)}
    with pytest.raises(FxpartError) as caught:
        PassManager(table=table).run("simplify,breaking,key_random", small())
    assert caught.value.code == "FXP900"
    assert "breaking" in caught.value.problems[0].where
    assert BREAKS[change] in str(caught.value)
    module = small()
    change(module)
    with pytest.raises(FxpartError, match="the input graph"):
        PassManager(all_passes()).run("simplify", module)


def _annotated(change: Callable[[list[fx.Node]], None]) -> FxpartError:
    """The fault found after a change to the ops of a graph of three blocks."""
    builder = Builder(**{f"w{i}": nn.Parameter(torch.ones(4, 4)) for i in range(3)})
    y = builder.call(aten.dropout.default, builder.input(3, 4), 0.5, True)
    for i in range(3):
        y = builder.call(aten.linear.default, y, builder.get(f"w{i}"))
    module = PassManager(all_passes()).run(PREPARE, builder.finish(y))
    change([n for n in module.graph.nodes if n.op == "call_function"])
    with pytest.raises(FxpartError) as caught:
        PassManager(all_passes()).run('assign{starts="0"}', module)
    return caught.value


def _set(node: fx.Node, **changes: Any) -> None:
    from fxpart.compiler.graph_edit import annotate

    annotate(node, **changes)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda ops: _set(ops[-1], block=0), "block 0 follows block 2"),
        (lambda ops: _set(ops[-1], block=None), "belongs to no block"),
        (lambda ops: _set(ops[-1], block=3), "uses 4 blocks, but the table has 3"),
        (lambda ops: _set(ops[0], random=4), "random index must be 0"),
        (lambda ops: setattr(ops[1], "target", aten.relu_.default), "not state"),
        (lambda ops: setattr(ops[1], "target", aten.bernoulli.default), "has no key"),
    ],
)
def test_invariants_of_annotated_graphs(change: Callable[..., None], part: str) -> None:
    assert part in str(_annotated(change))


def test_observers() -> None:
    after, changes = [], []
    timing = PassTimer()
    observers = (
        GraphPrinter(after.append, frozenset({"key_random"})),
        GraphDiffPrinter(changes.append),
        timing,
    )
    PassManager(all_passes(), observers=observers).run(PREPARE, small())
    names = PREPARE.split(",")
    assert len(after) == 1
    assert after[0].startswith(f"# after pass {names.index('key_random')}: key_random")
    assert "rng_key" in after[0]
    assert len(changes) == len(names)
    assert "(no change)" in changes[1]
    assert "rng_key" in changes[names.index("key_random")]
    assert [r[0] for r in timing.rows] == names
    assert timing.text().endswith("total")


def test_dumped_files(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    PassManager(all_passes(), observers=(GraphDumper(folder),)).run("simplify,key_random", small())
    assert sorted(p.name for p in folder.iterdir()) == ["00-simplify.txt", "01-key_random.txt"]
    assert "aten.linear.default" in (folder / "00-simplify.txt").read_text()
    (tmp_path / "file").write_text("")
    with pytest.raises(FxpartError, match="FXP603"):
        PassManager(all_passes(), observers=(GraphDumper(tmp_path / "file"),)).run(
            "simplify", small()
        )


@dataclass(frozen=True)
class Failing(Sample):
    """Raises where it meets a dropout that has a key."""

    name: ClassVar[str] = "failing"

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Look for it."""
        from fxpart.rng import seeded

        for node in graph_module.graph.nodes:
            if node.target is seeded:
                raise ValueError(f"{node.name} of {tuple(map(str, node.meta['val'].shape))}")
        return graph_module


FAILING = {**PASSES, "failing": Failing}


def test_a_failure_leaves_a_reproducer_that_fails_alike(tmp_path: Path) -> None:
    manager = PassManager(table=FAILING, reproducers=tmp_path)
    pipeline = 'simplify,key_random,failing{text="a,b"},mark_gradients'
    with pytest.raises(FxpartError) as caught:
        manager.run(pipeline, small())
    problem = caught.value.problems[0]
    assert (problem.code, problem.where) == ("FXP900", "pass failing")
    assert "ValueError: dropout" in problem.why
    (folder,) = tmp_path.iterdir()
    assert str(folder) in problem.fix
    assert sorted(p.name for p in folder.iterdir()) == ["graph.json", "graph.txt", "pipeline.json"]
    about = json.loads((folder / "pipeline.json").read_text())
    assert about["pipeline"] == 'failing{text="a,b"},mark_gradients'
    with pytest.raises(FxpartError) as again:
        rerun(folder, FAILING)
    assert again.value.problems[0].why == problem.why
    # the same failure writes the same bytes to the same place
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(FxpartError):
        manager.run(pipeline, small())
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert len(list(tmp_path.iterdir())) == 1


def test_rerun_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(FxpartError, match="no valid reproducer"):
        rerun(tmp_path, FAILING)
    (tmp_path / "graph.json").write_text("{}")
    (tmp_path / "pipeline.json").write_text('{"format": 99}')
    with pytest.raises(FxpartError, match="99"):
        rerun(tmp_path, FAILING)


def test_a_user_s_problem_is_no_fault_of_ours(tmp_path: Path) -> None:
    module = PassManager(all_passes()).run(PREPARE, small())
    with pytest.raises(FxpartError) as caught:
        PassManager(all_passes(), reproducers=tmp_path).run('assign{starts="0,99"}', module)
    assert caught.value.code == "FXP303"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "regions", "unet", "in_place", "dropouts"])
def test_graphs_come_back_from_json(name: str) -> None:
    graph = captured(name).graph
    back = graph_from_json(json.loads(json.dumps(graph_to_json(graph))))
    prepared = [PassManager(all_passes()).run(PREPARE, g) for g in (graph, back)]
    one, other = (list(canonical_lines(g)) for g in prepared)
    assert one == other


arguments = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from([torch.float32, torch.strided, torch.channels_last, torch.device("cpu")])
    | st.sampled_from([aten.add.Tensor, torch.ops.higher_order.cond, operator.floordiv]),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.builds(slice, inner, inner, inner)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(arguments)
def test_arguments_round_trip_through_json(item: Any) -> None:
    assert decode(json.loads(json.dumps(encode(item))), {}) == item
