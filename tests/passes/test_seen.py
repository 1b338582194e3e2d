"""What ops were seen to do is looked up in later graphs, where that holds for them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sympy
import torch
from fxpart.passes import PREPARE, all_passes
from fxpart.passes.annotate import AnnotatePass
from fxpart.passes.lower import LowerPass
from fxpart.passes.lowering.local_values import FakeCallRunner
from fxpart.passes.propagate import PropagatePass
from torch import fx, nn
from zoo import ZOO

from fxpart import compat
from fxpart.capture import capture
from fxpart.compiler import KEY, PassManager, observation_cache
from fxpart.compiler.graph_edit import value
from fxpart.compiler.op_behavior import StorageAnalysis
from fxpart.compiler.tensor_sizes import expression, tensors


def marked(name: str) -> fx.GraphModule:
    built = ZOO[name].build()
    found = capture(built.model, built.batch, loss=built.loss, batch_size=built.batch_size)
    return PassManager(all_passes()).run("mark_gradients", found.graph)


def told(module: fx.GraphModule) -> list[Any]:
    """All that the pass says of each node."""
    notes = [(n.name, n.meta[KEY]) for n in module.graph.nodes]
    return [(name, a.requires_grad, a.saved, a.working) for name, a in notes]


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that were run on stand-ins, from an empty table on."""
    observation_cache._table.cache_clear()
    found: list[str] = []
    observe = StorageAnalysis._observe

    def counted(self: StorageAnalysis, node: fx.Node) -> Any:
        found.append(node.name)
        return observe(self, node)

    monkeypatch.setattr(StorageAnalysis, "_observe", counted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "lstm", "frozen"])
def test_a_model_captured_again_is_not_observed_again(name: str, observed: list[str]) -> None:
    first = told(marked(name))
    assert observed
    observed.clear()
    assert told(marked(name)) == first
    assert observed == []
    observation_cache._table.cache_clear()
    assert told(marked(name)) == first
    assert observed


@pytest.mark.slow
def test_other_batches_and_settings_are_other_surroundings(observed: list[str]) -> None:
    def mark(rows: int) -> None:
        given = (torch.ones(rows, 3),)
        graph = capture(nn.Linear(3, 3), given, loss=lambda out: out.sum()).graph
        PassManager(all_passes()).run("mark_gradients", graph)

    mark(4)
    count = len(observed)
    mark(4)
    assert len(observed) == count
    mark(6)
    assert len(observed) == 2 * count
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        mark(6)
    assert len(observed) == 3 * count


def lowered(tensor_ranks: int) -> list[Any]:
    """The local tensors of a rank; of an MLP with a symbolic batch, captured anew."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Unflatten(1, (8, 2)), nn.Flatten())
    batch = (torch.ones(6, 8),)
    graph = capture(model, batch, loss=lambda out: out.sum(), batch_size=6).graph
    manager = PassManager(all_passes())
    seeds = AnnotatePass(f"dp=2,tp={tensor_ranks}", json.dumps({"0.weight": "tp:S(0)"}))
    prepared = manager.run(PREPARE, graph)
    local = manager.run([seeds, PropagatePass(), LowerPass()], prepared)
    found = [(node.name, tensors(value(node))) for node in local.graph.nodes]
    return [
        (name, [(*map(expression, (*t.shape, *t.stride())), t.dtype) for t in held])
        for name, held in found
    ]


def test_equal_local_calls_of_two_graphs_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    observation_cache._table.cache_clear()
    ran: list[str] = []
    run = FakeCallRunner._run

    def counted(self: FakeCallRunner, node: fx.Node, *rest: Any) -> Any:
        ran.append(node.name)
        return run(self, node, *rest)

    monkeypatch.setattr(FakeCallRunner, "_run", counted)
    first = lowered(2)
    count = len(ran)
    assert count > 0
    assert lowered(2) == first
    assert len(ran) == count
    assert lowered(4) != first
    assert len(ran) > count


def test_symbols_that_data_decide_have_other_names_elsewhere() -> None:
    rows, found = sympy.symbols("s0 u0", integer=True)
    signature = ("op", ("list", ((rows, 3), torch.float32)))
    assert observation_cache.is_reusable_size([4, 3 * rows], signature)
    assert not observation_cache.is_reusable_size([found], signature)


def test_facts_of_symbols() -> None:
    modes = [compat.fake_mode(symbolic=True) for _ in range(3)]
    for mode, rows in zip(modes, (5, 5, 6), strict=True):
        compat.symbolic_input(mode, torch.ones(rows, 3), [True, False])
    facts = [compat.symbol_facts(mode) for mode in modes]
    assert facts[0] == facts[1] != facts[2]
    assert compat.symbol_facts(None) == ()
