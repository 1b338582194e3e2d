"""Collective ops against the whole tensor, forward and gradient, over threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpart import collectives as C
from fxpart.sharding import Mesh, Shard, indices


def part(whole: torch.Tensor, shard: Shard, mesh: Mesh, mesh_rank: int, axis: str) -> torch.Tensor:
    """What a mesh rank holds of a tensor that is cut along one axis."""
    placements = tuple(shard if name == axis else None for name in mesh.names)
    held = indices(whole.shape, placements, mesh, mesh_rank)
    for dim, index in enumerate(held):
        whole = whole.index_select(dim, torch.from_numpy(index))
    return whole


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mesh, str, torch.Tensor, Shard, Shard]:
    """A mesh, one of its axes, a whole tensor and two cuts of different dims."""
    mesh = Mesh.parse(draw(st.sampled_from(["a=2", "a=3", "a=2,b=2", "a=1,b=3", "a=4"])))
    axis = draw(st.sampled_from(mesh.names))
    rank = draw(st.integers(2, 4))
    dims = draw(st.permutations(range(rank)))[:2]
    outers = [draw(st.sampled_from([1, 1, 2, 3])) for _ in dims]
    shape = [draw(st.integers(1, 5)) for _ in range(rank)]
    for dim, outer in zip(dims, outers, strict=True):
        shape[dim] = outer * draw(st.integers(1, 7))
    whole = torch.randn(shape, dtype=torch.float64)
    if draw(st.booleans()):
        whole = whole.transpose(0, 1).contiguous().transpose(0, 1)
    first, second = (Shard(d, o) for d, o in zip(dims, outers, strict=True))
    return mesh, axis, whole, first, second


Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def lanes_of(
    mesh: Mesh,
    start: Callable[[int], torch.Tensor],
    op: Callable[[C.Communicator, torch.Tensor], torch.Tensor],
    grad: Callable[[int], torch.Tensor],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per mesh rank the op's result and the gradient of its input."""

    def mesh_rank(comm: C.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        x = start(comm.mesh_rank).detach().clone().requires_grad_()
        y = op(comm, x)
        (g,) = torch.autograd.grad(y, x, grad(comm.mesh_rank))
        fake = C.FakeCommunicator(mesh, comm.mesh_rank)
        with torch.no_grad():
            assert op(fake, x).shape == y.shape
        assert fake.counts.calls.keys() <= comm.counts.calls.keys()
        return y.detach(), g

    return C.InProcessHub(mesh, timeout=20).run(mesh_rank)


def sums(values: list[torch.Tensor], mesh: Mesh, mesh_rank: int, axis: str) -> torch.Tensor:
    """The sum over a mesh rank's group."""
    return torch.stack([values[other] for other in mesh.group(mesh_rank, axis)]).sum(0)


@pytest.mark.slow
@given(cases(), st.booleans())
def test_slice_and_gather(
    case: tuple[Mesh, str, torch.Tensor, Shard, Shard], partial: bool
) -> None:
    mesh, axis, whole, cut, _ = case
    kind = "P" if partial else "R"
    gradients = [torch.randn_like(whole) for _ in range(mesh.size)]
    if not partial:
        gradients = [gradients[0]] * mesh.size
    pieces = [part(whole, cut, mesh, mesh_rank, axis) for mesh_rank in range(mesh.size)]
    found = lanes_of(
        mesh,
        lambda mesh_rank: whole,
        lambda c, x: C.slice_shard(c, x, axis, cut.dim, cut.outer, kind),
        lambda mesh_rank: part(gradients[0], cut, mesh, mesh_rank, axis),
    )
    for mesh_rank, (y, g) in enumerate(found):
        torch.testing.assert_close(y, pieces[mesh_rank])
        assert y.is_contiguous() or mesh.size == 1 or len(mesh.group(mesh_rank, axis)) == 1
        total = sums([g for _, g in found], mesh, mesh_rank, axis) if partial else g
        torch.testing.assert_close(total, gradients[0])
    found = lanes_of(
        mesh,
        lambda mesh_rank: pieces[mesh_rank],
        lambda c, x: C.all_gather(c, x, axis, cut.dim, whole.shape[cut.dim], cut.outer, kind),
        lambda mesh_rank: gradients[mesh_rank],
    )
    for mesh_rank, (y, g) in enumerate(found):
        torch.testing.assert_close(y, whole)
        full = sums(gradients, mesh, mesh_rank, axis) if partial else gradients[mesh_rank]
        torch.testing.assert_close(g, part(full, cut, mesh, mesh_rank, axis))


@pytest.mark.slow
@given(cases(), st.booleans())
def test_reduce(case: tuple[Mesh, str, torch.Tensor, Shard, Shard], partial: bool) -> None:
    mesh, axis, whole, cut, _ = case
    terms = [torch.randn_like(whole) for _ in range(mesh.size)]
    gradients = [torch.randn_like(whole) for _ in range(mesh.size)]
    found = lanes_of(
        mesh,
        terms.__getitem__,
        lambda c, x: C.all_reduce(c, x, axis, "P" if partial else "R"),
        gradients.__getitem__,
    )
    for mesh_rank, (y, g) in enumerate(found):
        torch.testing.assert_close(y, sums(terms, mesh, mesh_rank, axis))
        want = sums(gradients, mesh, mesh_rank, axis) if partial else gradients[mesh_rank]
        torch.testing.assert_close(g, want)
    found = lanes_of(
        mesh,
        terms.__getitem__,
        lambda c, x: C.reduce_scatter(c, x, axis, cut.dim, cut.outer),
        lambda mesh_rank: part(gradients[0], cut, mesh, mesh_rank, axis),
    )
    for mesh_rank, (y, g) in enumerate(found):
        torch.testing.assert_close(
            y, part(sums(terms, mesh, mesh_rank, axis), cut, mesh, mesh_rank, axis)
        )
        torch.testing.assert_close(g, gradients[0])


@pytest.mark.slow
@given(cases(), st.booleans())
def test_turn(case: tuple[Mesh, str, torch.Tensor, Shard, Shard], within: bool) -> None:
    mesh, axis, whole, source, target = case
    if within:
        target = Shard(source.dim)
    gradient = torch.randn_like(whole)
    found = lanes_of(
        mesh,
        lambda mesh_rank: part(whole, source, mesh, mesh_rank, axis),
        lambda c, x: C.all_to_all(
            c, x, axis, source.dim, target.dim, whole.shape[source.dim], source.outer, target.outer
        ),
        lambda mesh_rank: part(gradient, target, mesh, mesh_rank, axis),
    )
    for mesh_rank, (y, g) in enumerate(found):
        torch.testing.assert_close(y, part(whole, target, mesh, mesh_rank, axis))
        torch.testing.assert_close(g, part(gradient, source, mesh, mesh_rank, axis))


@pytest.mark.slow
@given(cases())
def test_enter_leave_first(case: tuple[Mesh, str, torch.Tensor, Shard, Shard]) -> None:
    mesh, axis, whole, _, _ = case
    gradients = [torch.randn_like(whole) for _ in range(mesh.size)]
    head = [mesh.group(mesh_rank, axis)[0] == mesh_rank for mesh_rank in range(mesh.size)]
    for op in (C.enter, C.leave, C.first_only):
        found = lanes_of(
            mesh, lambda mesh_rank: whole, lambda c, x, op=op: op(c, x, axis), gradients.__getitem__
        )
        for mesh_rank, (y, g) in enumerate(found):
            kept = torch.zeros_like(whole)
            value = whole if op is not C.first_only or head[mesh_rank] else kept
            torch.testing.assert_close(y, value)
            summed = sums(gradients, mesh, mesh_rank, axis)
            own = gradients[mesh_rank] if head[mesh_rank] else kept
            want = {C.enter: summed, C.leave: own, C.first_only: gradients[mesh_rank]}[op]
            torch.testing.assert_close(g, want)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_dtypes_without_gradient(dtype: torch.dtype) -> None:
    mesh = Mesh.parse("a=2")
    whole = torch.arange(10).view(5, 2).to(dtype)

    def mesh_rank(comm: C.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        piece = C.slice_shard(comm, whole, "a", 0)
        return C.all_gather(comm, piece, "a", 0, 5), C.all_to_all(comm, piece, "a", 0, 1, 5)

    for place, (full, column) in enumerate(C.InProcessHub(mesh).run(mesh_rank)):
        assert torch.equal(full, whole) and not full.requires_grad
        assert torch.equal(column, whole[:, place : place + 1])


def test_counts_are_of_what_the_collective_is_about() -> None:
    mesh = Mesh.parse("a=2,b=1")

    def mesh_rank(comm: C.Communicator) -> C.CommunicationCounts:
        x = torch.ones(4, 6, requires_grad=True)
        y = C.enter(comm, x, "a")
        y = C.all_reduce(comm, C.all_reduce(comm, y * 2, "a"), "b")
        C.all_gather(comm, C.reduce_scatter(comm, y, "a", 0), "a", 0, 4).sum().backward()
        return comm.counts

    for counts in C.InProcessHub(mesh).run(mesh_rank):
        # the reduce-scatter's gradient is an all-gather, the entry's an all-reduce
        assert counts.calls == {
            ("all_reduce", "a"): 2, ("reduce_scatter", "a"): 1, ("all_gather", "a"): 2,
        }  # fmt: skip
        assert counts.bytes == {
            ("all_reduce", "a"): 192, ("reduce_scatter", "a"): 96, ("all_gather", "a"): 192,
        }  # fmt: skip
