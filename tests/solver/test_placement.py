"""Placement solvers against brute force, the linear relaxation, and each other."""

from __future__ import annotations

from math import inf
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.placement_brute import solve_brute
from placement_problems import Form, layers, problem

from fxpart.errors import FxpartError
from fxpart.solver.archive import decode, encode, read, save_problem
from fxpart.solver.placement.descent import descend
from fxpart.solver.placement.elimination import Elimination, TooWideError
from fxpart.solver.placement.ilp import solve_highs
from fxpart.solver.placement.lagrangian import LagrangianBound, PlacementRecord, multiplier_bound
from fxpart.solver.placement.layer_dp import hubs_of, refine, segments_of
from fxpart.solver.placement.portfolio import (
    NodeCosts,
    PlacementEdge,
    PlacementProblem,
    evaluate,
    solve_placement,
)
from fxpart.solver.placement.problem import PlacementArrays, check, restrict_to_point
from fxpart.solver.work import work_seconds

FORMS = st.sampled_from(get_args(Form))
TIGHT = st.sampled_from((0.0, 0.1, 0.3, 0.6, 1.0))
LATER = 3600.0


def later() -> float:
    """A deadline that no test reaches."""
    return work_seconds() + LATER


def close(a: float, b: float) -> bool:
    """Equal to rounding, infinities included."""
    return a == b or abs(a - b) <= 1e-6 * max(1.0, abs(b))


@pytest.mark.slow
@settings(max_examples=300)
@given(st.integers(0, 10**6), FORMS, TIGHT, st.booleans(), st.integers(1, 6))
def test_every_solver_agrees_with_brute_force(
    seed: int, form: Form, tight: float, points: bool, nodes: int
) -> None:
    given_ = problem(seed, nodes, form=form, tight=tight, points=points)
    best = solve_brute(given_)
    found = solve_placement(given_, time_limit=LATER)
    assert close(found.seconds, best.seconds)
    assert found.bound <= best.seconds + 1e-6
    assert (found.status == "infeasible") == (best.status == "infeasible")
    assert found.status in ("optimal", "infeasible")
    if found.choice is not None:
        judged = evaluate(given_, found.choice)
        assert judged.feasible
        assert (judged.seconds, judged.bytes) == (found.seconds, found.bytes)
    elif not points:
        assert found.least > given_.budget


@pytest.mark.slow
@settings(max_examples=200)
@given(st.integers(0, 10**6), FORMS, TIGHT, st.booleans())
def test_elimination_is_a_bound_and_its_choices_fit(
    seed: int, form: Form, tight: float, points: bool
) -> None:
    given_ = problem(seed, 6, form=form, tight=tight, points=points)
    best = solve_brute(given_)
    found = solve_placement(given_, solver="elimination", time_limit=LATER)
    assert found.bound <= best.seconds + 1e-6
    assert found.seconds >= best.seconds - 1e-6
    if best.choice is not None:
        assert found.least <= best.bytes + 1e-6


@given(st.integers(0, 10**6), st.data())
def test_each_point_alone_is_a_relaxation(seed: int, data: st.DataObject) -> None:
    """And the fullest of them says what the whole problem says."""
    given_ = problem(seed, 6, points=True)
    numbers = PlacementArrays(given_)
    choice = tuple(data.draw(st.integers(0, size - 1)) for size in numbers.sizes)
    whole = evaluate(given_, choice)
    alone = [evaluate(restrict_to_point(given_, i), choice) for i in range(len(given_.points))]
    assert {found.seconds for found in alone} == {whole.seconds}
    assert max(found.bytes for found in alone) == alone[numbers.fullest(choice)].bytes
    assert alone[numbers.fullest(choice)].bytes == pytest.approx(whole.bytes)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(0, 10**6), FORMS, TIGHT)
def test_highs_agrees_with_brute_force(seed: int, form: Form, tight: float) -> None:
    given_ = problem(seed, 5, form=form, tight=tight)
    assert close(
        solve_placement(given_, solver="highs", time_limit=LATER).seconds,
        solve_brute(given_).seconds,
    )


@settings(max_examples=60)
@given(st.integers(0, 10**6), FORMS)
def test_elimination_without_a_limit_is_the_optimum(seed: int, form: Form) -> None:
    given_ = msgspec.structs.replace(problem(seed, 6, form=form), budget=1e9)
    found = solve_placement(given_, solver="elimination", time_limit=LATER)
    assert close(found.seconds, solve_brute(given_).seconds)
    assert close(found.bound, found.seconds)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from(("chain", "tree")), TIGHT)
def test_on_trees_the_bound_is_that_of_the_linear_relaxation(
    seed: int, form: Form, tight: float
) -> None:
    numbers = PlacementArrays(problem(seed, 7, form=form, tight=tight))
    record = PlacementRecord(numbers)
    bound = multiplier_bound(numbers, Elimination(numbers), record, later())
    relaxed = solve_highs(numbers, PlacementRecord(numbers), later(), relaxed=True)
    assert close(bound.seconds, relaxed)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(0, 10**6), FORMS, TIGHT)
