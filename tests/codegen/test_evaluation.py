"""Stages of the evaluation graph: weights stay where training put them, numbers are the model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stage_runs import assigned, captured_of, prepared, tensors
from torch import nn
from zoo import ZOO

from fxpart.codegen.evaluation_stages import assign_like
from fxpart.codegen.materialization import materialize
from fxpart.codegen.module_emitter import emit
from fxpart.codegen.stage_loader import load_stage
from fxpart.codegen.stage_split import split
from fxpart.compiler import BLOCKS_KEY, NO_CUT_KEY
from fxpart.errors import FxpartError

pytestmark = pytest.mark.slow


class Model(nn.Module):
    """Dropout, BatchNorm, a tie, a mask made of the input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.body = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.body:
            x = self.drop(torch.relu(layer(x)))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        mask = (ids != 0).unsqueeze(-1)
        return self.head(self.drop(x) * mask)


def check(model: nn.Module, batch: Any, loss: Any, **options: Any) -> None:
    captured = captured_of(model, batch, loss, **options)
    graph = prepared(captured)
    closed = set(graph.meta[NO_CUT_KEY])
    possible = [b for b in range(1, len(graph.meta[BLOCKS_KEY])) if b - 1 not in closed]
    train = assigned(graph, [0, *possible[:: max(1, len(possible) // 3)]][:4])
    train_spec, _ = split(train, captured)
    assert captured.again is not None
    other = captured.again(False)
    evaluated = assign_like(train, prepared(other))
    spec, stages = split(evaluated, other, keep_outputs=True)
    assert len(spec.stages) == len(train_spec.stages)
    holders: dict[str, set[int]] = {}
    for stage in train_spec.stages:
        for state in stage.state:
            holders.setdefault(state.name, set()).add(stage.index)
    for stage in spec.stages:
        for state in stage.state:
            if state.kind == "parameter":
                assert stage.index in holders[state.name], state.name
    values = dict(zip((s.name for s in spec.inputs), tensors(other, batch), strict=True))
    for stage in stages:
        module = load_stage(emit(stage), stage.spec)
        materialize(module, spec, other.state)
        with torch.no_grad():
            results = module(0, *(values[v.name] for v in stage.spec.inputs))
        values |= {v.name: t for v, t in zip(stage.spec.outputs, results, strict=True)}
    assert other.eager is not None
    model.eval()
    with torch.no_grad():
        expected = other.eager(batch)
    torch.testing.assert_close(values[spec.loss], expected[0], rtol=1e-5, atol=1e-6)
    for name, want in zip(spec.outputs, expected[1:], strict=True):
        torch.testing.assert_close(values[name], want, rtol=1e-5, atol=1e-5)


def test_dropout_norm_tie_and_mask() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (4, 3))

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    check(Model(), (ids,), loss, batch_size=4)


@pytest.mark.parametrize("name", ["shared_mlp", "dropouts", "gpt2", "t5", "resnet50"])
def test_zoo(name: str) -> None:
    entry = ZOO[name]
    if not entry.available:
        pytest.skip(f"{name} needs {entry.needs}")
    built = entry.build()
    check(built.model, built.batch, built.loss, batch_size=built.batch_size)


class Turned(nn.Module):
    """Runs its layers in another order in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers if self.training else reversed(self.layers):
            x = torch.relu(layer(x))
        return x.mean()


def test_another_order_in_evaluation_is_refused() -> None:
    captured = captured_of(Turned(), (torch.randn(4, 3),), lambda y: y, batch_size=4)
    graph = prepared(captured)
    train = assigned(graph, range(len(graph.meta[BLOCKS_KEY])))
    assert captured.again is not None
    with pytest.raises(FxpartError) as caught:
        assign_like(train, prepared(captured.again(False)))
    assert caught.value.code == "FXP201"
    assert "layers.0" in str(caught.value)
