"""Short time, a user who stops, equal runs, progress."""

from __future__ import annotations

from math import inf

import msgspec
import pytest
from benchmarks.maxload.instance import Instance, Mode, Node, evaluate, faults
from benchmarks.maxload.instances import random_instance, transformer
from benchmarks.maxload.portfolio import solve

from fxpart.errors import FxpartError

BRANCHES = 14


def branches() -> Instance:
    """Two to the 14th ideals and more; what they share has many consumers."""
    nodes = [Node(id=0, accelerator=1.0, transfer=0.3)]
    nodes += [
        Node(id=i, accelerator=1 + i % 5 / 7, transfer=0.1 * (i % 3), bytes=1)
        for i in range(1, 2 * BRANCHES + 1)
    ]
    edges = [(0, i) for i in range(1, BRANCHES + 1)]
    edges += [(i, i + BRANCHES) for i in range(1, BRANCHES + 1)]
    return Instance(nodes=tuple(nodes), edges=tuple(edges), accelerators=4, cpus=0, memory=12)


@pytest.mark.parametrize("mode", ["chain", "any"])
@pytest.mark.parametrize("solver", ["auto", "dp", "cp-sat"])
def test_no_time_at_all_still_gives_a_valid_answer(mode: Mode, solver: str) -> None:
    for instance in (branches(), transformer(12, 6, cpus=1)):
        found = solve(instance, mode=mode, solver=solver, time_limit=0)
        assert found.assignment is not None
        assert faults(instance, found.assignment, mode) == []
        assert found.objective == evaluate(instance, found.assignment)
        assert 0 < found.lower_bound <= found.objective
        assert found.status in ("best found", "within gap", "optimal")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["chain", "any"])
@pytest.mark.parametrize("name", ["branches", "ops"])
def test_one_second_gives_a_valid_answer(mode: Mode, name: str) -> None:
    instance = branches() if name == "branches" else transformer(96, 8, cpus=1)
    found = solve(instance, mode=mode, time_limit=1)
    assert found.assignment is not None
    assert faults(instance, found.assignment, mode) == []
    assert 0 < found.lower_bound <= found.objective


@pytest.mark.parametrize("mode,solver", [("chain", "dp"), ("chain", "cp-sat"), ("any", "cp-sat")])
def test_whoever_stops_gets_the_best_so_far(mode: Mode, solver: str) -> None:
    """Stopped at the first, the second, ... time that the solver asks."""
    instance = random_instance(5) if mode == "any" else transformer(2, 3)
    proven = solve(instance, mode=mode, solver=solver)
    statuses = set()
    for patience in (0, 3, 10, 30, 100, 1000, 100_000):
        asked = 0

        def stopped(patience: int = patience) -> bool:
            nonlocal asked
            asked += 1
            return asked > patience

        found = solve(instance, mode=mode, solver=solver, stopped=stopped)
        statuses.add(found.status)
        if found.assignment is not None:
            assert faults(instance, found.assignment, mode) == []
        assert found.objective >= proven.objective * (1 - 1e-9)
        assert found.lower_bound <= proven.objective * (1 + 1e-9)
    assert "optimal" in statuses


@pytest.mark.slow
@pytest.mark.parametrize("mode,solver", [("chain", "dp"), ("chain", "cp-sat"), ("any", "cp-sat")])
def test_equal_runs_give_equal_bytes(mode: Mode, solver: str) -> None:
    for instance in (random_instance(3), random_instance(11), branches()):
        if mode == "any" and instance == branches():
            continue
        first, second = (
            msgspec.json.encode(solve(instance, mode=mode, solver=solver, seed=4)) for _ in range(2)
        )
        assert first == second


@pytest.mark.slow
def test_progress_closes_in() -> None:
    told: list[tuple[float, float]] = []
    found = solve(branches(), progress=lambda best, bound: told.append((best, bound)))
    assert len(told) > 1
    bests, bounds = zip(*told, strict=True)
    assert list(bests) == sorted(bests, reverse=True) and list(bounds) == sorted(bounds)
    assert all(bound <= best for best, bound in told)
    assert bests[-1] == found.objective and found.status == "optimal"


def test_what_cannot_be_solved_is_refused() -> None:
    for wrong in ({"mode": "ring"}, {"solver": "oracle"}, {"time_limit": -1.0}):
        with pytest.raises(FxpartError, match="FXP109"):
            solve(random_instance(0), **wrong)  # type: ignore[arg-type]
    node = Node(id=1, accelerator=-1.0, cpu=inf, bytes=float("nan"), transfer=1e300)
    bad = Instance(nodes=(node, node), edges=((0, 2),), accelerators=0, memory=-1)
    with pytest.raises(FxpartError) as failure:
        solve(bad)
    text = str(failure.value)
    for words in (
        "several",
        "accelerator",
        "cpu",
        "bytes",
        "transfer",
        "(0, 2)",
        "memory",
        "devices",
    ):
        assert words in text
