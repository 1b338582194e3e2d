"""Rows that are requested ahead: those of the tables as they are when they are looked up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart import collectives as C
from fxpart.collectives.row_prefetch import RowPrefetch
from fxpart.sharding import Mesh, chunk

SIZES = {"a": (7, 3, torch.float32), "b": (11, 2, torch.float64)}
STEPS, MICROBATCHES = 4, 2


def lookups(comm: C.Communicator, tables: dict[str, Any], ids: dict[str, Any]) -> list[Any]:
    """A stage's: the first table as bags, the other one twice."""
    rows = [size for size, *_ in SIZES.values()]
    offsets = torch.arange(0, len(ids["a"]), 2)
    return [
        C.embedding_bag_sent(
            comm, ("x",), rows[0], tables["a"], ids["a"], offsets, False, 0, True, None, False, 1
        )[0],
        C.embedding_sent(comm, ("x",), rows[1], tables["b"], ids["b"], 2, False, True),
        C.embedding_sent(comm, ("x",), rows[1], tables["b"], ids["c"], -1, False, True),
    ]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(0, 3), st.booleans(), st.integers(0, 1000))
def test_prefetched_rows_are_current(ranks: int, pairs: int, others: bool, seed: int) -> None:
    """Results and gradients have the bits of lookups that request nothing ahead.

    others: updates change rows that nobody has looked up as well, as momentum does.
    """
    draw = torch.Generator().manual_seed(seed)
    whole = {n: torch.randn(*size, generator=draw, dtype=t) for n, (*size, t) in SIZES.items()}
    ids = [
        [
            [
                {
                    name: torch.randint(SIZES["a" if name == "a" else "b"][0], (2 * pairs,),
                                        generator=draw)
                    for name in "abc"
                }
                for _ in range(MICROBATCHES)
            ]
            for _ in range(STEPS)
        ]
        for _ in range(ranks)
    ]  # fmt: skip

    def mesh_rank(comm: C.Communicator) -> list[Any]:
        runs = []
        for ahead in (False, True):
            tables = {}
            for name, table in whole.items():
                low, high = chunk(len(table), ranks, comm.mesh_rank)
                tables[name] = torch.nn.Parameter(table[low:high].clone())
            prefetch, found = RowPrefetch(comm), []
            mine = ids[comm.mesh_rank]
            comm.counts.clear()

            def request(step: int, comm: Any = comm, tables: Any = tables, mine: Any = mine) -> Any:
                requests = []
                for own in mine[step]:
                    comm.requests = []
                    lookups(comm, tables, own)
                    requests.append(comm.requests)
                comm.requests = None
                return requests

            for step in range(STEPS):
                if ahead:
                    if step + 1 < STEPS:
                        prefetch.prepare(request(step + 1))
                    prefetch.begin(request(step) if not step else ())
                for own in mine[step]:
                    results = lookups(comm, tables, own)
                    sum(r.double().square().sum() for r in results).backward()
                    found += [r.detach() for r in results]
                if ahead:
                    prefetch.end()
                with torch.no_grad():
                    for table in tables.values():
                        gradient = table.grad.coalesce()
                        found += [gradient.indices(), gradient.values()]
                        table -= 0.1 * gradient.to_dense()
                        if others:
                            table[::2] += 1
                        table.grad = None
            runs.append((found, comm.counts.rows.get("x", (0, 0))))
        return runs

    for plain, prefetched in C.InProcessHub(Mesh.parse(f"x={ranks}"), timeout=20).run(mesh_rank):
        assert all(torch.equal(*pair) for pair in zip(plain[0], prefetched[0], strict=True))
        assert prefetched[1][0] == plain[1][0]
        # Once for all microbatches, and once more if the rows have changed.
        assert others or prefetched[1][1] <= plain[1][1]
