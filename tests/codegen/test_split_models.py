"""Stages of the zoo's models equal the unsplit graph: loss, gradients, buffers."""

from __future__ import annotations

import random

import pytest
from stage_runs import assigned, captured_of, check_equal, prepared, tensors
from zoo import ZOO

from fxpart.compiler import BLOCKS_KEY, NO_CUT_KEY

QUICK = ("mlp", "shared_mlp", "frozen", "side_mask", "dropouts", "graph_net")


def equal_on_random_splits(name: str) -> None:
    entry = ZOO[name]
    if not entry.available:
        pytest.skip(f"{name} needs {entry.needs}")
    built = entry.build()
    captured = captured_of(
        built.model,
        built.batch,
        built.loss,
        batch_size=built.batch_size,
        batch_dims=built.batch_dims,
    )
    graph = prepared(captured)
    blocks, closed = len(graph.meta[BLOCKS_KEY]), set(graph.meta[NO_CUT_KEY])
    possible = [b + 1 for b in range(blocks - 1) if b not in closed]
    choose = random.Random(name)
    for stages in (2, 4):
        starts = [0, *sorted(choose.sample(possible, min(stages - 1, len(possible))))]
        check_equal(captured, assigned(graph, starts), tensors(captured, built.batch))


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_small_models(name: str) -> None:
    equal_on_random_splits(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name not in QUICK])
def test_all_models(name: str) -> None:
    equal_on_random_splits(name)
