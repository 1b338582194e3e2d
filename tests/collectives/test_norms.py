"""Batch norm with its rows cut, against ATen's on the whole batch."""

from __future__ import annotations

import pytest
import torch
from cut_runs import compare
from hypothesis import given
from hypothesis import strategies as st

from fxpart import collectives as C
from fxpart.sharding import Mesh

ATEN = torch.ops.aten


@pytest.mark.slow
@given(
    st.integers(2, 7),
    st.sampled_from([(), (3,), (2, 2)]),
    st.sampled_from(["a=2", "a=3", "a=2,b=2"]),
    st.booleans(),
    st.booleans(),
)
def test_batch_norm(
    rows: int, places: tuple[int, ...], text: str, affine: bool, training: bool
) -> None:
    mesh = Mesh.parse(text)
    cut = ",".join(f"{name}:S(0)" for name in mesh.names)
    x = torch.randn(rows, 4, *places, dtype=torch.float64) * 3 + 100
    mean, var = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64) + 1
    running = [(mean.clone(), var.clone()) for _ in range(mesh.size)]
    whole = mean.clone(), var.clone()
    compare(
        mesh,
        lambda c, x, w, b: (
            C.batch_norm_rows(
                c, mesh.names, rows, x, w, b, *running[c.mesh_rank], training, 0.3, 1e-5, True
            )
            if not c.fake
            else C.batch_norm_rows(c, mesh.names, rows, x, w, b, None, None, True, 0.3, 1e-5, True)
        ),
        lambda x, w, b: ATEN.batch_norm(x, w, b, *whole, training, 0.3, 1e-5, True),
        {
            "x": (x, cut),
            "w": (torch.randn(4, dtype=torch.float64) if affine else None, ""),
            "b": (torch.randn(4, dtype=torch.float64) if affine else None, ""),
        },
        cut,
    )
    for own in running:
        torch.testing.assert_close(own, whole)


def test_one_gather_forward_and_one_sum_backward() -> None:
    x = torch.randn(4, 5)

    def mesh_rank(comm: C.Communicator) -> C.CommunicationCounts:
        y = C.slice_shard(comm, x, "a", 0).requires_grad_()
        C.batch_norm_rows(
            comm, ("a",), 4, y, None, None, None, None, True, 0.1, 1e-5
        ).sum().backward()
        return comm.counts

    for counts in C.InProcessHub(Mesh.parse("a=2")).run(mesh_rank):
        assert counts.calls == {("all_gather", "a"): 1, ("all_reduce", "a"): 1}
