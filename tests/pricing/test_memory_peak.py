"""Predicted peaks of stages beside what torch's allocator really gave, forward and backward."""

from __future__ import annotations

import msgspec
import pytest
import torch
from zoo import ZOO
from zoo_graphs import captured, inputs, prepared

from fxpart.cluster.model import Cluster
from fxpart.planner.plan_builder import rank_prediction
from fxpart.pricing.live_tensors import StagePeak
from fxpart.pricing.memory import find_needed_nodes
from fxpart.pricing.partition import price
from fxpart.pricing.specs import Specs, annotation
from fxpart.pricing.variants import BatchSplit, Sizes
from fxpart.pricing.weights import trained_names
from fxpart.profiling.memory import allocations
from fxpart.solver.objective import evaluate
from fxpart.solver.problem import PartitionChoice


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "gpt2", "llama", "vit", "bert"])
def test_the_peak_of_a_microbatch(name: str) -> None:
    """One stage, gradients there already: never under by more than 3 %, over by at most 10 %."""
    if not ZOO[name].available:
        pytest.skip(f"{ZOO[name].needs} is not installed")
    model, graph, batch = captured(name), prepared(name), inputs(name)
    rows = model.batch_size
    problem, _ = price(graph, model, Cluster.local(1), batch_size=rows, microbatches=1)
    cost = evaluate(problem, PartitionChoice(variant=0, schedule="1f1b", starts=(0,))).stages[0]
    entry = msgspec.structs.replace(rank_prediction(0, (0,), cost, None, problem), in_flight=1)
    alive = find_needed_nodes(graph.graph)
    nodes = [n for n in graph.graph.nodes if n in alive and annotation(n).block is not None]
    follow = StagePeak(
        nodes, problem.weights, Specs(trained_names(model)), Sizes(model, BatchSplit(rows, 1))
    )
    found = follow.with_peak(entry, microbatches=2)
    memory = entry.memory
    fixed = memory.weights + memory.gradients + memory.optimizer + memory.buffers
    assert len(found.top) == 10
    assert [t.bytes for t in found.top] == sorted((t.bytes for t in found.top), reverse=True)

    def run() -> None:
        graph(0, *batch)[0].backward()

    with torch.random.fork_rng(devices=[]):
        run()
        real = allocations(run).peak
    graph.zero_grad()
    # vit's peak is the backward of its patches' convolution, whose copies are taken from above
    assert 0.97 <= (found.peak - fixed) / real <= (1.20 if name == "vit" else 1.10)
