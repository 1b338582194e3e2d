"""Random ops on parts draw the numbers of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cut_runs import compare, joined
from hypothesis import given
from hypothesis import strategies as st

from fxpart import collectives as C
from fxpart.rng import seeded
from fxpart.sharding import Mesh, parse_placements

ATEN = torch.ops.aten
MESH = Mesh.parse("a=2,b=2")
CUTS = ["a:S(0),b:S(1)", "a:S(1),b:S(1)", "b:S(2,2)", "a:S(0)", "a:S(2),b:S(0)"]
LIKE: list[tuple[Any, tuple[Any, ...]]] = [
    (ATEN.dropout.default, (0.4, True)), (ATEN.rand_like.default, ()),
    (ATEN.randn_like.default, ()), (ATEN.bernoulli.p, (0.3,)), (ATEN.bernoulli.default, ()),
    (ATEN.alpha_dropout.default, (0.4, True)), (ATEN.exponential.default, (1.5,)),
    (ATEN.normal_functional.default, (1.0, 2.0)), (ATEN.uniform.default, (1.0, 2.0)),
]  # fmt: skip


@pytest.mark.slow
@given(
    st.integers(0, len(LIKE) - 1), st.sampled_from(CUTS),
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3)), st.integers(0, 99),
)  # fmt: skip
def test_elementwise(which: int, cut: str, sizes: tuple[int, int, int], key: int) -> None:
    op, args = LIKE[which]
    shape = (sizes[0], sizes[1], 2 * sizes[2])
    x = torch.rand(shape, dtype=torch.float64)
    differentiable = op in (ATEN.dropout.default, ATEN.alpha_dropout.default)
    compare(
        MESH,
        lambda c, **k: C.random_shard(c, shape, cut, key, 3, op, *k.values(), *args),
        lambda **k: seeded(key, 3, op, *k.values(), *args),
        {"x" if differentiable else "fixed_x": (x, cut)},
        cut,
    )


def test_dropout_that_drops_nothing_and_all_and_its_mask() -> None:
    x = torch.rand(5, 4)

    def mesh_rank(comm: C.Communicator) -> list[torch.Tensor]:
        local = C.slice_shard(comm, x, "a", 0)
        found, mask = C.random_shard(
            comm, (5, 4), "a:S(0)", 7, 0, ATEN.native_dropout.default, local, 0.5, True
        )
        none = C.random_shard(comm, (5, 4), "a:S(0)", 7, 0, ATEN.dropout.default, local, 1.0, True)
        return [found, mask, none]

    want = seeded(7, 0, ATEN.native_dropout.default, x, 0.5, True)
    runs = C.InProcessHub(Mesh.parse("a=2")).run(mesh_rank)
    assert torch.equal(torch.cat([r[0] for r in runs]), want[0])
    assert torch.equal(torch.cat([r[1] for r in runs]), want[1])
    assert not torch.cat([r[2] for r in runs]).any()


@pytest.mark.parametrize("op", [ATEN.rand.default, ATEN.randn.default, ATEN.randint.default])
def test_factories(op: Any) -> None:
    mesh = Mesh.parse("a=3")
    first = (100,) if op is ATEN.randint.default else ()
    pieces = C.InProcessHub(mesh).run(
        lambda c: C.random_shard(c, (7, 2), "a:S(0)", 5, 1, op, *first, [3, 2])
    )
    want = seeded(5, 1, op, *first, [7, 2])
    assert torch.equal(joined(pieces, parse_placements("a:S(0)", mesh), mesh, (7, 2)), want)


@pytest.mark.slow
@given(
    st.sampled_from(["a:S(0),b:S(1)", "b:S(2)", "a:S(1),b:S(3)", "a:S(2),b:S(2)"]),
    st.booleans(), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_attention(cut: str, causal: bool, masked: bool, key: int) -> None:
    causal = causal and "S(2)" not in cut
    masked = masked and not causal
    q = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    k = torch.randn(3, 4, 7, 6, dtype=torch.float64)
    v = torch.randn(3, 4, 7, 2, dtype=torch.float64)
    mask = torch.randn(3, 1, 5, 7, dtype=torch.float64) if masked else None
    parts = dict(p.split(":") for p in cut.split(",")) if "," in cut else {"b": "S(2)"}

    def only(*dims: str) -> str:
        return ",".join(f"{a}:{p}" for a, p in parts.items() if p in dims)

    compare(
        MESH,
        lambda c, q, k, v, fixed_m: C.random_shard(
            c, (3, 4, 5, 2), cut, key, 2, ATEN.scaled_dot_product_attention.default,
            q, k, v, fixed_m, 0.3, causal,
        ),
        lambda q, k, v, fixed_m: seeded(
            key, 2, ATEN.scaled_dot_product_attention.default, q, k, v, fixed_m, 0.3, causal
        ),
        {
            "q": (q, only("S(0)", "S(1)", "S(2)")),
            "k": (k, only("S(0)", "S(1)")),
            "v": (v, only("S(0)", "S(1)", "S(3)")),
            "fixed_m": (mask, only("S(0)", "S(2)")),
        },
        cut,
    )  # fmt: skip


def test_grouped_queries() -> None:
    q, k = torch.randn(2, 4, 3, 6), torch.randn(2, 2, 3, 6)
    op = ATEN.scaled_dot_product_attention.default
    compare(
        Mesh.parse("a=2"),
        lambda c, q, k: C.random_shard(
            c, (2, 4, 3, 6), "a:S(1)", 1, 2, op, q, k, k, None, 0.3, scale=0.2, enable_gqa=True
        ),
        lambda q, k: seeded(1, 2, op, q, k, k, None, 0.3, scale=0.2, enable_gqa=True),
        {"q": (q, "a:S(1)"), "k": (k, "a:S(1)")},
        "a:S(1)",
    )
