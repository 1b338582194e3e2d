"""Tables cut by rows with sparse gradients: only rows that were asked for have one, or travel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpart import collectives as C
from fxpart.collectives.all_to_all_embedding import RowCache
from fxpart.sharding import Mesh, chunk

ATEN = torch.ops.aten
WIDTH = 3


def parts(count: int, mesh_ranks: int) -> list[tuple[int, int]]:
    """Ranges of rows."""
    return [chunk(count, mesh_ranks, mesh_rank) for mesh_rank in range(mesh_ranks)]


def whole_gradient(found: torch.Tensor, table: torch.Tensor, towards: torch.Tensor) -> torch.Tensor:
    """The sparse gradient of one process."""
    (gradient,) = torch.autograd.grad(found, [table], towards)
    assert gradient.is_sparse
    return gradient


@pytest.mark.slow
@given(
    st.integers(1, 9), st.integers(1, 3), st.integers(0, 4), st.sampled_from([-1, 0]),
    st.integers(0, 1000),
)  # fmt: skip
def test_rows_are_sent_in_the_order_of_one_process(
    rows: int, mesh_ranks: int, count: int, padding: int, seed: int
) -> None:
    """The bits of one process: results, and what comes for each row, one after another.

    Each row is received once while no weights change, and again where they may have.
    """
    torch.manual_seed(seed)
    table, ids = torch.randn(rows, WIDTH), torch.randint(0, rows, (mesh_ranks * count, 2))
    leaf = table.clone().requires_grad_()
    want = ATEN.embedding(leaf, ids, padding, False, True)
    towards = torch.randn_like(want)
    gradient = whole_gradient(want, leaf, towards)
    ranges = parts(rows, mesh_ranks)

    def mesh_rank(comm: C.Communicator) -> list[Any]:
        low, high = ranges[comm.mesh_rank]
        mine = torch.nn.Parameter(table[low:high].clone())
        local, back = ids.chunk(mesh_ranks)[comm.mesh_rank] if count else ids, towards
        if count:
            back = towards.chunk(mesh_ranks)[comm.mesh_rank]
        runs = []
        for cache in [None, *[RowCache()] * 3]:
            comm.row_cache = cache
            comm.counts.clear()
            given = local[:1] if len(runs) == 1 else local
            found = C.embedding_sent(comm, ("a",), rows, mine, given, padding, False, True)
            (got,) = torch.autograd.grad(found, [mine], back[: len(given)])
            sent = comm.counts.bytes.get(("all_to_all", "a"), 0)
            runs.append((found.detach(), got, sent, comm.counts.rows["a"]))
        return runs

    runs = C.InProcessHub(Mesh.parse(f"a={mesh_ranks}"), timeout=20).run(mesh_rank)
    each = ids.chunk(mesh_ranks) if count else [ids] * mesh_ranks
    for time in (0, 2, 3):
        now = [own[time] for own in runs]
        if count:
            assert torch.equal(torch.cat([found for found, *_ in now]), want)
        for (low, high), (_, got, *_) in zip(ranges, now, strict=True):
            assert got.is_sparse
            for row in range(low, high):
                mine = got._values()[got._indices()[0] == row - low]
                assert torch.equal(mine, gradient._values()[gradient._indices()[0] == row])
        distinct = [set(part.reshape(-1).tolist()) for part in each]
        before = [set(part[:1].reshape(-1).tolist()) if time else set() for part in each]
        received = [0 if time == 3 else len(a - b) for a, b in zip(distinct, before, strict=True)]
        assert [looked for *_, looked in now] == [
            (part.numel(), n) for part, n in zip(each, received, strict=True)
        ]
        if mesh_ranks > 1:  # counts, ids there; rows back; gradients there
            sent = sum(size for _, _, size, _ in now)
            looked = sum(part.numel() for part in each)
            assert (
                sent
                == mesh_ranks * mesh_ranks * 24
                + looked * (8 + 4 * WIDTH)
                + sum(received) * 4 * WIDTH
            )


def test_rows_that_are_only_read_cost_the_ids_of_new_rows() -> None:
    """Without gradients, an id is sent once; an id that is no row is an error of its rank."""
    table, ids = torch.randn(7, WIDTH), torch.tensor([6, 0, 6, 6, 3])

    def mesh_rank(comm: C.Communicator) -> Any:
        mine = torch.nn.Parameter(table[slice(*parts(7, 2)[comm.mesh_rank])].clone())
        comm.row_cache = RowCache()
        with torch.no_grad():
            found = [C.embedding_sent(comm, ("a",), 7, mine, ids, -1, False, True)]
        comm.row_cache = None
        with torch.inference_mode():
            found.append(C.embedding_sent(comm, ("a",), 7, mine, ids, -1, False, True))
        for one in (7, -1):
            with pytest.raises(IndexError, match=f"id {one} is not a row of a table of 7 rows"):
                C.embedding_sent(comm, ("a",), 7, mine, torch.tensor([3, one]), -1, False, True)
        return found, comm.counts.bytes["all_to_all", "a"]

    for found, sent in C.InProcessHub(Mesh.parse("a=2"), timeout=20).run(mesh_rank):
        assert all(torch.equal(one, table[ids]) for one in found)
        # Of six rows of both ranks' lookups, this rank sends its own ones.
        assert sent in (2 * (48 + 3 * 8 + 4 * 4 * WIDTH), 2 * (48 + 3 * 8 + 2 * 4 * WIDTH))


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("last", [False, True])
def test_bags_are_summed_in_the_order_of_one_process(
    mode: int, weighted: bool, padding: int | None, last: bool
) -> None:
    if weighted and mode:
        return  # torch weighs sums alone
    torch.manual_seed(mode)
    rows, mesh_ranks, bags, each = 7, 2, 3, 4
    table = torch.randn(rows, WIDTH)
    ids = torch.randint(0, rows, (mesh_ranks * bags * each,))
    weights = torch.rand(len(ids)) if weighted else None
    offsets = torch.arange(0, mesh_ranks * bags * each, each)
    leaf = table.clone().requires_grad_()
    want = ATEN.embedding_bag.padding_idx(
        leaf, ids, offsets, False, mode, mode != 2, weights, False, padding
    )[0]
    towards = torch.randn_like(want)
    (gradient,) = torch.autograd.grad(want, [leaf], towards)

    def mesh_rank(comm: C.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = parts(rows, mesh_ranks)[comm.mesh_rank]
        mine = table[low:high].clone().requires_grad_()
        own = offsets.chunk(mesh_ranks)[comm.mesh_rank]
        own = torch.cat([own, own[-1:] + each]) if last else own
        found = C.embedding_bag_sent(
            comm, ("a",), rows, mine, ids.chunk(mesh_ranks)[comm.mesh_rank], own, False, mode, True,
            None if weights is None else weights.chunk(mesh_ranks)[comm.mesh_rank], last, padding,
        )[0]  # fmt: skip
        (got,) = torch.autograd.grad(found, [mine], towards.chunk(mesh_ranks)[comm.mesh_rank])
        return found.detach(), got

    runs = C.InProcessHub(Mesh.parse("a=2"), timeout=20).run(mesh_rank)
    torch.testing.assert_close(torch.cat([found for found, _ in runs]), want.detach())
    total = torch.cat([got.to_dense() for _, got in runs])
    torch.testing.assert_close(total, gradient.to_dense())


def _tables(form: str) -> Any:
    ids = torch.tensor([0, 5, 5, 1, 4, 6])
    if form == "embedding_rows":
        return lambda c, w: C.embedding_rows(c, ("a",), 7, w, ids, 4, False, True)
    offsets = torch.tensor([0, 3])
    return lambda c, w: C.embedding_bag_rows(
        c, ("a",), 7, w, ids, offsets, False, 1, True, None, False, 4
    )[0]


@pytest.mark.parametrize("form", ["embedding_rows", "embedding_bag_rows"])
@pytest.mark.parametrize("mesh_ranks", [2, 3, 8])
def test_a_lane_has_gradients_of_its_own_rows_alone(form: str, mesh_ranks: int) -> None:
    """Not of a first row that stands for others' ids; a mesh rank without rows has an empty one."""
    table, call = torch.randn(7, WIDTH, dtype=torch.float64), _tables(form)

    def mesh_rank(comm: C.Communicator) -> torch.Tensor:
        low, high = parts(7, mesh_ranks)[comm.mesh_rank]
        mine = table[low:high].clone().requires_grad_()
        found = call(comm, mine)
        (got,) = torch.autograd.grad(found.sum(), [mine])
        return got

    runs = C.InProcessHub(Mesh.parse(f"a={mesh_ranks}"), timeout=20).run(mesh_rank)
    asked = set()
    for (low, _), got in zip(parts(7, mesh_ranks), runs, strict=True):
        assert got.is_sparse
        asked |= {int(i) + low for i in got.coalesce()._indices()[0]}
    assert asked == {0, 5, 1, 6}
