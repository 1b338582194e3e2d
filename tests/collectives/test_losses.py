"""Losses with rows or classes cut, against ATen's on the whole."""

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
NONE, MEAN, SUM = 0, 1, 2


@st.composite
def labelled(draw: st.DrawFn) -> dict[str, Any]:
    """Logits, targets and options of a cross-entropy."""
    rows, classes = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    places = draw(st.sampled_from([(), (), (3,), (2, 2)]))
    torch.manual_seed(draw(st.integers(0, 1000)))
    target = torch.randint(0, classes, (rows, *places))
    ignore = draw(st.sampled_from([-100, 0]))
    if draw(st.booleans()):
        target[torch.rand(target.shape) < 0.3] = ignore
    return {
        "logits": torch.randn(rows, classes, *places, dtype=torch.float64) * 5,
        "target": target,
        "weight": torch.rand(classes, dtype=torch.float64) + 0.1 if draw(st.booleans()) else None,
        "reduction": draw(st.sampled_from([NONE, MEAN, MEAN, SUM])),
        "ignore": ignore,
        "smoothing": draw(st.sampled_from([0.0, 0.0, 0.1, 0.5])),
    }


@pytest.mark.slow
@given(labelled(), st.booleans())
def test_rows(case: dict[str, Any], soft: bool) -> None:
    if soft:
        case |= {"target": torch.rand_like(case["logits"]), "ignore": -100}
    options = (case["reduction"], case["ignore"], case["smoothing"])
    size = case["logits"].shape[0]
    operands = {
        "fixed_weight": (case["weight"], "a:R,b:R"),
        "x": (case["logits"], "a:S(0),b:S(0)"),
        "fixed_t": (case["target"], "a:S(0),b:S(0)"),
    }
    compare(
        Mesh.parse("a=2,b=2"),
        lambda c, x, fixed_t, fixed_weight: C.cross_entropy_rows(
            c, ("a", "b"), size, x, fixed_t, fixed_weight, *options
        ),
        lambda x, fixed_t, fixed_weight: ATEN.cross_entropy_loss(
            x, fixed_t, fixed_weight, *options
        ),
        operands,
        "a:S(0),b:S(0)" if case["reduction"] == NONE else "a:P,b:P",
    )
    if soft or case["smoothing"]:
        return
    compare(
        Mesh.parse("a=3"),
        lambda c, x, fixed_t, fixed_weight: C.nll_loss_rows(
            c, ("a",), size, x, fixed_t, fixed_weight, *options[:2]
        ),
        lambda x, fixed_t, fixed_weight: ATEN.nll_loss_nd(x, fixed_t, fixed_weight, *options[:2]),
        {k: (t, w.split(",")[0]) for k, (t, w) in operands.items()},
        "a:S(0)" if case["reduction"] == NONE else "a:P",
    )


@pytest.mark.slow
@given(labelled(), st.sampled_from(["a=2", "a=3", "a=2,b=2"]))
def test_classes(case: dict[str, Any], text: str) -> None:
    mesh = Mesh.parse(text)
    options = (case["reduction"], case["ignore"], case["smoothing"])
    size = case["logits"].shape[1]

    def cut(dim: int) -> str:
        return ",".join(f"{name}:S({dim})" for name in mesh.names)

    compare(
        mesh,
        lambda c, x, fixed_t, fixed_weight: C.cross_entropy_classes(
            c, mesh.names, size, x, fixed_t, fixed_weight, *options
        ),
        lambda x, fixed_t, fixed_weight: ATEN.cross_entropy_loss(
            x, fixed_t, fixed_weight, *options
        ),
        {
            "x": (case["logits"], cut(1)),
            "fixed_t": (case["target"], ""),
            "fixed_weight": (case["weight"], cut(0)),
        },
        "",
    )


@pytest.mark.slow
@given(labelled())
def test_rows_and_classes(case: dict[str, Any]) -> None:
    options = (case["reduction"], case["ignore"], case["smoothing"])
    sizes = tuple(case["logits"].shape[:2])
    compare(
        Mesh.parse("a=2,b=2"),
        lambda c, x, fixed_t, fixed_weight: C.cross_entropy_rows_classes(
            c, (("a",), ("b",)), sizes, x, fixed_t, fixed_weight, *options
        ),
        lambda x, fixed_t, fixed_weight: ATEN.cross_entropy_loss(
            x, fixed_t, fixed_weight, *options
        ),
        {
            "x": (case["logits"], "a:S(0),b:S(1)"),
            "fixed_t": (case["target"], "a:S(0)"),
            "fixed_weight": (case["weight"], "b:S(0)"),
        },
        "a:S(0),b:R" if case["reduction"] == NONE else "a:P,b:R",
    )


