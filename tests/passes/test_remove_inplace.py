"""remove_inplace against the graph as given: outputs, gradients, buffers, every bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fxpart.passes import all_passes
from hypothesis import HealthCheck, assume, given, settings
from inplace_programs import Builder, programs, run, same_bits
from torch import fx, nn

from fxpart.capture import capture
from fxpart.compiler import PassManager
from fxpart.compiler.effects import list_written_nodes, packet_name, state_written
from fxpart.errors import FxpartError

aten = torch.ops.aten
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))


def functional(module: fx.GraphModule) -> fx.GraphModule:
    return PassManager(all_passes()).run("remove_inplace", module)


def both(module: fx.GraphModule, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The given graph and the rewritten one, each on its own copy of the buffers."""
    rewritten = functional(module)
    start = {n: b.clone() for n, b in module.named_buffers()}
    first = run(module, *[i.clone() for i in inputs])
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(start[name])
    return first, run(rewritten, *[i.clone() for i in inputs])


def assert_same(module: fx.GraphModule, *inputs: Any) -> fx.GraphModule:
    before, after = both(module, *inputs)
    for a, b in zip(before, after, strict=True):
        assert same_bits(a, b), (a, b)
    return functional(module)


@pytest.mark.slow
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
@given(programs())
def test_random_programs(module: fx.GraphModule) -> None:
    untouched = [n.format_node() for n in module.graph.nodes]
    try:
        eager = run(copy.deepcopy(module), X.clone())
    except RuntimeError:
        # autograd itself forbids the program (a saved value was overwritten, or a piece of a split)
        assume(False)
    has_detach = any(packet_name(n.target) == "aten.detach" for n in module.graph.nodes)
    try:
        rewritten = functional(module)
    except FxpartError as refusal:
        assert refusal.code == "FXP108"
        assert has_detach
        return
    for a, b in zip(eager, run(rewritten, X.clone()), strict=True):
        assert same_bits(a, b), rewritten.print_readable(print_output=False)
    state = state_written(rewritten.graph)
    assert all(n in state for n in rewritten.graph.nodes if list_written_nodes(n))
    assert [n.format_node() for n in module.graph.nodes] == untouched


def weighted() -> tuple[Builder, fx.Node]:
    builder = Builder(weight=torch.nn.Parameter(X.clone() * 0.5))
    x = builder.input(3, 4)
    return builder, builder.call(aten.mul.Tensor, x, builder.get("weight"))


def test_write_through_two_views_is_seen_by_all_aliases() -> None:
    builder, y = weighted()
    t = builder.call(aten.t.default, y)
    row = builder.call(aten.select.int, t, 0, 1)
    early = builder.call(aten.sum.default, row)
    builder.call(aten.mul_.Scalar, row, 3.0)
    late = builder.call(aten.sum.default, row)
    module = assert_same(builder.finish(y, t, early, late), X)
    assert not any(list_written_nodes(n) for n in module.graph.nodes)


def test_copy_converts_dtype_and_broadcasts() -> None:
    builder, y = weighted()
    ints = builder.call(aten.to.dtype, builder.call(aten.round.default, y), torch.int64)
    column = builder.call(aten.select.int, y, 1, 0)
    builder.call(aten.copy_.default, column, builder.call(aten.select.int, ints, 1, 1))
    assert_same(builder.finish(y), X)


def test_index_put_keeps_gradients_of_both_sides() -> None:
    builder, y = weighted()
    zeros = builder.call(aten.zeros.default, [3, 4])
    rows = builder.call(aten.argsort.default, builder.call(aten.select.int, y, 1, 0))
    builder.call(aten.index_put_.default, zeros, [rows], y)
    assert_same(builder.finish(zeros), X)


def test_in_place_on_a_transposed_value_keeps_its_layout() -> None:
    builder, y = weighted()
    t = builder.call(aten.clone.default, builder.call(aten.t.default, y))
    builder.call(aten.add_.Tensor, t, builder.call(aten.t.default, y))
    module = functional(builder.finish(t))
    outs = fx.Interpreter(module, garbage_collect_values=False).run(X.clone())
    assert outs[1].stride() == (1, 4)


def test_metadata_ops_change_the_object_only() -> None:
    builder, y = weighted()
    other = builder.call(aten.alias.default, y)
    builder.call(aten.unsqueeze_.default, y, 0)
    builder.call(aten.mul_.Scalar, other, 2.0)
    module = assert_same(builder.finish(y, other), X)
    shapes = [tuple(o.shape) for o in module(X)[1:]]
    assert shapes == [(1, 3, 4), (3, 4)]


