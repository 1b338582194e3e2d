"""Moves between meshes over both transports: every pair of placements, data equal, bytes least."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Pool

from fxpart.errors import FxpartError
from fxpart.runtime import InProcess
from fxpart.runtime.transport.process_group_transport import ProcessGroupTransport
from fxpart.runtime.transport.reshard import reshard
from fxpart.sharding import PARTIAL, REPLICATE, Mesh, Partial, Placement, Shard, indices
from fxpart.sharding.transfers import TransferEndpoint

SHAPE = (3, 5)


def sides(ranks: int) -> Iterator[tuple[TransferEndpoint, TransferEndpoint]]:
    """Meshes up to 2x2 on the first and on the last ranks, with every placement."""
    options: list[Placement] = [REPLICATE, PARTIAL, Shard(0), Shard(1)]
    meshes = [m for m in map(Mesh.parse, ["", "a=2", "a=3", "a=2,b=2"]) if m.size <= ranks]
    for one, two in itertools.product(meshes, repeat=2):
        for a in itertools.product(options, repeat=len(one.axes)):
            for b in itertools.product(options, repeat=len(two.axes)):
                last = tuple(range(ranks - two.size, ranks))
                yield (
                    TransferEndpoint(one, a, tuple(range(one.size))),
                    TransferEndpoint(two, b, last),
                )


def part(whole: torch.Tensor, side: TransferEndpoint, lane: int) -> torch.Tensor:
    """What a lane holds, not counting sums."""
    for dim, index in enumerate(indices(whole.shape, side.placements, side.mesh, lane)):
        whole = whole.index_select(dim, torch.from_numpy(index))
    return whole


def term(side: TransferEndpoint, lane: int) -> int:
    """The lane's weight in sums: they add up to 3 ** partial axes on axes of 2, 6 of 3."""
    weight = 1
    for at, p in zip(side.mesh.coordinate(lane), side.placements, strict=True):
        weight *= at + 1 if isinstance(p, Partial) else 1
    return weight


def least(source: TransferEndpoint, target: TransferEndpoint) -> int:
    """Bytes, by looking at each element of each lane."""

    def elements(side: TransferEndpoint, lane: int) -> set[tuple[Any, ...]]:
        held = itertools.product(*map(list, indices(SHAPE, side.placements, side.mesh, lane)))
        return set(held)

    partial = [isinstance(p, Partial) for p in source.placements]

    def key(lane: int) -> tuple[int, ...]:
        return tuple(itertools.compress(source.mesh.coordinate(lane), partial))

    count = 0
    for lane in range(target.mesh.size):
        place = target.mesh.coordinate(lane)
        if any(p and w == PARTIAL for p, w in zip(place, target.placements, strict=True)):
            continue
        for one in {key(n) for n in range(source.mesh.size)}:
            here = [elements(source, n) for n in range(source.mesh.size)
                    if source.rank(n) == target.rank(lane) and key(n) == one]  # fmt: skip
            count += len(elements(target, lane) - set().union(*here))
    return 4 * count


class Counting:
    """A transport that counts the bytes it sends."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.bytes = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def send(self, source: int, target: int, channel: int, tensor: torch.Tensor) -> Any:
        assert source != target
        self.bytes += tensor.numel() * tensor.itemsize
        return self.inner.send(source, target, channel, tensor)


def one(transport: Any, source: TransferEndpoint, target: TransferEndpoint) -> int:
    """Move a tensor and check this process's results; returns the bytes that it sent."""
    whole = torch.arange(1.0, 16.0).view(SHAPE)
    counting = Counting(transport)
    given = {
        rank: part(whole, source, lane) * term(source, lane)
        for lane, rank in enumerate(source.ranks)
        if rank in transport.local
    }
    found = reshard(counting, given, SHAPE, source, target, dtype=torch.float32)
    total = 1
    for size, p in zip(source.mesh.shape, source.placements, strict=True):
        total *= size * (size + 1) // 2 if isinstance(p, Partial) else 1
    assert sorted(found) == [r for r in target.ranks if r in transport.local]
    for lane, rank in enumerate(target.ranks):
        if rank in found:
            place = target.mesh.coordinate(lane)
            zero = any(
                at and isinstance(p, Partial)
                for at, p in zip(place, target.placements, strict=True)
            )
            assert torch.equal(found[rank], part(whole, target, lane) * (0 if zero else total))
    return counting.bytes


def test_every_pair_in_one_process() -> None:
    transport = InProcess(4)
    for source, target in itertools.islice(sides(4), 0, None, 3):
        assert one(transport, source, target) == least(source, target)


def over_gloo() -> list[int]:
    """The bytes that this rank sent, per pair."""
    ranks = dist.get_world_size()
    transport = ProcessGroupTransport(timeout=20.0)
    return [one(transport, source, target) for source, target in sides(ranks)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_pair_over_gloo(pool: Pool, ranks: int) -> None:
    sent = pool.run(over_gloo, ranks=ranks, timeout=120)
    for (source, target), each in zip(sides(ranks), zip(*sent, strict=True), strict=True):
        assert sum(each) == least(source, target), (source, target)


def test_a_part_of_the_wrong_shape_is_named() -> None:
    mesh = Mesh.parse("a=2")
    source, target = (
        TransferEndpoint(mesh, (Shard(0),), (0, 1)),
        TransferEndpoint(mesh, (REPLICATE,), (0, 1)),
    )
    with pytest.raises(FxpartError, match="rank 1"):
        given = {0: torch.zeros(2, 5), 1: torch.zeros(2, 5)}
        reshard(InProcess(2), given, SHAPE, source, target, dtype=torch.float32)


def late() -> str:
    """Rank 1 never comes."""
    if dist.get_rank() == 1:
        return ""
    mesh = Mesh.parse("a=1")
    source, target = (
        TransferEndpoint(mesh, (REPLICATE,), (1,)),
        TransferEndpoint(mesh, (REPLICATE,), (0,)),
    )
    with pytest.raises(FxpartError) as caught:
        reshard(ProcessGroupTransport(timeout=1.0), {}, SHAPE, source, target, dtype=torch.float32)
    return caught.value.code


@pytest.mark.slow
def test_a_rank_that_does_not_come(pool: Pool) -> None:
    assert pool.run(late, ranks=2)[0] in ("FXP503", "FXP504")
