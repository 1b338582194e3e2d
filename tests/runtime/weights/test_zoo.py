"""Stages of many models: no bit changes where weights are read by way of handles and swaps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from stage_runs import Stages, assigned, captured_of, prepared, tensors
from torch import nn
from zoo import ZOO
from zoo_small import SMALL

from fxpart.compiler import BLOCKS_KEY, NO_CUT_KEY
from fxpart.runtime.weights import StageWeights
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import MODES, WeightMode

# Both read predictions, which before the first update are copies of the weights.
BOTH = WeightMode(
    "both", backward="applied", look_forward="depth", look_backward="depth", flush=True
)
QUICK = ("shared_mlp", "graph_net", "dropouts", "regions", "frozen")
SLOW = [name for name in (*SMALL, "unet", "llama", "mamba", "bert") if name not in QUICK]


class Versioned(Stages):
    """The same stages, each under its :class:`StageWeights`."""

    def under(self, mode: WeightMode) -> None:
        """Give every stage its weights."""
        ahead = tuple(range(len(self.modules) + 1, 1, -1))
        self.weights = []
        for k, module in enumerate(self.modules):
            parameters = [p for p in module.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(parameters or [nn.Parameter(torch.empty(0))], lr=0.1)
            versions = WeightVersionCounters(ahead, 10**6)
            self.weights.append(StageWeights(module, optimizer, mode, versions, k))

    def run(self, inputs: Any, key: int, weight: float = 1.0) -> dict[str, torch.Tensor]:
        plain, self.number = self.modules, key
        self.modules = [partial(self._forward, k, m) for k, m in enumerate(plain)]  # type: ignore[misc]
        try:
            return super().run(inputs, key, weight)
        finally:
            self.modules = plain

    def _forward(self, k: int, module: nn.Module, *given: Any) -> Any:
        with self.weights[k].forward(self.number):
            return module(*given)

    def _backward(self, *given: Any) -> None:
        with ExitStack() as all_stages:
            for weights in self.weights:
                all_stages.enter_context(weights.backward(self.number))
            super()._backward(*given)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_bits_of_plain_autograd(name: str) -> None:
    """Two microbatches one after the other: results, buffers, gradients."""
    if not ZOO[name].available:
        pytest.skip(f"{name} needs {ZOO[name].needs}")
    built = ZOO[name].build()
    captured = captured_of(
        built.model, built.batch, built.loss, batch_size=built.batch_size,
        batch_dims=built.batch_dims,
    )  # fmt: skip
    graph = prepared(captured)
    middle = len(graph.meta[BLOCKS_KEY]) // 2
    open_ = [b for b in range(middle, 0, -1) if b - 1 not in graph.meta[NO_CUT_KEY]]
    graph = assigned(graph, [0, *open_[:1]])
    inputs = tensors(captured, built.batch)
    for mode in (MODES["naive"], BOTH):
        expected, stages = Stages(captured, graph), Versioned(captured, graph)
        stages.under(mode)
        for key in range(2):
            same(expected.run(inputs, key), stages.run(inputs, key))
        same(expected.gradients(), stages.gradients())
        same(expected.state(), stages.state())
        assert all(w.bytes() == 0 for w in stages.weights)
        swaps = [w.most - 1 for w in stages.weights]
        assert swaps == [int(mode is BOTH)] * len(swaps)


def same(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    """The same names and bits."""
    assert expected.keys() == found.keys() and expected
    assert not [n for n in expected if not torch.equal(expected[n], found[n])]
