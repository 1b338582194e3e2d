"""Random models x random valid splits: ops once or duplicated, one owner each, equality."""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import RandomModel, random_models, random_starts
from stage_runs import assigned, captured_of, check_equal, prepared, tensors

from fxpart.codegen.dataflow import find_live_nodes, is_op, outputs_of, writes
from fxpart.compiler import BLOCKS_KEY, NO_CUT_KEY
from fxpart.compiler.duplicated_ops import find_duplicated_ops
from fxpart.program.edges import find_value_edges

FEW = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(FEW, max_examples=40)


def split_anyhow(data: Any, model: RandomModel) -> tuple[Any, Any, Any]:
    batch = model.batch()
    captured = captured_of(model.build(), batch, batch_size=4, batch_dims={"mask": None})
    graph = prepared(captured)
    starts = data.draw(random_starts(len(graph.meta[BLOCKS_KEY]), graph.meta[NO_CUT_KEY]))
    return captured, assigned(graph, starts), tensors(captured, batch)


@pytest.mark.slow
@FEW
@given(random_models(exact=True, longest=6), st.data())
def test_exact_models_are_bit_equal(model: RandomModel, data: Any) -> None:
    captured, graph, inputs = split_anyhow(data, model)
    stages = check_equal(captured, graph, inputs, exact=True)
    every_op_once(graph, stages)
    one_owner(stages)


@pytest.mark.slow
@MANY
@given(random_models(exact=True), st.data())
def test_more_exact_models_are_bit_equal(model: RandomModel, data: Any) -> None:
    captured, graph, inputs = split_anyhow(data, model)
    stages = check_equal(captured, graph, inputs, exact=True)
    every_op_once(graph, stages)
    one_owner(stages)


@pytest.mark.slow
@MANY
@given(random_models(), st.data())
def test_any_models_are_equal(model: RandomModel, data: Any) -> None:
    captured, graph, inputs = split_anyhow(data, model)
    stages = check_equal(captured, graph, inputs)
    every_op_once(graph, stages)
    one_owner(stages)
    for source in stages.sources:
        ast.parse(source)


def every_op_once(graph: Any, stages: Any) -> None:
    needed = find_live_nodes([outputs_of(graph.graph)[0], *writes(graph.graph).writers])
    expected = Counter(n.name for n in graph.graph.nodes if n in needed and is_op(n))
    placed = Counter(
        node.name
        for stage in stages.graphs
        for node in stage.graph.nodes
        if node.op == "call_function" and "fxpart" in node.meta and is_op(node)
    )
    duplicated = {n.name for n in find_duplicated_ops(graph.graph)}
    assert placed.keys() == expected.keys()
    assert all(count == 1 for name, count in placed.items() if name not in duplicated)
    received = {edge.name for edge in find_value_edges(stages.spec)}
    assert not received & duplicated
    for stage in stages.graphs:
        assert all(node.users for node in stage.graph.nodes if node.name in duplicated)


def one_owner(stages: Any) -> None:
    owners: dict[str, set[int]] = {}
    holders: dict[str, list[int]] = {}
    for stage in stages.spec.stages:
        for state in stage.state:
            owners.setdefault(state.name, set()).add(state.owner)
            holders.setdefault(state.name, []).append(stage.index)
    for name, owner in owners.items():
        assert owner == {min(holders[name])}
    parameters = set(stages.captured.parameters)
    tied = {n: tuple(h) for n, h in holders.items() if len(h) > 1 and n in parameters}
    assert stages.spec.ties == tied
    assert set(stages.spec.unused) == set(stages.captured.state) - set(holders)
