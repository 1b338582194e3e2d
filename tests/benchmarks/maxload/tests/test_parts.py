"""The parts of the solver against plain definitions: reductions, ideals, loads of the programme."""

from __future__ import annotations

import itertools
import random
import time
from math import inf

import numpy as np
import pytest
from benchmarks.maxload.blocks import Blocks, make_blocks
from benchmarks.maxload.bounds import Offload, cheap_bound
from benchmarks.maxload.brute import solve_brute
from benchmarks.maxload.chain import first_fit
from benchmarks.maxload.dp import StageProgramme
from benchmarks.maxload.ideals import Ideals, all_ideals, prefixes
from benchmarks.maxload.instance import Instance, Mode, Node, faults, loads
from benchmarks.maxload.instances import random_instance, transformer
from benchmarks.maxload.reduce import fuse_circles, reduce
from benchmarks.maxload.watch import MaxLoadOutOfTime, MaxLoadWatch
from msgspec.structs import replace

ALWAYS = MaxLoadWatch(time.monotonic() + 1e6)


def together(instance: Instance, blocks: Blocks) -> Instance:
    """The same instance with each block as a group."""
    group = {i: 1000 + b for b, nodes in enumerate(blocks.members) for i in nodes}
    nodes = tuple(replace(n, group=group[i]) for i, n in enumerate(instance.nodes))
    return replace(instance, nodes=nodes)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["chain", "any"])
def test_reductions_keep_an_optimum(mode: Mode) -> None:
    merged = 0
    for seed in range(150):
        instance = random_instance(seed)
        best, blocks = solve_brute(instance, mode), make_blocks(instance, mode)
        for load in {inf, best.objective}:
            fewer = reduce(blocks, load)
            merged += len(fewer) < len(blocks)
            kept = solve_brute(together(instance, fewer), mode)
            assert kept.objective == pytest.approx(best.objective, rel=1e-12, abs=0.0), seed
    assert merged > 40


def test_a_circle_is_one_block() -> None:
    nodes = tuple(Node(id=i, accelerator=1.0) for i in range(6))
    edges = ((0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 3), (4, 5))
    instance = Instance(nodes=nodes, edges=edges, accelerators=2, memory=0)
    fused = fuse_circles(make_blocks(instance, "chain"))
    assert fused.members == ((0, 1, 2), (3, 4), (5,))
    assert len(reduce(make_blocks(instance, "any"))) == 6


def test_a_net_that_costs_more_than_there_is_room_for_is_not_cut() -> None:
    nodes = tuple(Node(id=i, accelerator=2.0, transfer=t) for i, t in enumerate((0.2, 5.0, 0)))
    instance = Instance(nodes=nodes, edges=((0, 1), (1, 2)), accelerators=2, memory=0)
    assert reduce(make_blocks(instance, "chain"), 4.2).members == ((0,), (1, 2))
    assert len(reduce(make_blocks(instance, "chain"), 10.0)) == 3


def blocks_of(seed: int) -> Blocks:
    return fuse_circles(make_blocks(random_instance(seed), "chain"))


def test_all_ideals_are_the_closed_sets() -> None:
    for seed in range(60):
        blocks = blocks_of(seed)
        closed = {
            mask
            for mask in range(1 << len(blocks))
            if all(mask >> a & 1 or not mask >> b & 1 for a, b in blocks.edges)
        }
        found = all_ideals(blocks, 10_000, ALWAYS)
        assert found is not None and len(found) == len(closed) and set(found) == closed
        assert set(prefixes(blocks, 0, ALWAYS)) <= closed
        if len(closed) > 2:
            assert all_ideals(blocks, len(closed) - 1, ALWAYS) is None


def pairs(blocks: Blocks, ideals: Ideals, draw: random.Random) -> list[tuple[int, int]]:
    every = list(itertools.product(range(len(ideals)), repeat=2))
    return draw.sample(every, min(60, len(every)))


