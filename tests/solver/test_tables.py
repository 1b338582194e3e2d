"""Interval tables against the objective, entry by entry."""

from __future__ import annotations

import numpy as np
import pytest
from partition_problems import random_problem, transformer

from fxpart.solver.objective import PartitionScorer
from fxpart.solver.tables import PartitionTables


def check(seed: int) -> int:
    problem = random_problem(seed)
    tables, scorer = PartitionTables(problem), PartitionScorer(problem)
    entries = 0
    for v, one in enumerate(problem.variants):
        for k, device in enumerate(problem.devices):
            table = tables.variant(v).stage(k)
            for i in range(tables.units):
                for w in range(tables.units):
                    if i + w >= tables.units:
                        assert table.seconds[i, w] == table.load[i, w] == np.inf
                        assert table.flights[i, w] == -1
                        continue
                    first, last = int(tables.firsts[i]), int(tables.lasts[i + w])
                    stage = scorer.stage(one, k, first, last, 1)
                    load = (one.microbatches - 1) * stage.seconds + stage.step_only_seconds
                    assert table.seconds[i, w] == pytest.approx(stage.seconds, rel=1e-12, abs=1e-12)
                    assert table.load[i, w] == pytest.approx(load, rel=1e-12, abs=1e-12)
                    flights = int(table.flights[i, w])
                    most = min(flights, 1000)
                    if most >= 0:
                        held = scorer.stage(one, k, first, last, most).needed
                        assert held <= device.memory
                    more = scorer.stage(one, k, first, last, flights + 1).needed
                    assert flights >= 1000 or more > device.memory
                    entries += 1
    return entries


@pytest.mark.slow
def test_entries_are_what_the_objective_says() -> None:
    assert sum(check(seed) for seed in range(60)) > 2000


def test_units_merge_what_may_not_be_cut() -> None:
    for seed in range(50):
        problem = random_problem(seed)
        tables = PartitionTables(problem)
        n = len(problem.blocks)
        cuts = [b for b in range(n - 1) if b not in problem.no_cut_after]
        assert tables.lasts.tolist() == [*cuts, n - 1]
        assert tables.firsts.tolist() == [0, *(b + 1 for b in cuts)]


def test_devices_of_equal_costs_share_a_table() -> None:
    problem = transformer(layers=3, hidden=64, devices=6, host=2, kinds=2)
    tables = PartitionTables(problem)
    assert tables.kinds == (0, 1, 2, 2, 4, 4)  # first, same host, slower type, slower link
    costs = tables.variant(0)
    assert costs.stage(3) is costs.stage(2)
    assert costs.stage(4) is not costs.stage(2)
