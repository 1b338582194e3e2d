"""Ops and forms by shape alone: fake tensors whose rows are a symbol, and no guard on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fxpart import collectives as C
from fxpart.sharding import Mesh

ATEN = torch.ops.aten
AXES = ("a", "b")
REAL = {(6, 4): torch.ones(6, 4), (6, 8): torch.ones(6, 8)}  # made outside of the fake mode


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    """Within: fake tensors; at the end no guard may have been made."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        yield mode
    assert not env.guards


def symbolic(mode: FakeTensorMode, *shape: int) -> torch.Tensor:
    """A fake tensor whose first size is a symbol."""
    real = REAL[shape]
    dims = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (len(shape) - 1)]
    context = StatelessSymbolicContext(dims)
    x = mode.from_tensor(real, symbolic_context=context, source=ConstantSource(f"x{len(shape)}"))
    assert isinstance(x.shape[0], torch.SymInt)
    return x.requires_grad_()


def test_ops(mode: FakeTensorMode) -> None:
    x = symbolic(mode, 6, 4)
    comm = C.FakeCommunicator(Mesh.parse("a=2"), 1)
    whole = C.all_gather(comm, x, "a", 0, x.shape[0] * 2)
    column = C.all_to_all(comm, x, "a", 0, 1, x.shape[0] * 2)
    back = C.all_to_all(comm, column, "a", 1, 0, 4)
    half = C.reduce_scatter(comm, x, "a", 1)
    assert str(whole.shape[0]) == f"2*{x.shape[0]}" and whole.shape[1] == 4
    assert column.shape[1] == 2 and half.shape[1] == 2
    assert str(column.shape[0]) == str(whole.shape[0]) and back.shape[1] == 4
    piece = C.slice_shard(comm, whole, "a", 0)
    (g,) = torch.autograd.grad(piece.sum() + back.sum() + half.sum() + column.sum(), x)
    assert str(g.shape) == str(x.shape)
    assert comm.counts.calls["all_to_all", "a"] == 4


# rows: the symbol. Each form of a local x [rows, 8] of 4 times as many rows.
FORMS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "cross_entropy_rows": lambda c, x, t: C.cross_entropy_rows(c, AXES, 4 * x.shape[0], x, t),
    "cross_entropy_classes": lambda c, x, t: C.cross_entropy_classes(
        c, AXES, 32, x, t, label_smoothing=0.1
    ),
    "cross_entropy_rows_classes": lambda c, x, t: C.cross_entropy_rows_classes(
        c, (("a",), ("b",)), (2 * x.shape[0], 16), x, t
    ),
    "nll_loss_rows": lambda c, x, t: C.nll_loss_rows(c, AXES, 4 * x.shape[0], x, t),
    "mean_rows": lambda c, x, t: C.mean_rows(
        c, (("a",), ("b",)), (2 * x.shape[0], 16), x
    ),
    "mse_loss_rows": lambda c, x, t: C.mse_loss_rows(c, AXES, 4 * x.shape[0], x, x.detach()),
    "batch_norm_rows": lambda c, x, t: C.batch_norm_rows(
        c, AXES, 4 * x.shape[0], x, None, None, None, None, True, 0.1, 1e-5
    ),
    "embedding_rows": lambda c, x, t: C.embedding_rows(c, AXES, 40, torch.ones(10, 8), t) + x,
    "dropout": lambda c, x, t: C.random_shard(
        c, (4 * x.shape[0], 8), "a:S(0),b:S(0)", 1, 0, ATEN.dropout.default, x, 0.5, True
    ),
    "rand_like": lambda c, x, t: C.random_shard(
        c, (2 * x.shape[0], 16), "a:S(0),b:S(1)", 1, 0, ATEN.rand_like.default, x
    ) + x,
    "attention": lambda c, x, t: C.random_shard(
        c, (4 * x.shape[0], 2, 2, 2), "a:S(0),b:S(0)", 1, 0,
        ATEN.scaled_dot_product_attention.default, *[x.unflatten(1, (2, 2, 2))] * 3, None, 0.5,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FORMS))
def test_forms(mode: FakeTensorMode, name: str) -> None:
    x = symbolic(mode, 6, 8)
    target = torch.zeros(x.shape[0], dtype=torch.long)
    comm = C.FakeCommunicator(Mesh.parse("a=2,b=2"), 2)
    found = FORMS[name](comm, x, target)
    if found.dim():
        assert str(found.shape[0]) == str(x.shape[0])
    (g,) = torch.autograd.grad(found.sum(), x)
    assert str(g.shape) == str(x.shape)