@pytest.mark.slow
def test_loads_of_the_programme_are_those_of_the_objective() -> None:
    """For pairs of ideals: what lies between them on accelerator 0, the rest on accelerator 1."""
    draw, compared = random.Random(0), 0
    cases = [(random_instance(seed), 1e9) for seed in range(80)]
    wide = [Node(id=i, accelerator=1.0, transfer=1.0 + i) for i in range(300)]
    fan = tuple((0, i) for i in range(1, 299)) + tuple((i, 299) for i in range(1, 299))
    chain = tuple((i, i + 1) for i in range(1, 298))
    cases.append((Instance(nodes=tuple(wide), edges=fan + chain, accelerators=2, memory=0), 0.0))
    cases.append((transformer(3, 2), 1e9))
    for instance, memory in cases:
        two = replace(instance, accelerators=2, cpus=0, memory=memory)
        nodes = tuple(replace(n, runs=True) for n in two.nodes)
        two = replace(two, nodes=nodes)
        blocks = fuse_circles(make_blocks(two, "chain"))
        masks = all_ideals(blocks, 5000, ALWAYS)
        assert masks is not None
        ideals = Ideals(blocks, masks, ALWAYS)
        programme = StageProgramme(blocks, ideals, inf)
        for row, column in pairs(blocks, ideals, draw):
            load, _ = programme._loads(np.array([row]), np.array([column]))
            inner, outer = ideals.masks[row], ideals.masks[column]
            if inner & ~outer:
                assert load[0, 0] == inf
                continue
            device = [int(not (outer & ~inner) >> b & 1) for b in range(len(blocks))]
            expected = loads(two, blocks.assignment(device))[0]
            assert load[0, 0] == pytest.approx(expected, rel=1e-9, abs=1e-9)
            compared += 1
    assert compared > 1000


def test_parts_come_before_the_whole() -> None:
    for seed in range(40):
        blocks = blocks_of(seed)
        masks = all_ideals(blocks, 10_000, ALWAYS)
        assert masks is not None
        sorted_masks = Ideals(blocks, masks, ALWAYS).masks
        for i, late in enumerate(sorted_masks):
            assert not any(late | early == early for early in sorted_masks[:i])


def test_a_first_answer_is_valid_where_there_is_one() -> None:
    found = 0
    for seed in range(150):
        instance = random_instance(seed)
        blocks = fuse_circles(make_blocks(instance, "chain"))
        for load in (0.0, cheap_bound(blocks) * 1.3, inf):
            devices = first_fit(blocks, load)
            if devices is not None:
                valid = faults(instance, blocks.assignment(devices), "chain")
                assert all("holds" in fault for fault in valid), "memory alone may be too much"
                found += not valid
    assert found > 250


def test_what_cpu_cores_can_take() -> None:
    nodes = (
        Node(id=0, accelerator=4.0, cpu=8.0),
        Node(id=1, accelerator=3.0, cpu=3.0),
        Node(id=2, accelerator=5.0, cpu=50.0),
        Node(id=3, accelerator=9.0, cpu=2.0, runs=False),
    )
    instance = Instance(nodes=nodes, edges=(), accelerators=1, cpus=1, memory=0)
    offload = Offload(make_blocks(instance, "any"))
    assert (offload.total, offload.forced) == (12.0, 2.0)
    assert offload.saved(1, 3.0) == pytest.approx(3.0)
    assert offload.saved(1, 7.0) == pytest.approx(5.0), "all of node 1, half of node 0"
    assert offload.saved(2, 3.5) == pytest.approx(5.0)
    assert offload.saved(0, 7.0) == 0.0
    assert offload.saved(1, 1000.0) == 12.0
    assert offload.rest(1.0) == inf, "node 3 alone takes 2 on a core"
    assert offload.rest(5.0) == pytest.approx(12.0 - 3.0)


def test_a_watch_ends_by_time_and_by_wish() -> None:
    with pytest.raises(MaxLoadOutOfTime):
        MaxLoadWatch(time.monotonic() - 1).left()
    with pytest.raises(MaxLoadOutOfTime):
        MaxLoadWatch(time.monotonic() + 100, lambda: True).left()
    whole = MaxLoadWatch(time.monotonic() + 100)
    assert whole.part(0.25).left() <= 25 < whole.left()