def test_a_vocabulary_parallel_loss_sends_three_rows_and_no_logits() -> None:
    def mesh_rank(comm: C.Communicator) -> C.CommunicationCounts:
        logits = torch.randn(16, 50).requires_grad_()
        C.cross_entropy_classes(comm, ("a",), 100, logits, torch.arange(16)).backward()
        return comm.counts

    (counts, _) = C.InProcessHub(Mesh.parse("a=2")).run(mesh_rank)
    assert counts.calls == {("all_reduce", "a"): 2}
    assert counts.bytes == {("all_reduce", "a"): 4 * 16 * 4}


def test_half_precision_is_computed_in_single() -> None:
    logits = torch.randn(8, 10).to(torch.bfloat16)
    target = torch.randint(0, 10, (8,))
    want = ATEN.cross_entropy_loss(logits, target)

    def mesh_rank(comm: C.Communicator) -> torch.Tensor:
        x = C.slice_shard(comm, logits, "a", 1)
        return C.cross_entropy_classes(comm, ("a",), 10, x, target)

    for found in C.InProcessHub(Mesh.parse("a=2")).run(mesh_rank):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, want, rtol=1e-2, atol=1e-2)


def test_probabilities_need_their_classes_whole() -> None:
    comm = C.FakeCommunicator(Mesh.parse("a=2"), 0)
    with pytest.raises(FxpartError, match="probabilities"):
        C.cross_entropy_classes(comm, ("a",), 4, torch.ones(3, 2), torch.ones(3, 2))


ELEMENTWISE = {
    "mse_loss": (), "l1_loss": (), "smooth_l1_loss": (0.5,), "huber_loss": (0.5,),
    "soft_margin_loss": (), "kl_div": (), "hinge_embedding_loss": (0.7,),
}  # fmt: skip


@pytest.mark.slow
@given(
    st.sampled_from([*ELEMENTWISE, "binary_cross_entropy", "binary_cross_entropy_with_logits",
                     "poisson_nll_loss"]),
    st.integers(1, 7), st.integers(1, 5), st.sampled_from([MEAN, MEAN, SUM]),
)  # fmt: skip
def test_one_term_for_each_element(name: str, rows: int, columns: int, reduction: int) -> None:
    x = torch.rand(rows, columns, dtype=torch.float64) * 0.8 + 0.1
    y = torch.rand(rows, columns, dtype=torch.float64) * 0.8 + 0.1
    if name == "hinge_embedding_loss":
        y = y.sub(0.5).sign()
        args: tuple[Any, ...] = (0.7, reduction)
    elif name.startswith("binary_cross_entropy_with"):
        args = (None, None, reduction)
    elif name == "binary_cross_entropy":
        args = (None, reduction)
    elif name == "poisson_nll_loss":
        args = (True, False, 1e-8, reduction)
    else:
        args = (reduction, *ELEMENTWISE[name])
    form, op = getattr(C, f"{name}_rows"), getattr(ATEN, name)
    for axes, size, x_at, y_at in (
        (("a", "b"), rows, "a:S(0),b:S(0)", "a:S(0),b:S(0)"),
        ((("a",), ("b",)), (rows, columns), "a:S(0),b:S(1)", "a:S(0),b:S(1)"),
    ):
        compare(
            Mesh.parse("a=2,b=2"),
            lambda c, x, fixed_y, axes=axes, size=size: form(c, axes, size, x, fixed_y, *args),
            lambda x, fixed_y: op(x, fixed_y, *args),
            {"x": (x, x_at), "fixed_y": (y, y_at)},
            "a:P,b:P",
        )


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=3), st.booleans(), st.sampled_from([0, 1, 2])
)
def test_means(shape: list[int], keep: bool, which: int) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    dims: list[int] = [[0], [0, 1], []][which]
    out = "a:P,b:P" if which else ("a:P,b:S(1)" if keep else "a:P,b:S(0)")
    axes: Any = (("a",), ("b",)) if which else ("a",)
    size: Any = tuple(shape[:2]) if which else shape[0]
    compare(
        Mesh.parse("a=2,b=2"),
        lambda c, x: C.mean_rows(c, axes, size, x, dims, keep),
        lambda x: x.mean(dims, keep),
        {"x": (x, "a:S(0),b:S(1)")},
        out,
    )
