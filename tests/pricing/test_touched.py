"""What sparse gradients of tables are counted as: rows that are asked for, never the table."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from fxpart.passes import PREPARE, all_passes
from sparse_models import batch, model, program

from fxpart.capture import capture
from fxpart.cluster.model import Cluster
from fxpart.compat.optimizer_choice import choose
from fxpart.compiler import PassManager
from fxpart.compiler.sparse_lookups import sparse_tables
from fxpart.pricing.sparse_gradients import find_large_embedding_tables, touched_bytes
from fxpart.pricing.weights import step_seconds, trained_names, weights

pytestmark = pytest.mark.slow

ROW = 4 * 4 + 8  # four numbers and their row's


@cache
def prepared(again: bool) -> Any:
    """The model's graph, and what was captured."""
    held = capture(model(trained=True, again=again), batch(0), loss=None)
    return PassManager(all_passes()).run(PREPARE, held.graph), held


@pytest.mark.parametrize("again", [False, True])
def test_rows_of_the_batch_are_counted(again: bool) -> None:
    graph, _ = prepared(again)
    assert set(sparse_tables(graph.graph)) == {"bags.weight", "ids.weight"}
    found = touched_bytes(graph.graph)
    assert found["bags.weight"] == 2 * 32 * ROW
    assert found["ids.weight"] == 2 * (32 + 16 * again) * ROW
    assert find_large_embedding_tables(graph.graph) == ["bags.weight", "ids.weight"]


def test_weights_have_the_real_optimizers_state() -> None:
    graph, held = prepared(False)
    choice = choose({"*.weight": torch.optim.SparseAdam, "*": "sgd"})
    found = {w.name: w for w in weights(graph.graph, held, trained_names(held), choice)}
    table = found["bags.weight"]
    assert (table.weight, table.gradient) == (22 * 16, 2 * 32 * ROW)
    assert table.optimizer == 2 * table.weight + 22 * 8, "and its rows, numbered while it steps"
    assert found["first"].gradient == found["first"].weight and not found["first"].optimizer


def test_a_large_table_costs_the_optimizer_no_more_than_its_rows() -> None:
    graph, held = prepared(False)
    choice = choose({"*.weight": torch.optim.SparseAdam, "*": "sgd"})
    found = weights(graph.graph, held, trained_names(held), choice)
    (device,) = Cluster.local(1).devices

    def seconds(factor: int) -> float:
        large = tuple(
            msgspec.structs.replace(w, weight=w.weight * factor, optimizer=w.optimizer * factor)
            if w.name == "bags.weight" else w
            for w in found
        )  # fmt: skip
        return sum(step_seconds(large, 1 + max(b for w in found for b in w.blocks), device))

    assert seconds(10**8) == pytest.approx(seconds(10**7), rel=1e-6)
    assert seconds(100) < seconds(1_000) < seconds(10**7), "fewer rows are asked for twice"


def test_what_is_sent_is_priced_by_ids_and_rows() -> None:
    """Ids of eight bytes there, rows of 16 back, and gradients of 16."""
    cuts = (("input:*", "dp:S(0)"), ("bags.weight", "dp:S(0)"), ("ids.weight", "dp:S(0)"))
    made = program("sgd", 2, cuts, (("mesh", "dp=2"), ("stages", 1)))
    assert "embedding_bag_sent" in made.sources[0] and "embedding_sent" in made.sources[0]
    assert made.plan.prediction.ranks[0].collective_seconds > 0
