"""Parameters that are cut over mesh ranks and gathered again in the backward: those that it
reads."""

from __future__ import annotations

import hand_lanes
import pytest
import torch

from fxpart.runtime import InProcess


@pytest.mark.parametrize("mode", ["stash", "naive", "spectrain"])
def test_cut_parameters_are_trained_as_whole_ones(mode: str) -> None:
    """Two mesh ranks of two stages, one update missed: with and without ZeRO-3, the same
    numbers."""
    found = {}
    for zero3 in (False, True):
        sgd = lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5)  # noqa: E731
        made = hand_lanes.trainer(
            InProcess(4), "dp=2", zero3=zero3, optimizer=sgd, weights=mode, microbatches=1
        )
        for seed in range(6):
            made.step(hand_lanes.batch(seed=seed))
        found[zero3] = made.state_dict()
        made.close()
    for name, tensor in found[False].items():
        torch.testing.assert_close(found[True][name], tensor)
