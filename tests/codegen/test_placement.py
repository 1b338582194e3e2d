"""Stages that cannot be: every fault is found, and named with its reason."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from stage_runs import Stages, captured_of, prepared
from torch import fx, nn

from fxpart.capture import CapturedModel
from fxpart.codegen.stage_split import split
from fxpart.compat import fake_mode
from fxpart.compiler import KEY, LEVEL_KEY, Level, NodeAnnotation
from fxpart.compiler.graph_edit import annotation
from fxpart.errors import FxpartError

pytestmark = pytest.mark.slow


class Model(nn.Module):
    """BatchNorm used twice (its buffers are written), and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        left, right = x.chunk(2, dim=1)
        x = self.norm(torch.cat([right, left], dim=1))
        return self.last(x).square().mean()


def placed(
    model: nn.Module, place: Callable[[fx.Node], int]
) -> tuple[CapturedModel, fx.GraphModule]:
    """A graph whose every op is on the stage that ``place`` says, sound or not."""
    torch.manual_seed(0)
    captured = captured_of(model, (torch.randn(4, 4),), lambda y: y, batch_size=4)
    graph = prepared(captured)
    for node in graph.graph.nodes:
        if annotation(node).block is not None:
            node.meta[KEY] = replace(annotation(node), stage=place(node))
    graph.meta[LEVEL_KEY] = Level.ASSIGNED
    return captured, graph


def by_name(first: Sequence[str]) -> Callable[[fx.Node], int]:
    """Stage 0 for nodes whose name starts so, stage 1 for the others."""
    return lambda node: 0 if node.name.startswith(tuple(first)) else 1


def faults(captured: CapturedModel, graph: fx.GraphModule) -> FxpartError:
    with pytest.raises(FxpartError) as caught:
        split(graph, captured)
    return caught.value


def test_a_value_of_a_later_stage() -> None:
    captured, graph = placed(Model(), lambda n: 1 if n.name.startswith("cat") else 0)
    found = faults(captured, graph)
    assert {p.code for p in found.problems} == {"FXP201"}
    assert "later stage 1" in str(found)


def test_buffers_that_are_written_stay_on_one_stage() -> None:
    split(*reversed(placed(Model(), lambda n: 0)))
    first = True

    def place(node: fx.Node) -> int:
        nonlocal first
        first = first and not node.name.startswith("chunk")
        return 0 if first else 1

    captured, graph = placed(Model(), place)
    found = faults(captured, graph)
    text = str(found)
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert name in text
    assert len(found.problems) >= 3


def test_items_stay_with_their_tuple() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.last = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = (x * self.scale).chunk(2, dim=1)
            return self.last(torch.cat([right, left], dim=1)).square().mean()

    captured, graph = placed(Halves(), by_name(["mul", "chunk"]))  # getitem is put elsewhere
    spec, stages = split(graph, captured)
    items = [sum(n.target is operator.getitem for n in s.graph.nodes) for s in stages]
    assert items == [2, 0]
    assert [len(s.inputs) for s in spec.stages] == [1, 2]


def selecting(stages: Sequence[int]) -> tuple[CapturedModel, fx.GraphModule]:
    """nonzero -> its count -> ones of that count -> their sum, on the given stages."""
    captured, base = placed(Model(), lambda n: 0)
    mode = fake_mode(symbolic=True)
    graph = fx.Graph()
    key, x = graph.placeholder("rng_key"), graph.placeholder(captured.inputs[0].name)
    key.meta["val"] = 0
    with mode:
        x.meta["val"] = torch.empty(4, 4)
        args: Any = x
        ops = torch.ops.aten
        for target, rest in (
            (ops.nonzero.default, ()),
            (ops.sym_size.int, (0,)),
            (ops.ones.default, None),
            (ops.sum.default, ()),
        ):
            arguments = ([args],) if rest is None else (args, *rest)
            values = fx.node.map_arg(arguments, lambda n: n.meta["val"])
            args = graph.call_function(target, arguments)
            args.meta["val"] = target(*values)
            args.meta[KEY] = NodeAnnotation(stage=stages[len(graph.nodes) - 3])
    graph.output((args,))
    module = fx.GraphModule(nn.Module(), graph)
    module.meta.update(base.meta)
    return captured, module


def test_sizes_that_depend_on_data_stay_on_their_stage() -> None:
    captured, graph = selecting([0, 0, 0, 1])
    assert "size depends on the data" in str(faults(captured, graph))
    captured, graph = selecting([0, 0, 1, 1])
    assert "number depends on the data" in str(faults(captured, graph))
    captured, graph = selecting([0, 0, 0, 0])
    stages = Stages(captured, graph)
    assert stages.run([torch.eye(4)], 0)[stages.spec.loss] == 4.0


def test_an_op_without_a_stage_is_our_fault() -> None:
    captured, graph = placed(Model(), lambda n: 0)
    node: Any = next(n for n in graph.graph.nodes if n.name.startswith("batch_norm"))
    for user in (node, *node.all_input_nodes):
        if user.op == "call_function":
            user.meta[KEY] = replace(annotation(user), stage=None)
    assert faults(captured, graph).code == "FXP900"
    graph.meta[LEVEL_KEY] = Level.ANNOTATED
    assert faults(captured, graph).code == "FXP900"
