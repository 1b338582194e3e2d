"""Only values with a gradient cross stage boundaries of transformers: the hidden state.

Stages compute rotary tables, masks and position indices themselves. T5 also sends the encoder's
output, which every decoder layer reads, and the relative position bias of its first layer: the
bias is a lookup in a trained table, so its gradient has to return to the stage with the table.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from model_families import FAMILIES, WIDTH
from stage_runs import Stages, assigned, captured_of, check_equal, prepared, tensors
from torch import nn

import fxpart
from fxpart.cluster.model import Cluster
from fxpart.compiler import BLOCKS_KEY, NO_CUT_KEY
from fxpart.compiler.duplicated_ops import LARGEST_STATE, find_duplicated_ops
from fxpart.pricing.partition import price
from fxpart.program.edges import find_value_edges
from fxpart.program.spec import ProgramSpec, ValueSpec

pytestmark = pytest.mark.slow

LAYERS = 4


@cache
def program_of(family: str, stages: int) -> tuple[fxpart.Program, dict[str, torch.Tensor]]:
    model, batch = replace(FAMILIES[family], dtype=torch.float32).build(LAYERS)
    return fxpart.compile(
        model, f"local:{stages}", example_kwargs=batch, constraints={"stages": stages},
        microbatches=2, check="off",
    ), batch  # fmt: skip


def received(spec: ProgramSpec, stage: int) -> list[ValueSpec]:
    found = spec.stages[stage]
    return [v for v, k in zip(found.inputs, found.sources, strict=True) if k >= 0]


def kind(value: ValueSpec, family: str) -> str:
    """The role of a value, by its shape."""
    if family == "t5" and len(value.shape) == 4:
        return "position bias"
    assert len(value.shape) == 3 and value.shape[-1] == WIDTH, value
    return "hidden state"


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_hidden_state_crosses_and_nothing_else(family: str, stages: int) -> None:
    program, _ = program_of(family, stages)
    spec = program.spec
    for stage in range(1, stages):
        values = received(spec, stage)
        assert all(value.requires_grad for value in values)
        kinds = sorted(kind(value, family) for value in values)
        if family != "t5":
            assert kinds == ["hidden state"]
            continue
        lengths = [value.shape[1] for value in values if len(value.shape) == 3]
        assert len(set(lengths)) == len(lengths) <= 2  # of the decoder, and the encoder's output
        assert kinds.count("position bias") <= 1


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_a_single_process(family: str, stages: int) -> None:
    program, batch = program_of(family, stages)
    assert program.verify(steps=2, batch=batch).passed


@pytest.mark.parametrize("family", FAMILIES)
def test_predicted_bytes_are_those_that_are_sent(family: str) -> None:
    """Of every boundary between two blocks, at the rows of a microbatch."""
    model, batch = FAMILIES[family].build(2)
    captured = captured_of(model, batch)
    graph = prepared(captured)
    inputs = tensors(captured, batch)
    problem, _ = price(
        graph, captured, Cluster.local(2), batch_size=captured.batch_size, microbatches=1
    )
    for start in range(1, len(problem.blocks)):
        if start - 1 in graph.meta[NO_CUT_KEY]:
            continue
        expected = sorted(
            size
            for value, size in zip(problem.values, problem.variants[0].value_bytes, strict=True)
            if value.sent and value.producer < start <= value.consumers[-1]
        )
        stages = Stages(captured, assigned(graph, (0, start)))
        values = stages.run(inputs, key=0)
        sent = sorted(values[edge.name].nbytes for edge in find_value_edges(stages.spec))
        assert sent == expected


class Table(nn.Module):
    """Two layers that read a table, which is made before them in several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Sequential(nn.Linear(4, 128), nn.Linear(128, 4))
        self.last = nn.Linear(4, 4)
        rows = LARGEST_STATE // 16 + 1 if how == "large buffer" else 8
        self.register_buffer("table", torch.arange(4.0 * rows).view(rows, 4))
        self.weight = nn.Parameter(torch.ones(4), requires_grad=how != "frozen parameter")

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        match self.how:
            case "buffer" | "large buffer":
                table = self.table[ids].cos()
            case "inputs":
                table = (ids[:, None] + torch.arange(4, device=ids.device)).sin()
            case "random":
                table = torch.rand_like(x)
            case "written":
                self.table.add_(1.0)
                table = self.table[: x.shape[1]].sum(0)
            case "costly":
                table = torch.matrix_exp(x.unsqueeze(-1) * x.unsqueeze(-2)).sum(-1)
                for _ in range(20):
                    table = (table @ table.mT @ table).tanh()
            case _:
                table = self.weight * 2.0
        return (self.last(self.first(x) * table) * table).square().mean()


@pytest.mark.parametrize(
    ("how", "sent"),
    [
        ("buffer", False), ("inputs", False), ("large buffer", True), ("random", True),
        ("costly", True), ("parameter", True), ("frozen parameter", True),
    ],
)  # fmt: skip
def test_cheap_constant_values_are_not_sent(how: str, sent: bool) -> None:
    batch = (torch.randn(6, 4), torch.arange(6) % 8)
    captured = captured_of(Table(how), batch)
    graph = prepared(captured)
    last = len(graph.meta[BLOCKS_KEY]) - 1
    stages = check_equal(captured, assigned(graph, (0, last)), tensors(captured, batch))
    assert len(received(stages.spec, 1)) == 1 + sent
    assert all(bool(s.random_ops) <= (how == "random") for s in stages.spec.stages)


def test_reads_of_written_state_are_not_duplicated() -> None:
    captured = captured_of(Table("written"), (torch.randn(6, 4), torch.arange(6)))
    graph = prepared(captured).graph
    assert not find_duplicated_ops(graph)
