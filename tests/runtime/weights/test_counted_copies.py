"""Copies that a stage really holds, against those counted from the schedule for the planner."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fxpart.runtime.weights import StageWeights
from fxpart.schedule.action import ActionKind
from fxpart.schedule.builders import asynchronous
from fxpart.schedule.versions import WeightVersionCounters, count_chain_warmup
from fxpart.schedule.weight_copies import count_weight_copies
from fxpart.schedule.weight_modes import MODES

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


SHAPES = ((2, 1), (4, 1), (4, 2), (4, 5))
CASES = [
    (name, stages, every)
    for name, mode in MODES.items()
    for stages, every in SHAPES
    if not mode.flush and (mode.base != "delayed" or every >= stages)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages", "every"), CASES)
def test_as_many_as_are_counted(name: str, stages: int, every: int) -> None:
    """The most at once over a stream, stage by stage, for every mode."""
    mode, versions = MODES[name], WeightVersionCounters(count_chain_warmup(stages), every)
    schedule = asynchronous(stages, 3 * stages + 4 * every)
    for stage, actions in enumerate(schedule.ranks):
        layer = torch.nn.Linear(2, 2, bias=False)
        optimizer = torch.optim.NAdam if mode.optimizer else SGD
        made = optimizer(layer.parameters())
        weights = StageWeights(layer, made, mode, versions, stage, total_updates=100)
        outputs: dict[int, torch.Tensor] = {}
        for action in actions:
            m = action.microbatch
            if action.kind is ActionKind.F:
                with weights.forward(m):
                    outputs[m] = layer(torch.ones(1, 2))
                continue
            with weights.backward(m):
                outputs.pop(m).sum().backward()
            if (m + 1) % every == 0:
                weights.update()
                made.zero_grad()
        counted = count_weight_copies(mode, versions, stage)
        assert weights.most == counted.kept + counted.transient
