"""Order of unequal devices and cuts together: enumeration agrees, bounds hold."""

from __future__ import annotations

import msgspec
import pytest
from oracles.device_order_brute import brute_orders
from order_problems import random_orders

from fxpart.errors import FxpartError
from fxpart.solver.assignment.device_order import DeviceLinks, reorder_devices, with_stage_count
from fxpart.solver.assignment.device_order_dp import DeviceClasses
from fxpart.solver.assignment.device_order_search import solve_orders
from fxpart.solver.objective import evaluate
from fxpart.solver.problem import BlockValue, DeviceLimit, PartitionProblem, Variant


def agrees(seed: int) -> None:
    problem, links = random_orders(seed)
    best, found = brute_orders(problem, links), solve_orders(problem, links, time_limit=600.0)
    assert found.status == best.status, seed
    if best.choice is None:
        return
    assert found.choice is not None
    assert found.objective == pytest.approx(best.objective, rel=1e-9), seed
    assert found.bound <= best.objective * (1 + 1e-9), seed
    one = with_stage_count(reorder_devices(problem, links, found.order), len(found.choice.starts))
    again = evaluate(one, found.choice)
    assert again.feasible and again.seconds == pytest.approx(found.objective, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 200, 10))
def test_enumeration_agrees(seed: int) -> None:
    agrees(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(9))
def test_two_hundred_heterogeneous_placements_agree_with_enumeration(part: int) -> None:
    for seed in range(200):
        if seed % 10 == part + 1:
            agrees(seed)


@pytest.mark.slow
def test_local_search_gives_valid_plans_and_bounds() -> None:
    found_best = 0
    for seed in range(1, 25):
        problem, links = random_orders(seed)
        best = brute_orders(problem, links)
        found = solve_orders(problem, links, time_limit=600.0, work=0, rounds=20)
        assert found.bound <= best.objective * (1 + 1e-9), seed
        assert found.objective >= best.objective * (1 - 1e-9), seed
        if found.choice is not None:
            assert reorder_devices(problem, links, found.order).devices
        found_best += found.objective <= best.objective * (1 + 1e-9)
    assert found_best >= 20


def chain(speeds: list[float], memories: list[int], blocks: int = 4) -> PartitionProblem:
    """Equal blocks of 1 s forward and backward together on a device of speed 1."""
    kinds = sorted(set(speeds))
    devices = tuple(
        DeviceLimit(name=f"d{k}", type=kinds.index(s), memory=m, latency=0.0, inverse_bandwidth=0.0)
        for k, (s, m) in enumerate(zip(speeds, memories, strict=True))
    )
    rows = tuple((0.5 / s,) * blocks for s in kinds)
    variant = Variant(
        microbatch_size=1, microbatches=8, forward=rows, backward=rows, activation=(10,) * blocks,
        workspace=(0,) * blocks, value_bytes=(1,) * (blocks - 1),
    )  # fmt: skip
    return PartitionProblem(
        blocks=tuple(f"b{i}" for i in range(blocks)),
        devices=devices,
        values=tuple(
            BlockValue(producer=i, consumers=(i + 1,), gradient=True) for i in range(blocks - 1)
        ),
        weights=(),
        variants=(variant,),
        step=tuple((0.0,) * blocks for _ in kinds),
        max_stages=len(devices),
    )


def even(n: int, slow: dict[tuple[int, int], float] | None = None) -> DeviceLinks:
    table = [[(slow or {}).get((a, b), 0.01) for b in range(n)] for a in range(n)]
    zero = tuple((0.0,) * n for _ in range(n))
    return DeviceLinks(latency=zero, inverse=tuple(map(tuple, table)))


def test_the_small_memory_comes_last() -> None:
    """Under 1F1B the first stage holds most microbatches: the small device must not be first."""
    problem = chain([1.0, 1.0], [30, 10**6])
    assert solve_orders(problem, even(2)).order == (1, 0)


def test_a_device_too_slow_to_help_is_left_out() -> None:
    problem = chain([0.05, 1.0, 1.0], [10**6] * 3)
    found = solve_orders(problem, even(3))
    assert sorted(found.order) == [1, 2] and found.status == "optimal"


def test_a_slow_link_is_not_crossed() -> None:
    slow = {(a, b): 5.0 for a in (0, 1) for b in (2, 3)} | {
        (b, a): 5.0 for a in (0, 1) for b in (2, 3)
    }
    problem = msgspec.structs.replace(chain([1.0] * 4, [10**6] * 4), max_stages=2)
    found = solve_orders(problem, even(4, slow))
    assert set(found.order) in ({0, 1}, {2, 3})


def test_devices_that_nothing_tells_apart_are_counted() -> None:
    problem = chain([1.0, 2.0] * 6, [10**6] * 12)
    fleet = DeviceClasses(problem, even(12))
    assert [len(group) for group in fleet.classes] == [6, 6]
    assert fleet.states == 49
    one = DeviceClasses(problem, even(12, {(0, 2): 0.5}))
    assert [len(group) for group in one.classes] == [1, 6, 1, 4]


@pytest.mark.slow
def test_the_same_answer_every_time_and_within_any_limit() -> None:
    problem, links = random_orders(5)
    assert solve_orders(problem, links) == solve_orders(problem, links)
    rushed = solve_orders(problem, links, time_limit=0.0)
    assert rushed.bound <= brute_orders(problem, links).objective * (1 + 1e-9)


def test_links_of_another_size_are_refused() -> None:
    with pytest.raises(FxpartError, match="FXP206"):
        solve_orders(chain([1.0, 1.0], [100, 100]), even(3))
