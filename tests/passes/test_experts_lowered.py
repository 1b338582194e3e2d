"""Mixtures in whole models: annotated, propagated, lowered, run on mesh ranks, equal to one
piece."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from fxpart.passes import PREPARE, all_passes
from local_runs import assert_same, lower_all, run_lanes, run_whole
from ranks import Pool
from sharded_graphs import propagated, shardings
from torch import fx
from zoo import ZOO
from zoo_entry import Built
from zoo_language import _LLAMA, _causal

import fxpart
from fxpart.capture import CapturedModel, capture
from fxpart.compiler import PassManager

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


def built(**options: bool) -> Built:
    """Mixtral of two layers, seeded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _causal(
            "MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2,
            **{**_LLAMA, "num_hidden_layers": 2, **options},
        )()  # fmt: skip


@cache
def mixtral(losses: bool) -> tuple[fx.GraphModule, CapturedModel, list[torch.Tensor]]:
    """Prepared, with its inputs. losses: the router's own loss too."""
    made = built(output_router_logits=losses)
    held = capture(made.model, made.batch, loss=None, batch_size=made.batch_size)
    given = [made.batch[spec.path[0]] for spec in held.inputs]
    return PassManager(all_passes()).run(PREPARE, held.graph), held, given


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
    wanted = run_whole(graph, held.state, given, 1)
    got = run_lanes(lower_all(placed), held.state, given, 1, wanted)
    assert_same(got, wanted, rtol=1e-6)
    if not losses:
        axis = mesh.partition("=")[0]
        assert got.calls.get(("all_to_all", axis), 0) == sent
        reduced = {a: n for (kind, a), n in got.calls.items() if kind == "all_reduce"}
        assert reduced == summed


def _trained(mesh: str, seeds: dict[str, str]) -> tuple[bool, float]:
    """On every rank: whether three AdamW steps agree with one process, and the difference."""
    made = built()
    program = fxpart.compile(
        fxpart.annotate(made.model, seeds), f"local:{torch.distributed.get_world_size()}",
        example_inputs=made.batch, microbatches=2, optimizer="adamw",
        constraints={"mesh": mesh, "stages": 1, "placements": "annotated"},
    )  # fmt: skip
    assert ("experts_dispatched" if seeds == SHARED else "experts_cut") in program.sources[0]
    found = program.verify(steps=3)
    return found.passed, found.largest


@pytest.mark.slow
@pytest.mark.skipif(not ZOO["mixtral"].available, reason="needs transformers")
@pytest.mark.parametrize(
    ("mesh", "seeds", "ranks"),
    [("dp=2", SHARED, 2), ("dp=2,ep=2", EXPERTS, 4)],
)
def test_mixtral_over_gloo(pool: Pool, mesh: str, seeds: dict[str, str], ranks: int) -> None:
    for passed, largest in pool.run(_trained, mesh, seeds, ranks=ranks, timeout=240):
        assert passed and largest <= 1e-6