def test_the_bound_is_never_below_that_of_the_linear_relaxation(
    seed: int, form: Form, tight: float
) -> None:
    numbers = PlacementArrays(problem(seed, 6, form=form, tight=tight))
    bound = multiplier_bound(numbers, Elimination(numbers), PlacementRecord(numbers), later())
    relaxed = solve_highs(numbers, PlacementRecord(numbers), later(), relaxed=True)
    assert bound.seconds >= relaxed - 1e-6


@settings(max_examples=60)
@given(st.integers(0, 10**6), FORMS)
def test_elimination_around_kept_and_fixed_nodes(seed: int, form: Form) -> None:
    """The table over a kept node, beside a fixed one, is the brute-force minimum of each entry."""
    given_ = problem(seed, 5, form=form, most=3)
    numbers = PlacementArrays(given_)
    rest = [v for v in range(5) if v != 2]
    run = Elimination(numbers, rest, given_.edges, keep=(0,), fixed={2: 0}).run(0.0)
    table = run.table((0,)) + run.value
    for strategy in range(numbers.sizes[0]):
        chosen = run.choose({0: strategy})
        choice = tuple(chosen.get(v, 0) for v in range(5))
        own = float(numbers.seconds[2][0])
        assert close(numbers.evaluate(choice).seconds - own, float(table[strategy]))
        best = min(
            numbers.evaluate((strategy, b, 0, d, e)).seconds
            for b in range(numbers.sizes[1])
            for d in range(numbers.sizes[3])
            for e in range(numbers.sizes[4])
        )
        assert close(best - own, float(table[strategy]))


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "tight"), [(2, 0.05), (3, 0.2), (4, 0.05)])
def test_layers_may_differ_under_a_limit(seed: int, tight: float) -> None:
    """96 equal layers: one price leaves memory unused, the dynamic programme does not."""
    numbers = PlacementArrays(layers(96, seed=seed, strategies=9, tight=tight))
    record = PlacementRecord(numbers)
    bound = multiplier_bound(numbers, Elimination(numbers), record, later())
    alike = record.seconds
    refine(numbers, record, bound, later())
    assert bound.seconds <= record.seconds < alike
    assert record.seconds - bound.seconds < 0.005 * record.seconds
    assert numbers.evaluate(record.choice or ()).feasible


def test_few_layers_reach_the_optimum_with_highs() -> None:
    given_ = layers(3, strategies=5, width=5, tight=0.2)
    found = solve_placement(given_, time_limit=LATER)
    assert found.status == "optimal"
    assert close(found.seconds, solve_placement(given_, solver="highs").seconds)


@pytest.mark.slow
def test_segments_cover_every_node_and_edge_once() -> None:
    base = layers(40, strategies=3)
    # a node that the first and the last layer use: the graph has no separators with it
    tied = msgspec.structs.replace(
        base, edges=(*base.edges, PlacementEdge(source=0, target=len(base.nodes) - 1, matrix=0))
    )
    numbers = PlacementArrays(tied)
    hubs = hubs_of(numbers)
    assert hubs == {0}
    segments = segments_of(numbers, hubs)
    assert len(segments) > 20
    assert [v for s in segments for v in s.nodes] == list(range(1, len(base.nodes)))
    assert sum(len(s.edges) for s in segments) == len(tied.edges)
    found = solve_placement(tied, solver="elimination", time_limit=LATER)
    assert found.gap < 0.005


def test_equal_layers_share_their_tables() -> None:
    many = Elimination(PlacementArrays(layers(128)))
    assert len(many._recipes) <= 160 < len(many.steps) // 6
    assert len(many.steps) == 128 * 8


def clique(nodes: int) -> PlacementProblem:
    """Every pair joined: elimination would need tables of 10 ** 9 entries."""
    kind = NodeCosts(
        seconds=tuple(float(i) for i in range(10)), standing=tuple(float(9 - i) for i in range(10))
    )
    matrix = tuple(tuple(float(abs(i - j)) for j in range(10)) for i in range(10))
    pairs = [(a, b) for a in range(nodes) for b in range(a)]
    return PlacementProblem(
        names=tuple(map(str, range(nodes))),
        kinds=(kind,),
        nodes=(0,) * nodes,
        matrices=(matrix,),
        edges=tuple(PlacementEdge(source=a, target=b, matrix=0) for a, b in pairs),
        budget=5.0 * nodes,
    )