def test_out_argument_becomes_a_result() -> None:
    builder, y = weighted()
    with torch.no_grad():
        room = builder.call(aten.zeros.default, [3, 4])
        detached = builder.call(aten.detach.default, y)
        builder.call(aten.add.out, detached, detached, out=room)
    assert_same(builder.finish(room, y), X)


def test_batch_norm_statistics_and_counter_stay_real_writes() -> None:
    builder = Builder(
        weight=torch.nn.Parameter(torch.ones(4)),
        mean=torch.zeros(4),
        var=torch.ones(4),
        tracked=torch.zeros((), dtype=torch.int64),
    )
    x = builder.input(3, 4)
    builder.call(aten.add_.Tensor, builder.get("tracked"), 1)
    stats = (builder.get("mean"), builder.get("var"))
    weight = builder.get("weight")
    y = builder.call(aten.batch_norm.default, x, weight, None, *stats, True, 0.1, 1e-5, False)
    builder.call(aten.relu_.default, y)
    module = assert_same(builder.finish(y), X)
    effects = {name for names in state_written(module.graph).values() for name in names}
    assert effects == {"mean", "var", "tracked"}


def test_writing_behind_autograds_back_is_refused() -> None:
    builder, y = weighted()
    builder.call(aten.mul_.Scalar, builder.call(aten.detach.default, y), 2.0)
    with pytest.raises(FxpartError) as caught:
        functional(builder.finish(y))
    assert caught.value.code == "FXP108"
    assert "test.py:" in caught.value.problems[0].where


def test_a_gradient_written_into_state_is_refused() -> None:
    builder = Builder(weight=torch.nn.Parameter(torch.ones(3, 4)), memory=torch.zeros(3, 4))
    x = builder.input(3, 4)
    y = builder.call(aten.mul.Tensor, x, builder.get("weight"))
    builder.call(aten.copy_.default, builder.get("memory"), y)
    with pytest.raises(FxpartError, match="memory"):
        functional(builder.finish(y))


def test_ops_without_functional_form_are_refused() -> None:
    builder, y = weighted()
    builder.call(aten.set_.source_Tensor, builder.call(aten.clone.default, y), y)
    with pytest.raises(FxpartError) as caught:
        functional(builder.finish(y))
    assert caught.value.code == "FXP108"


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.bernoulli_.float, (0.5,)),
        (aten.bernoulli_.float, ()),
        (aten.uniform_.default, (-1.0, 1.0)),
        (aten.normal_.default, (0.0, 2.0)),
        (aten.exponential_.default, ()),
        (aten.geometric_.default, (0.3,)),
        (aten.random_.to, (9,)),
        (aten.dropout_.default, (0.5, True)),
        (aten.feature_dropout_.default, (0.5, True)),
        (aten.alpha_dropout_.default, (0.5, True)),
        (aten.rrelu_.default, (0.1, 0.4, True)),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_random_fills_draw_the_same_numbers(op: Any, args: tuple[Any, ...], whole: bool) -> None:
    builder, y = weighted()
    target = y if whole else builder.call(aten.slice.Tensor, y, 0, 0, 2)
    builder.call(op, target, *args)
    module = builder.finish(builder.call(aten.sin.default, y))
    before = PassManager(all_passes()).run("key_random", module)
    after = PassManager(all_passes()).run("remove_inplace,key_random", module)
    for a, b in zip(run(before, 5, X.clone()), run(after, 5, X.clone()), strict=True):
        assert same_bits(a, b)


def test_a_buffer_that_is_assigned_anew_does_not_prevent_cuts() -> None:
    """Its copy follows the last use of the buffer, and the writes of what it is computed from."""

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 4)
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x) + self.average
            self.average = self.average * 0.9 + self.norm.running_mean
            return self.head(torch.relu(x))

    module = capture(Averaged(), example_inputs=(torch.randn(8, 4),)).graph
    changed = PassManager(all_passes()).run("inline_regions,remove_inplace", module)
    names = [str(node.target) for node in changed.graph.nodes if node.op == "call_function"]
    assert names.index("aten.batch_norm.default") < names.index("aten.copy_.default")
    assert names.index("aten.copy_.default") < names.index("aten.relu.default")
