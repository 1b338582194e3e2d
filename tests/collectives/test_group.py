"""Communicators of processes: every primitive and op in each way of transfer, uneven pieces."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from ranks import Pool

from fxpart import collectives as C
from fxpart.collectives.mesh_groups import list_groups
from fxpart.collectives.shard_buffer import lengths
from fxpart.errors import FxpartError
from fxpart.runtime.transport.process_group_transport import ProcessGroupTransport
from fxpart.sharding import Mesh, chunk


def drawn(seed: int, mesh_rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The numbers of a mesh rank, which every rank can draw."""
    generator = torch.Generator().manual_seed(1000 * seed + mesh_rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


WAYS = ("torch", "direct", "memory")


def communicator(mesh: Mesh, stages: int, way: str, timeout: float = 20.0) -> C.GroupCommunicator:
    """One that uses torch's collectives, exchanges pieces over gloo, or through shared memory."""
    memory, channels = None, {}
    if way == "memory":
        transport = ProcessGroupTransport(timeout=timeout, one_machine=True)
        channels = {group: index for index, group in enumerate(list_groups(mesh))}
        memory = transport.connect_memory(len(channels))
        assert memory is not None
    return C.GroupCommunicator(
        mesh, stages, timeout=timeout, direct=way != "torch", memory=memory, channels=channels
    )


def pair_sums(comm: C.Communicator, axis: str | tuple[str, ...]) -> bool:
    """Compare sums in place; return whether there are such."""
    sizes, group = (3, 1, 70_000), comm.group(axis)[2]
    mine = [drawn(7, comm.mesh_rank, (n,)) for n in sizes]
    pending = comm.start_pair_sum(mine, axis)
    if pending is None:
        return False
    pending.wait()
    for found, size in zip(mine, sizes, strict=True):
        assert torch.equal(found, sum(drawn(7, mesh_rank, (size,)) for mesh_rank in group))
    return True


def primitives(text: str, stages: int, way: str) -> dict[tuple[str, str], int]:
    """Compare every primitive on every axis with what all mesh ranks' inputs say; returns the
    bytes."""
    mesh = Mesh.parse(text)
    comm = communicator(mesh, stages, way)
    axes: list[str | tuple[str, ...]] = [*mesh.names, mesh.names]
    for seed, axis in enumerate(axes):
        group = comm.group(axis)[2]
        place, parts = comm.place(axis), comm.size(axis)
        assert pair_sums(comm, axis) == (way == "memory" and parts == 2)
        for size in (1, 5, 40_000):
            whole = [drawn(seed + 10 * comm.stage, mesh_rank, (size, 3)) for mesh_rank in group]
            for op, want in (("sum", sum(whole)), ("max", torch.stack(whole).amax(0))):
                found = comm.all_reduce(whole[place].T.contiguous().T, axis, op)
                torch.testing.assert_close(found, want)
            cut = [slice(*chunk(size, parts, i)) for i in range(parts)]
            shapes = [(s.stop - s.start, 3) for s in cut]
            found = torch.cat(comm.all_gather(whole[0][cut[place]], axis, shapes))
            assert torch.equal(found, whole[0])
            found = comm.reduce_scatter([whole[place][s] for s in cut], axis)
            torch.testing.assert_close(found, sum(w[cut[place]] for w in whole))
            back = [shapes[place]] * parts
            got = comm.all_to_all([whole[place][s] for s in cut], axis, back)
            assert all(torch.equal(g, w[cut[place]]) for g, w in zip(got, whole, strict=True))
    for dtype in (torch.bool, torch.int64, torch.bfloat16):
        mine = torch.tensor([comm.mesh_rank % 2, 1]).to(dtype)
        assert len(comm.all_gather(mine, mesh.names[0])) == mesh.shape[0]
        assert comm.all_gather(mine, mesh.names[0])[0].dtype == dtype
    comm.close()
    return {key: int(size) for key, size in comm.counts.bytes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_primitives(pool: Pool, way: str) -> None:
    pool.run(primitives, "a=2", 1, way, ranks=2)
    pool.run(primitives, "a=3", 1, way, ranks=3)
    pool.run(primitives, "a=2", 2, way, ranks=4)
    seen = pool.run(primitives, "a=2,b=2", 1, way, ranks=4)
    assert seen[0] == seen[3] and ("all_reduce", "a,b") in seen[0]


def differentiable(way: str) -> None:
    """A chain of every op, forward and gradient, against threads in this process."""
    mesh = Mesh.parse("a=2,b=2")

    def chain(comm: C.Communicator) -> list[torch.Tensor]:
        x = drawn(1, 0, (5, 6)).requires_grad_()
        y = C.slice_shard(comm, C.enter(comm, C.leave(comm, x, "b"), "a"), "a", 0, gradient="P")
        y = C.all_to_all(comm, y, "a", 0, 1, 5, 1, 3) * (1 + comm.mesh_rank)
        y = C.all_gather(comm, y, "a", 1, 6, 3, "P") * drawn(2, comm.mesh_rank, (5, 6))
        y = C.all_reduce(comm, C.first_only(comm, y, "b"), "b", "P").sin()
        y = C.reduce_scatter(comm, y, "a", 1)
        y.pow(2).sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad]

    comm = communicator(mesh, 1, way)
    theirs = C.InProcessHub(mesh, timeout=20.0).run(chain)[comm.mesh_rank]
    for found, want in zip(chain(comm), theirs, strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ops(pool: Pool, way: str) -> None:
    pool.run(differentiable, way, ranks=4)


def buckets(comm: C.Communicator, bucket: int) -> None:
    """Sums, scattered sums and gathered pieces of many tensors, two at a time under way."""
    shapes = [(5, 3), (7,), (1, 2), (4, 4), (0, 3), (6,)]
    dims = [1, 0, 1, 0, 0, 0]
    mesh, axis = comm.mesh, comm.mesh.names[0]
    kinds = [
        torch.float64,
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float64,
        torch.int64,
    ]

    def tensors(mesh_rank: int, seed: int) -> list[torch.Tensor]:
        return [
            (drawn(seed + i, mesh_rank, s) * 8).round().to(k)
            for i, (s, k) in enumerate(zip(shapes, kinds, strict=True))
        ]

    place, parts = comm.place(axis), comm.size(axis)
    group = comm.group(axis)[2]
    axes = mesh.names
    mine = tensors(comm.mesh_rank, 1)
    mine[3] = mine[3].T.contiguous().T
    scattered = tensors(comm.mesh_rank, 50)
    first = C.start_sum(comm, mine, axes, bucket=bucket)
    second = C.start_reduce_scatter(comm, scattered, axis, dims=dims, bucket=bucket)
    pieces = second.wait()
    assert all(a is b for a, b in zip(first.wait(), mine, strict=True))
    for i, total in enumerate(mine):
        want = sum(tensors(mesh_rank, 1)[i] for mesh_rank in range(mesh.size))
        torch.testing.assert_close(total, want)
    for i, piece in enumerate(pieces):
        want = sum(tensors(mesh_rank, 50)[i] for mesh_rank in group)
        sizes = lengths(shapes[i][dims[i]], parts)
        assert torch.equal(piece, want.split(sizes, dims[i])[place])
    into = [torch.full_like(t, 7) for t in mine]
    into[0] = torch.empty(3, 5, dtype=kinds[0]).T
    C.start_all_gather(comm, pieces, axis, into, dims=dims, bucket=bucket).wait()
    for i, whole in enumerate(into):
        assert torch.equal(whole, sum(tensors(mesh_rank, 50)[i] for mesh_rank in group))


def grouped_buckets(way: str) -> None:
    """Run on four ranks."""
    comm = communicator(Mesh.parse("a=2,b=2"), 1, way)
    for bucket in (1, 100, C.BUCKET):
        buckets(comm, bucket)


@pytest.mark.parametrize("bucket", [1, 100, C.BUCKET])
@pytest.mark.parametrize("mesh", ["a=1", "a=3", "a=2,b=2"])
def test_buckets_over_threads(mesh: str, bucket: int) -> None:
    C.InProcessHub(Mesh.parse(mesh), timeout=20).run(lambda comm: buckets(comm, bucket))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_buckets_over_gloo(pool: Pool, way: str) -> None:
    pool.run(grouped_buckets, way, ranks=4)


def left_alone(way: str, size: int) -> str:
    """Rank 1 comes late; rank 0 must not wait longer than its limit."""
    comm = communicator(Mesh.parse("a=2"), 1, way, timeout=1.0)
    if dist.get_rank() == 1:
        time.sleep(2.5)
        return "late"
    start = time.monotonic()
    try:
        comm.all_reduce(torch.ones(size), "a")
    except (C.TransferTimeoutError, C.PeerLostError) as cause:
        assert time.monotonic() - start < 2.2
        return type(cause).__name__
    return "nothing"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_wait_is_bounded(pool: Pool, way: str) -> None:
    assert pool.run(left_alone, way, 4, ranks=2) == ["TransferTimeoutError", "late"]


def misfit() -> str:
    """More ranks than the mesh has."""
    with pytest.raises(FxpartError) as caught:
        C.GroupCommunicator(Mesh.parse("a=3"))
    return caught.value.code


@pytest.mark.slow
def test_the_world_must_fit(pool: Pool) -> None:
    assert pool.run(misfit, ranks=2) == ["FXP502"] * 2