@pytest.mark.slow
def test_wide_graphs_go_to_highs() -> None:
    given_ = clique(9)
    with pytest.raises(TooWideError):
        Elimination(PlacementArrays(given_))
    found = solve_placement(given_, time_limit=LATER)
    # all alike at strategy 4: no edge costs anything, and 5 bytes each fit
    assert (found.status, found.seconds) == ("optimal", 36.0)
    elimination = solve_placement(given_, solver="elimination", time_limit=LATER)
    assert elimination.bound <= 36.0 <= elimination.seconds < inf


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(0, 10**6), FORMS, TIGHT)
def test_descent_keeps_the_budget_and_never_gets_worse(seed: int, form: Form, tight: float) -> None:
    given_ = problem(seed, 6, form=form, tight=tight)
    numbers = PlacementArrays(given_)
    record = PlacementRecord(numbers)
    descend(numbers, record, later())
    best = solve_brute(given_)
    if tight > 0.5 or best.status == "infeasible":
        assert (record.seconds < inf) == (best.seconds < inf)
    assert record.seconds >= best.seconds - 1e-9
    before = record.seconds
    descend(numbers, record, later())
    assert record.seconds <= before


def test_infeasible_says_how_much_is_needed() -> None:
    given_ = problem(5, 6, form="chain")
    least = sum(min(k.standing) for k in given_.kinds)
    found = solve_placement(msgspec.structs.replace(given_, budget=least - 0.5))
    assert (found.status, found.choice, found.least) == ("infeasible", None, least)
    fits = solve_placement(msgspec.structs.replace(given_, budget=least))
    assert fits.status == "optimal" and fits.bytes == least


def test_an_expired_limit_still_gives_a_bound() -> None:
    given_ = layers(12, tight=0.3)
    found = solve_placement(given_, time_limit=0.0)
    assert 0 < found.bound <= solve_placement(given_, solver="elimination").seconds


def test_equal_problems_give_equal_answers() -> None:
    given_ = layers(24, seed=2, tight=0.2)
    first, second = (solve_placement(given_, solver="elimination") for _ in range(2))
    assert first == second


def test_archive_round_trip(tmp_path: object) -> None:
    given_ = problem(7, 6, points=True)
    data = encode(given_)
    assert decode(data, PlacementProblem, check, "problem") == given_
    assert encode(decode(data, PlacementProblem, check, "problem")) == data
    path = f"{tmp_path}/problem.json"
    save_problem(given_, path)
    assert decode(read(path), PlacementProblem, check, "problem") == given_
    with pytest.raises(FxpartError, match="FXP206"):
        read(f"{tmp_path}/none.json")
    with pytest.raises(FxpartError, match="FXP603"):
        save_problem(given_, f"{tmp_path}/no/folder/problem.json")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"budget": -1.0}, "negative"),
        ({"nodes": (0, 9)}, "no kind 9"),
        ({"names": ("a",)}, "1 names for 2"),
        ({"edges": (PlacementEdge(source=0, target=5, matrix=0),)}, "connects 0 and 5"),
        ({"edges": (PlacementEdge(source=0, target=1, matrix=3),)}, "no matrix 3"),
        ({"edges": (PlacementEdge(source=1, target=0, matrix=0),)}, "differs from its nodes"),
        ({"matrices": (((1.0, 2.0), (1.0,)),)}, "ragged"),
        ({"matrices": (((1.0, -2.0),),)}, "negative"),
        ({"kinds": (NodeCosts(seconds=(), standing=()),) * 2}, "no strategies"),
        ({"kinds": (NodeCosts(seconds=(inf,), standing=(0.0,)),) * 2}, "not finite"),
        ({"points": ((0, 7),)}, "does not exist"),
    ],
)
def test_wrong_problems_are_refused(change: dict[str, object], why: str) -> None:
    fine = PlacementProblem(
        names=("a", "b"),
        kinds=(
            NodeCosts(seconds=(1.0,), standing=(1.0,)),
            NodeCosts(seconds=(1.0, 2.0), standing=(1.0, 0.0)),
        ),
        nodes=(0, 1),
        matrices=(((0.0, 1.0),),),
        edges=(PlacementEdge(source=0, target=1, matrix=0),),
        budget=10.0,
    )
    assert solve_placement(fine).status == "optimal"
    with pytest.raises(FxpartError, match="FXP206") as caught:
        solve_placement(msgspec.structs.replace(fine, **change))
    assert why in str(caught.value)


@pytest.mark.parametrize("wrong", [{"solver": "cp-sat"}, {"time_limit": -1.0}])
def test_wrong_arguments_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        solve_placement(problem(0), **wrong)  # type: ignore[arg-type]
    with pytest.raises(FxpartError, match="FXP109"):
        solve_brute(layers(4))


def test_bounds_are_not_above_their_records() -> None:
    """The record of a bound that rounding put above its own choice is still proven."""
    numbers = PlacementArrays(problem(1, 4, form="chain"))
    record = PlacementRecord(numbers)
    bound = multiplier_bound(numbers, Elimination(numbers), record, later())
    assert isinstance(bound, LagrangianBound)
    assert bound.seconds <= record.seconds
