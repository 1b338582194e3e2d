"""Predicted bytes of saved, received and sent tensors against autograd on real tensors, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from held_bytes import check_held, even_starts, first_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import RandomModel, random_models, random_starts
from stage_runs import captured_of, prepared, tensors
from torch import nn
from zoo import ZOO
from zoo_graphs import captured, inputs
from zoo_graphs import prepared as prepared_zoo

from fxpart.compiler import BLOCKS_KEY, NO_CUT_KEY
from fxpart.compiler.kernel_memory import LstmWorkspace, lstm_workspace


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ZOO))
def test_every_stage_of_the_zoo(name: str) -> None:
    """One, two and three stages, at the captured batch and, where it is a symbol, at half of it."""
    if not ZOO[name].available:
        pytest.skip(f"{ZOO[name].needs} is not installed")
    model, graph, batch = captured(name), prepared_zoo(name), inputs(name)
    full = model.batch_size
    for rows in sorted({full, max(1, full // 2)} if model.symbolic else {full}):
        for stages in (1, 2, 3):
            starts = even_starts(len(graph.meta[BLOCKS_KEY]), stages)
            check_held(model, graph, starts, first_rows(model, batch, rows))


def check_random(model: RandomModel, data: Any) -> None:
    """Any cut of a random model, at its batch and at another one."""
    found = captured_of(model.build(), model.batch(), batch_size=4, batch_dims={"mask": None})
    graph = prepared(found)
    starts = data.draw(random_starts(len(graph.meta[BLOCKS_KEY]), graph.meta[NO_CUT_KEY]))
    batch = tensors(found, model.batch())
    for rows in (4, 3) if found.symbolic else (4,):
        check_held(found, graph, starts, first_rows(found, batch, rows))


FEW = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@FEW
@given(random_models(longest=6), st.data())
def test_random_models(model: RandomModel, data: Any) -> None:
    check_random(model, data)


@pytest.mark.slow
@settings(FEW, max_examples=40)
@given(random_models(), st.data())
def test_many_random_models(model: RandomModel, data: Any) -> None:
    check_random(model, data)


class _Lstm(nn.Module):
    """An LSTM and the mean of all it gives."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (h, c) = self.lstm(x)
        return y.mean() + h.sum() + c.sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"batch_first": True},
        {"batch_first": True, "num_layers": 2, "dropout": 0.5},
        {"batch_first": True, "num_layers": 3, "bidirectional": True},
        {"batch_first": True, "bias": False},
    ],
    ids=str,
)
def test_lstm_with_onednns_workspace(options: dict[str, Any]) -> None:
    """Fake tensors tell neither the workspace nor that one layer is one op."""
    x = torch.randn(4, 5, 8)
    found = captured_of(_Lstm(**options), (x,), batch_size=4)
    graph = prepared(found)
    for rows in (4, 3):
        check_held(found, graph, (0,), [x[:rows].clone()])


def test_workspaces_of_long_sequences_are_extrapolated() -> None:
    rows = sympy.Symbol("rows")
    whole = LstmWorkspace(sympy.Integer(40), rows, sympy.Integer(32), sympy.Integer(64))
    assert whole.free_symbols == {rows}
    assert int(whole.xreplace({rows: sympy.Integer(8)})) == lstm_workspace(40, 8, 32, 64)
    long = lstm_workspace(600, 64, 128, 128)  # small enough to be measured
    step = (lstm_workspace(16, 64, 128, 128) - lstm_workspace(8, 64, 128, 128)) / 8
    assert 600 * step == pytest.approx(long, rel=0.02)
