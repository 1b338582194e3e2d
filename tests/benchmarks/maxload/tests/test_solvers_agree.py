"""Both solvers and enumeration on the same random instances; every answer is valid."""

from __future__ import annotations

from collections import Counter

import pytest
from benchmarks.maxload.blocks import make_blocks
from benchmarks.maxload.bounds import cheap_bound
from benchmarks.maxload.instance import (
    Instance,
    MaxLoadAnswer,
    Mode,
    Node,
    bytes_held,
    evaluate,
    faults,
    groups,
)
from benchmarks.maxload.instances import random_instance, transformer
from benchmarks.maxload.portfolio import solve

from fxpart.errors import FxpartError

ROUNDING = 1e-9
STEPS = 2e-6  # CP-SAT's integers


def judged(instance: Instance, mode: Mode, answer: MaxLoadAnswer, best: MaxLoadAnswer) -> None:
    """An answer is valid and its numbers are its own; its bound is not above the optimum."""
    assert answer.lower_bound <= best.objective * (1 + ROUNDING)
    if answer.assignment is None:
        assert best.assignment is None or answer.status == "unknown"
        return
    assert faults(instance, answer.assignment, mode) == []
    assert answer.objective == evaluate(instance, answer.assignment)
    assert answer.objective >= best.objective * (1 - ROUNDING)
    assert answer.lower_bound <= answer.objective


def check(instance: Instance, mode: Mode) -> str:
    """All solvers on one instance; the status that enumeration gives."""
    best = solve(instance, mode=mode, solver="brute")
    for solver in ("dp", "cp-sat", "auto"):
        found = solve(instance, mode=mode, solver=solver)
        judged(instance, mode, found, best)
        if (solver, mode) != ("dp", "any"):
            assert found.status == best.status, solver
            assert found.objective == pytest.approx(best.objective, rel=STEPS, abs=0.0), solver
    assert cheap_bound(make_blocks(instance, mode)) <= best.objective * (1 + ROUNDING)
    return best.status


def features(instance: Instance) -> Counter[str]:
    """What a random instance exercises."""
    nodes = instance.nodes
    alone = set(groups(instance)) - {
        g for g, n in zip(groups(instance), nodes, strict=True) if not n.backward
    }
    shared = len(set(groups(instance))) < len(nodes)
    return Counter(
        cpus=min(instance.cpus, 1),
        several_cpus=int(instance.cpus > 1),
        tight=int(sum(n.bytes for n in nodes) > instance.memory),
        groups=int(shared),
        unable=int(not all(n.runs for n in nodes)),
        backward=int(any(n.backward for n in nodes)),
        backward_alone=int(bool(alone)),
    )


@pytest.mark.slow
def test_forty_random_instances() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        for mode in ("chain", "any"):
            seen[check(random_instance(seed), mode)] += 1
    assert seen["optimal"] > 40 and seen["infeasible"] > 4


@pytest.mark.slow
@pytest.mark.parametrize("start", range(40, 340, 100))
def test_three_hundred_random_instances(start: int) -> None:
    seen, what = Counter[str](), Counter[str]()
    for seed in range(start, start + 100):
        what += features(random_instance(seed))
        for mode in ("chain", "any"):
            seen[check(random_instance(seed), mode)] += 1
    assert seen["optimal"] > 100 and seen["infeasible"] > 10
    assert min(what.values()) >= 5 and len(what) == 7, what


def test_pieces_pay_where_the_ends_are_heavy() -> None:
    """Two heavy ends and a middle: a chain cannot put the ends together, any assignment can."""
    works = (1.0, 4.0, 1.0)
    nodes = tuple(Node(id=i, accelerator=w, transfer=0.1) for i, w in enumerate(works))
    ends = Instance(nodes=nodes, edges=((0, 1), (1, 2)), accelerators=2, memory=0)
    chain, loose = solve(ends, mode="chain"), solve(ends, mode="any")
    assert chain.status == loose.status == "optimal"
    assert chain.objective == pytest.approx(5.1)
    assert loose.objective == pytest.approx(4.2)
    assert loose.assignment is not None
    assert loose.assignment[0] == loose.assignment[2] != loose.assignment[1]


def test_memory_is_kept_where_it_costs_time() -> None:
    nodes = tuple(
        Node(id=i, accelerator=1.0, bytes=b, transfer=9.0) for i, b in enumerate((3, 3, 1))
    )
    tight = Instance(nodes=nodes, edges=((0, 1), (1, 2)), accelerators=2, memory=4)
    found = solve(tight)
    assert found.assignment is not None and found.objective == 11.0
    assert max(bytes_held(tight, found.assignment)) <= 4


@pytest.mark.parametrize("mode", ["chain", "any"])
def test_one_byte_too_many(mode: Mode) -> None:
    sizes = (5e9 + 1, 5e9, 1.0)
    nodes = tuple(Node(id=i, accelerator=1.0, bytes=b) for i, b in enumerate(sizes))
    tight = Instance(nodes=nodes, edges=((0, 1),), accelerators=2, memory=1e10)
    for solver in ("auto", "dp", "cp-sat"):
        judged(tight, mode, solve(tight, mode=mode, solver=solver), solve(tight, mode=mode))
    none = Instance(nodes=nodes, edges=(), accelerators=1, memory=1e10 + 1)
    for solver in ("auto", "cp-sat"):
        assert solve(none, mode=mode, solver=solver, time_limit=20).status == "infeasible"


@pytest.mark.slow
@pytest.mark.parametrize("devices,cpus", [(3, 0), (4, 1)])
def test_a_transformer_of_134_ops(devices: int, cpus: int) -> None:
    """More blocks than a machine word has bits."""
    instance = transformer(4, devices, cpus=cpus)
    assert len(instance.nodes) == 134
    dp, cp_sat = solve(instance, solver="dp"), solve(instance, solver="cp-sat")
    assert dp.status == cp_sat.status == "optimal"
    assert dp.objective == pytest.approx(cp_sat.objective, rel=STEPS)


def test_enumeration_refuses_what_is_too_much() -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        solve(transformer(1, 4), solver="brute")
