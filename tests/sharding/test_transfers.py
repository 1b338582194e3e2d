"""Transfers between meshes against brute force over elements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.errors import FxpartError
from fxpart.sharding import PARTIAL, REPLICATE, Mesh, Placement, Shard, indices
from fxpart.sharding.transfers import TransferBox, TransferEndpoint, moved, plan_transfer

MESHES = ["", "a=2", "a=3", "a=2,b=2", "a=1,b=2", "a=4"]


def carried(
    shape: tuple[int, ...],
    source: TransferEndpoint,
    target: TransferEndpoint,
    pieces: tuple[TransferBox, ...],
) -> list[np.ndarray]:
    """Run the pieces on arrays: each term of a sum is the value times a number of its own."""
    whole = np.arange(1.0, 1 + np.prod(shape, dtype=int)).reshape(shape)
    held = [
        whole[np.ix_(*indices(shape, source.placements, source.mesh, n))] * weight(source, n)
        for n in range(source.mesh.size)
    ]
    found = []
    for lane in range(target.mesh.size):
        size = [len(i) for i in indices(shape, target.placements, target.mesh, lane)]
        found.append(np.zeros(size))
        written = np.zeros(size, dtype=int)
        for piece in pieces:
            if piece.target != lane:
                continue
            read = tuple(slice(*s) for s in piece.read)
            write = tuple(slice(*s) for s in piece.write)
            if not piece.add:
                assert (written[write] == 0).all(), "written twice"
                written[write] += 1
                found[lane][write] = held[piece.source][read]
            else:
                assert (written[write] == 1).all(), "added before it was written"
                found[lane][write] += held[piece.source][read]
    return found


def weight(source: TransferEndpoint, lane: int) -> int:
    """Different on every rank of a partial axis."""
    place = source.mesh.coordinate(lane)
    weight = 1
    for at, placement in zip(place, source.placements, strict=True):
        weight *= (at + 2) if placement == PARTIAL else 1
    return weight


def total(source: TransferEndpoint) -> int:
    """What the terms' weights add up to."""
    sums = 1
    for size, placement in zip(source.mesh.shape, source.placements, strict=True):
        sums *= sum(range(2, size + 2)) if placement == PARTIAL else 1
    return sums


def fewest(shape: tuple[int, ...], source: TransferEndpoint, target: TransferEndpoint) -> int:
    """Brute force: for each element and term that a rank needs and does not hold, one."""

    def elements(side: TransferEndpoint, lane: int) -> set[tuple[int, ...]]:
        return set(itertools.product(*map(list, indices(shape, side.placements, side.mesh, lane))))

    def term(lane: int) -> tuple[int, ...]:
        place = source.mesh.coordinate(lane)
        return tuple(p for p, w in zip(place, source.placements, strict=True) if w == PARTIAL)

    count = 0
    for lane in range(target.mesh.size):
        place = target.mesh.coordinate(lane)
        if any(p and w == PARTIAL for p, w in zip(place, target.placements, strict=True)):
            continue
        for one in {term(n) for n in range(source.mesh.size)}:
            here: set[tuple[int, ...]] = set()
            for n in range(source.mesh.size):
                if source.rank(n) == target.rank(lane) and term(n) == one:
                    here |= elements(source, n)
            count += len(elements(target, lane) - here)
    return count


def check(
    shape: tuple[int, ...], source: TransferEndpoint, target: TransferEndpoint
) -> tuple[TransferBox, ...]:
    pieces = plan_transfer(shape, source, target)
    whole = np.arange(1.0, 1 + np.prod(shape, dtype=int)).reshape(shape) * total(source)
    for lane, found in enumerate(carried(shape, source, target, pieces)):
        place = target.mesh.coordinate(lane)
        zero = any(p and w == PARTIAL for p, w in zip(place, target.placements, strict=True))
        want = whole[np.ix_(*indices(shape, target.placements, target.mesh, lane))]
        assert np.array_equal(found, 0 * want if zero else want)
    assert moved(pieces, source, target) == fewest(shape, source, target)
    return pieces


def options(dims: int) -> list[Placement]:
    return [REPLICATE, PARTIAL, *(Shard(d) for d in range(dims))]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["a=2", "a=2,b=2"])
@pytest.mark.parametrize("second", ["", "a=2", "a=3", "a=2,b=2"])
@pytest.mark.parametrize("apart", [False, True])
def test_every_pair_of_placements(first: str, second: str, apart: bool) -> None:
    """Uneven cuts; on the same ranks and on others."""
    one, two = Mesh.parse(first), Mesh.parse(second)
    ranks = tuple(range(one.size, one.size + two.size)) if apart else ()
    for a in itertools.product(options(2), repeat=len(one.axes)):
        for b in itertools.product(options(2), repeat=len(two.axes)):
            check((3, 5), TransferEndpoint(one, a), TransferEndpoint(two, b, ranks))


@given(st.data())
def test_random(data: st.DataObject) -> None:
    dims = data.draw(st.integers(0, 3))
    shape = tuple(6 * data.draw(st.integers(0, 2)) or 1 for _ in range(dims))
    sides = []
    for _ in range(2):
        mesh = Mesh.parse(data.draw(st.sampled_from(MESHES)))
        cut = []
        for _ in mesh.axes:
            one = data.draw(st.sampled_from(options(dims)))
            if isinstance(one, Shard) and shape[one.dim] == 12 and Shard not in map(type, cut):
                one = Shard(one.dim, data.draw(st.sampled_from([1, 2, 3])))
            cut.append(one)
        ranks = data.draw(st.permutations(range(6)))[: mesh.size]
        sides.append(TransferEndpoint(mesh, tuple(cut), tuple(ranks)))
    check(shape, *sides)


def test_rows_to_columns_on_other_ranks_moves_128_bytes() -> None:
    mesh = Mesh.parse("a=2")
    source, target = (
        TransferEndpoint(mesh, (Shard(0),), (0, 1)),
        TransferEndpoint(mesh, (Shard(1),), (2, 3)),
    )
    pieces = check((8, 4), source, target)
    assert 4 * moved(pieces, source, target) == 128
    assert [(p.source, p.target, p.elements) for p in pieces] == [
        (0, 0, 8), (1, 0, 8), (0, 1, 8), (1, 1, 8),
    ]  # fmt: skip


def test_replicas_share_the_sending() -> None:
    source = TransferEndpoint(Mesh.parse("a=4"), (REPLICATE,), (0, 1, 2, 3))
    target = TransferEndpoint(Mesh.parse("a=4"), (REPLICATE,), (4, 5, 6, 7))
    pieces = check((5,), source, target)
    assert [p.source for p in pieces] == [0, 1, 2, 3]


def test_an_open_axis_has_no_transfer() -> None:
    mesh = Mesh.parse("a=2")
    with pytest.raises(FxpartError, match="FXP109"):
        plan_transfer((4,), TransferEndpoint(mesh, (None,)), TransferEndpoint(mesh, (REPLICATE,)))
