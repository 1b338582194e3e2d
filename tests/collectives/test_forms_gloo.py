"""Every local form over gloo gives what it gives over threads, which is tested against ATen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Pool

from fxpart import collectives as C
from fxpart.sharding import Mesh

ATEN = torch.ops.aten
AB: Any = ("a", "b")


def tensor(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def ids(comm: C.Communicator, count: int, below: int) -> torch.Tensor:
    return (torch.arange(count) * 7 + comm.mesh_rank) % below


def calls(comm: C.Communicator) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Each form on a local x; sizes divide by nothing in particular where that is allowed."""
    n = 3 if comm.place(AB) < 3 else 1  # 10 rows on four mesh ranks
    same = torch.tensor([0, 4, 7, 11])
    column = tensor(5, 5)
    return {
        "embedding_rows": lambda x: C.embedding_rows(comm, AB, 4 * x.shape[0], x, same),
        "embedding_bag_rows": lambda x: C.embedding_bag_rows(
            comm, AB, 4 * x.shape[0], x, same, torch.tensor([0, 3]), mode=1
        )[0],
        "embedding_bag_bags": lambda x: C.embedding_bag_bags(
            comm, AB, 8, x, ids(comm, 4, x.shape[0]), torch.tensor([4, 6])
        )[0],
        "cross_entropy_rows": lambda x: C.cross_entropy_rows(
            comm, AB, 10, x[:n], ids(comm, n, 5), label_smoothing=0.1
        ),
        "nll_loss_rows": lambda x: C.nll_loss_rows(comm, AB, 10, x[:n], ids(comm, n, 5)),
        "cross_entropy_classes": lambda x: C.cross_entropy_classes(
            comm, AB, 20, x, torch.arange(x.shape[0])
        ),
        "cross_entropy_rows_classes": lambda x: C.cross_entropy_rows_classes(
            comm, (("a",), ("b",)), (6, 10), x, torch.arange(3) + 3 * comm.place("a")
        ),
        "batch_norm_rows": lambda x: C.batch_norm_rows(
            comm, AB, 12, x, column, None, None, None, True, 0.1, 1e-5
        ),
        "mean_rows": lambda x: C.mean_rows(comm, AB, 10, x[:n]),
        "mse_loss_rows": lambda x: C.mse_loss_rows(comm, AB, 10, x[:n], x[:n].detach() + 1),
        "random_shard": lambda x: C.random_shard(
            comm, (12, 5), "a:S(0),b:S(0)", 3, 1, ATEN.dropout.default, x, 0.5, True
        ),
    }


def run(comm: C.Communicator) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found = {}
    for name in calls(comm):
        x = tensor(100 + comm.mesh_rank, 3, 5).requires_grad_()
        y = calls(comm)[name](x)
        (grad,) = torch.autograd.grad(y, x, tensor(7, *y.shape))
        found[name] = y.detach(), grad
    return found


def compared() -> list[str]:
    mesh = Mesh.parse("a=2,b=2")
    comm = C.GroupCommunicator(mesh, timeout=20.0)
    mine = run(comm)
    theirs = C.InProcessHub(mesh, timeout=20.0).run(run)[comm.mesh_rank]
    for name, pair in mine.items():
        torch.testing.assert_close(pair, theirs[name], msg=name)
        assert pair[1].any(), name
    return sorted(mine)


@pytest.mark.slow
def test_forms(pool: Pool) -> None:
    assert len(pool.run(compared, ranks=4)[0]) == 11
