"""Embedding tables cut by rows, against ATen's on the whole table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cut_runs import compare
from hypothesis import given
from hypothesis import strategies as st

from fxpart import collectives as C
from fxpart.errors import FxpartError
from fxpart.sharding import Mesh

ATEN = torch.ops.aten


@pytest.mark.slow
@given(st.integers(1, 11), st.integers(0, 8), st.booleans(), st.sampled_from(["a=2", "a=2,b=2"]))
def test_embedding(rows: int, count: int, padded: bool, text: str) -> None:
    mesh = Mesh.parse(text)
    table = torch.randn(rows, 3, dtype=torch.float64)
    ids = torch.randint(0, rows, (count, 2))
    padding = rows // 2 if padded else -1
    compare(
        mesh,
        lambda c, w, i: C.embedding_rows(c, mesh.names, rows, w, i, padding),
        lambda w, i: ATEN.embedding(w, i, padding),
        {"w": (table, ",".join(f"{a}:S(0)" for a in mesh.names)), "i": (ids, "")},
        ",".join(f"{a}:P" for a in mesh.names),
    )


@st.composite
def bags(draw: st.DrawFn) -> dict[str, Any]:
    """A table, bags of its rows and options."""
    rows, count = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    torch.manual_seed(draw(st.integers(0, 1000)))
    lengths = torch.tensor([draw(st.integers(0, 4)) for _ in range(count)])
    ids = torch.randint(0, rows, (int(lengths.sum()),))
    last = draw(st.booleans())
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    mode = draw(st.sampled_from([0, 1]))
    weighted = mode == 0 and draw(st.booleans())
    return {
        "table": torch.randn(rows, 3, dtype=torch.float64),
        "ids": ids,
        "offsets": ends if last else ends[:-1],
        "weights": torch.rand(len(ids), dtype=torch.float64) if weighted else None,
        "mode": mode,
        "last": last,
        "padding": draw(st.sampled_from([None, None, 0, rows - 1])),
    }


@pytest.mark.slow
@given(bags())
def test_bags_by_rows(case: dict[str, Any]) -> None:
    rows = case["table"].shape[0]

    def form(c: Any, w: Any, i: Any, o: Any, p: Any) -> torch.Tensor:
        found = C.embedding_bag_rows(
            c, ("a",), rows, w, i, o, False, case["mode"], False, p, case["last"], case["padding"]
        )
        told = op(case["table"].clone().requires_grad_(), i, o, p, False)
        assert [t.shape for t in found] == [t.shape for t in told]
        assert all(torch.equal(a, b) for a, b in zip(found[1:], told[1:], strict=True))
        return found[0]

    def op(w: Any, i: Any, o: Any, p: Any, first: bool = True) -> Any:
        found = ATEN.embedding_bag.padding_idx(
            w, i, o, False, case["mode"], False, p, case["last"], case["padding"]
        )
        return found[0] if first else found

    compare(
        Mesh.parse("a=3"),
        form,
        op,
        {
            "w": (case["table"], "a:S(0)"),
            "i": (case["ids"], ""),
            "o": (case["offsets"], ""),
            "p": (case["weights"], ""),
        },
        "a:P",
    )


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([0, 1, 2]))
def test_bags_by_bags(count: int, each: int, mode: int) -> None:
    bags, total = 2 * count, 2 * count * each
    compare(
        Mesh.parse("a=2"),
        lambda c, w, i, o: C.embedding_bag_bags(c, ("a",), bags, w, i, o, False, mode)[0],
        lambda w, i, o: ATEN.embedding_bag(w, i, o, False, mode)[0],
        {
            "w": (torch.randn(7, 3, dtype=torch.float64), ""),
            "i": (torch.randint(0, 7, (total,)), "a:S(0)"),
            "o": (torch.arange(0, total, each), "a:S(0)"),
        },
        "a:S(0)",
    )


def test_what_cannot_be_cut_is_refused() -> None:
    comm = C.FakeCommunicator(Mesh.parse("a=2"), 0)
    table, ids, offsets = torch.ones(2, 3), torch.zeros(4, dtype=torch.long), torch.arange(2)
    for form, args in (
        (C.embedding_rows, (ids, -1, True)),
        (C.embedding_sent, (ids, -1, True, True)),
        (C.embedding_bag_rows, (ids, offsets, False, 2)),
        (C.embedding_bag_rows, (ids, offsets, True)),
        (C.embedding_bag_sent, (ids, offsets, True)),
    ):
        with pytest.raises(FxpartError, match="FXP108"):
            form(comm, ("a",), 4, table, *args)
