"""Mixtures in whole models: annotated, propagated, lowered, run on lanes, equal to one piece."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from fxpart.passes import PREPARE
from local_runs import assert_same, lower_all, run_lanes, run_whole
from sharded_graphs import propagated, shardings
from torch import fx
from zoo import ZOO
from zoo_language import _LLAMA, _causal

from fxpart.capture import Captured, capture
from fxpart.pipeline import PassManager

DATA = {"input:*": "dp:S(0)"}
EXPERTS = {"*.experts.gate_up_proj": "ep:S(0)", "*.experts.down_proj": "ep:S(0)"}
SHARED = {key: text.replace("ep", "dp") for key, text in EXPERTS.items()}
INNER = {"*.experts.gate_up_proj": "tp:S(1,2)"}

# name -> mesh, annotations, the mixtures' strategy, calls of all-to-all and of all-reduce.
# With experts cut: in each of two layers the sum of what the experts add, and in the backward the
# gradients of tokens and of weights. Dispatch: counts, rows there and back, gradients likewise.
# The loss takes two: how many rows count, and their sum.
CASES = {
    "data": ("dp=2", DATA, ("t",), 0, {"dp": 2}),
    "expert": ("ep=2", EXPERTS, ("e",), 0, {"ep": 6}),
    "data and expert": ("dp=2,ep=2", DATA | EXPERTS, ("t", "e"), 0, {"ep": 6, "dp": 2}),
    "one axis": ("dp=2", DATA | SHARED, ("t&e",), 10, {"dp": 2}),
    "inner": ("tp=2", INNER, ("i",), 0, {"tp": 6}),
    "one axis and inner": (
        "dp=2,tp=2",
        DATA | {k: SHARED[k] + "," + INNER.get(k, "tp:S(2)") for k in SHARED},
        ("t&e", "i"),
        10,
        {"tp": 6, "dp": 2},
    ),
}


@cache
def mixtral(losses: bool) -> tuple[fx.GraphModule, Captured, list[torch.Tensor]]:
    """Two layers, prepared, with their inputs. losses: the router's own loss too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = {**_LLAMA, "num_hidden_layers": 2, "output_router_logits": losses}
        built = _causal(
            "MixtralForCausalLM",
            "MixtralConfig",
            num_local_experts=4,
            num_experts_per_tok=2,
            **options,
        )()
    held = capture(built.model, built.batch, loss=None, batch_size=built.batch_size)
    given = [built.batch[spec.path[0]] for spec in held.inputs]
    return PassManager().run(PREPARE, held.graph), held, given


@pytest.mark.slow
@pytest.mark.skipif(not ZOO["mixtral"].available, reason="needs transformers")
@pytest.mark.parametrize("losses", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_mixtral(name: str, losses: bool) -> None:
    graph, held, given = mixtral(losses)
    mesh, seeds, strategy, sent, summed = CASES[name]
    placed = propagated(graph, mesh, seeds, close=True)
    found = [s.strategy for n, s in shardings(placed).items() if n.startswith("experts_default")]
    assert found == [strategy] * 2
    got = run_lanes(placed, lower_all(placed), held.state, given, 1)
    assert_same(got, run_whole(graph, held.state, given, 1), rtol=1e-6)
    if not losses:
        axis = mesh.partition("=")[0]
        assert got.calls.get(("all_to_all", axis), 0) == sent
        reduced = {a: n for (kind, a), n in got.calls.items() if kind == "all_reduce"}
        assert reduced == summed
