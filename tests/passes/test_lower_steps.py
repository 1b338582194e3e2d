"""Steps between placements: every pair on small meshes, on data, at even and uneven sizes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from fxpart.passes.lowering.reshard_steps import Whole, steps
from local_runs import cut, join

from fxpart import collectives
from fxpart.collectives import Communicator, InProcessHub
from fxpart.sharding import PARTIAL, REPLICATE, Mesh, Placement, Shard, local_shape

ALONG: tuple[Placement, ...] = (REPLICATE, PARTIAL, Shard(0), Shard(1), Shard(1, 2))


def give(whole: torch.Tensor, placements: Whole, mesh: Mesh, mesh_rank: int) -> torch.Tensor:
    """A mesh rank's part; of a partial sum each mesh rank has another share."""
    held = cut(whole, placements, mesh, mesh_rank)
    for axis, placement in enumerate(placements):
        if placement == PARTIAL:
            parts, place = mesh.shape[axis], mesh.coordinate(mesh_rank)[axis]
            held = held * (2.0 * (place + 1) / (parts * (parts + 1)))
    return held


def moved(
    held: torch.Tensor, shape: tuple[int, ...], source: Whole, target: Whole, mine: Communicator
) -> torch.Tensor:
    """Every step, on one mesh rank."""
    for step in steps(source, target):
        axis, before, after = mine.mesh.names[step.axis], step.before[step.axis], step.after
        rest: tuple[Any, ...] = ()
        if isinstance(before, Shard):
            joined = (*step.before[: step.axis], REPLICATE, *step.before[step.axis + 1 :])
            size = local_shape(shape, joined, mine.mesh, mine.mesh_rank)[before.dim]
            rest = (before.dim, size, before.outer)
            if isinstance(after, Shard):
                rest = (before.dim, after.dim, size, before.outer, after.outer)
        elif isinstance(after, Shard):
            rest = (after.dim, after.outer)
        held = getattr(collectives, step.kind)(mine, held, axis, *rest)
    return held


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 8), (5, 12)])
@pytest.mark.parametrize("text", ["a=2", "a=3", "a=2,b=2"])
def test_every_pair(text: str, shape: tuple[int, int]) -> None:
    """The data of every placement arrives in every other one."""
    mesh = Mesh.parse(text)
    whole = torch.arange(1.0, 1 + shape[0] * shape[1], dtype=torch.float64).reshape(shape)
    each = [p for p in product(ALONG, repeat=len(mesh.axes)) if fits(shape, p, mesh)]
    pairs = list(product(each, each))

    def mesh_rank(mine: Communicator) -> list[torch.Tensor]:
        return [
            moved(give(whole, a, mesh, mine.mesh_rank), shape, a, b, mine)
            for a, b in pairs
        ]  # fmt: skip

    found = InProcessHub(mesh, timeout=60.0).run(mesh_rank)
    for index, (source, target) in enumerate(pairs):
        result = join([held[index] for held in found], target, mesh, shape)
        torch.testing.assert_close(result, whole, msg=f"{source} to {target}")


def fits(shape: tuple[int, int], placements: Whole, mesh: Mesh) -> bool:
    """Whether the pieces of a dim in ``outer`` equal parts exist."""
    held = list(shape)
    for placement, parts in zip(placements, mesh.shape, strict=True):
        if isinstance(placement, Shard):
            uneven = placement.outer > 1 and held[placement.dim] % (placement.outer * parts)
            if uneven or held[placement.dim] % placement.outer:
                return False
            held[placement.dim] = -(-held[placement.dim] // parts)
    return True


def kinds(source: Whole, target: Whole) -> list[str]:
    return [f"{s.kind} {s.axis}" for s in steps(source, target)]


def test_few_steps() -> None:
    """One collective where one is enough; sums become pieces at once; inner pieces join first."""
    rows, columns = Shard(0), Shard(1)
    assert kinds((PARTIAL,), (rows,)) == ["reduce_scatter 0"]
    assert kinds((rows,), (columns,)) == ["all_to_all 0"]
    assert kinds((REPLICATE,), (rows,)) == ["slice_shard 0"]
    assert kinds((rows, rows), (REPLICATE, REPLICATE)) == ["all_gather 1", "all_gather 0"]
    assert kinds((REPLICATE, REPLICATE), (rows, rows)) == ["slice_shard 0", "slice_shard 1"]
    assert kinds((rows, PARTIAL), (rows, REPLICATE)) == ["all_reduce 1"]
    assert kinds((PARTIAL, rows), (rows, rows)) == [
        "all_gather 1", "reduce_scatter 0", "slice_shard 1",
    ]  # fmt: skip
    assert kinds((rows, columns), (rows, columns)) == []
