"""Batches: every fault at once and before anything runs; cuts as torch.tensor_split makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hand_stages import batch, language
from hypothesis import given
from hypothesis import strategies as st

from fxpart.errors import FxpartError
from fxpart.program.spec import ConstantSpec, Dim, InputSpec, ProgramSpec
from fxpart.runtime.batch.batch_reader import BatchReader


def program(
    *inputs: InputSpec,
    symbols: dict[str, tuple[str, int]] | None = None,
    constants: tuple[ConstantSpec, ...] = (),
) -> ProgramSpec:
    return ProgramSpec(
        inputs=inputs,
        constants=constants,
        symbols=symbols or {},
        stages=(),
        loss="loss",
        outputs=(),
        ties={},
    )


def tensor(
    name: str, shape: tuple[Dim, ...], batch_dim: int | None = 0, path: tuple[Any, ...] = ()
) -> InputSpec:
    return InputSpec(
        name=name, path=path or (name,), dtype="float32", shape=shape, batch_dim=batch_dim
    )


@pytest.mark.slow
@given(rows=st.integers(1, 40), microbatches=st.integers(1, 12), dim=st.integers(0, 2))
def test_pieces_are_those_of_tensor_split(rows: int, microbatches: int, dim: int) -> None:
    shape: list[Dim] = [2, 3, 4]
    shape[dim] = "b"
    reader = BatchReader(program(tensor("x", tuple(shape), dim), symbols={"b": ("x", dim)}))
    size = [2, 3, 4]
    size[dim] = rows
    x = torch.arange(float(torch.tensor(size).prod())).reshape(size)
    cut = reader.read({"x": x}, microbatches)
    expected = torch.tensor_split(x, min(microbatches, rows), dim)
    assert len(cut.inputs) == len(expected)
    for piece, part, sizes in zip(cut.inputs, expected, cut.sizes, strict=True):
        assert torch.equal(piece["x"], part)
        assert sizes == {"b": part.shape[dim]}
    assert sum(cut.weights) == pytest.approx(1.0)
    assert cut.rows == tuple(part.shape[dim] for part in expected)


def test_all_faults_at_once() -> None:
    reader = BatchReader(language().spec())
    given = batch()
    del given["ids"]
    given["mask"] = given["mask"].double()
    given["labels"] = given["labels"].tolist()
    given["other"] = torch.zeros(1)
    given["scale"] = 2.0
    with pytest.raises(FxpartError) as caught:
        reader.read(given, 4)
    found = {p.where: p.why for p in caught.value.problems}
    assert {p.code for p in caught.value.problems} == {"FXP105"}
    assert found["batch['ids']"] == "it is missing"
    assert found["batch['mask']"] == "its dtype is float64, not float32"
    assert found["batch['labels']"] == "it is a list or dict, not a tensor"
    assert found["batch['other']"] == "the program has no such input"
    assert found["batch['scale']"] == "it is 2.0, but was None at capture"
    assert len(found) == 5


@pytest.mark.parametrize(
    ("change", "where", "why"),
    [
        ({"labels": torch.zeros(8, 4, dtype=torch.int64)}, "labels", "dim 1 is 4, not 5"),
        ({"labels": torch.zeros(7, 5, dtype=torch.int64)}, "", "['ids'] 8, batch['labels'] 7"),
        ({"labels": torch.zeros(8, dtype=torch.int64)}, "labels", "it has 1 dims"),
        ({"mask": torch.zeros(5, 5).to_sparse()}, "mask", "it is a sparse_coo tensor"),
        ({"mask": torch.zeros(5, 5, requires_grad=True)}, "mask", "it requires a gradient"),
        ({"mask": torch.zeros(5, 6)}, "mask", "dim 1 is 6, not 5"),
        (
            {n: torch.zeros(0, 5, dtype=torch.int64) for n in ("ids", "labels")},
            "ids",
            "the batch is empty",
        ),
    ],
)
def test_sizes_that_contradict(change: dict[str, Any], where: str, why: str) -> None:
    with pytest.raises(FxpartError) as caught:
        BatchReader(language().spec()).read({**batch(), **change}, 4)
    (problem,) = caught.value.problems
    assert problem.where == (f"batch['{where}']" if where else "batch")
    assert why in problem.why


def test_a_missing_none_is_a_none_and_so_is_an_extra() -> None:
    reader = BatchReader(language().spec())
    given = batch()
    del given["scale"]
    given["position_ids"] = None
    assert len(reader.read(given, 2).inputs) == 2


def test_constants_are_compared_with_their_type() -> None:
    fixed = ConstantSpec(path=("flag",), value=True)
    reader = BatchReader(program(tensor("x", (2,), None), constants=(fixed,)))
    x = torch.zeros(2)
    reader.read({"x": x, "flag": True}, 1)
    for other in (1, False, "True"):
        with pytest.raises(FxpartError, match="was True at capture"):
            reader.read({"x": x, "flag": other}, 1)
    with pytest.raises(FxpartError, match="it is missing"):
        reader.read({"x": x}, 1)


def test_tuples_nested_dicts_and_lone_tensors() -> None:
    first, second = tensor("a", ("b", 2), path=(0,)), tensor("m", ("b",), path=(1, "mask"))
    reader = BatchReader(program(first, second, symbols={"b": ("a", 0)}))
    cut = reader.read((torch.zeros(4, 2), {"mask": torch.ones(4)}), 2)
    assert [piece["m"].shape for piece in cut.inputs] == [(2,), (2,)]
    assert reader.read([torch.zeros(4, 2), {"mask": torch.ones(4)}], 2).rows == (2, 2)
    lone = BatchReader(program(first, symbols={"b": ("a", 0)}))
    assert lone.read(torch.zeros(4, 2), 2).rows == (2, 2)
    with pytest.raises(FxpartError, match="FXP105"):
        lone.read({"a": torch.zeros(4, 2)}, 2)


def test_captured_at_a_fixed_microbatch_size() -> None:
    """As many pieces of that size as there are; otherwise the error says what to do."""
    reader = BatchReader(program(tensor("x", (4, 3))))
    assert reader.read({"x": torch.zeros(12, 3)}, 2).rows == (4, 4, 4)
    assert reader.read({"x": torch.zeros(4, 3)}, 2).rows == (4,)
    for rows in (0, 3, 10):
        with pytest.raises(FxpartError) as caught:
            reader.read({"x": torch.zeros(rows, 3)}, 2)
        (problem,) = caught.value.problems
        assert "fixed microbatch size of 4" in problem.why
        assert "drop_last=True" in problem.fix


def test_a_batch_dim_that_is_a_multiple_of_the_rows() -> None:
    """Two views of each row in one tensor: cut at twice the rows."""
    spec = program(tensor("x", ("b", 2)), tensor("y", ("2*b",)), symbols={"b": ("x", 0)})
    reader = BatchReader(spec)
    cut = reader.read({"x": torch.zeros(5, 2), "y": torch.arange(10.0)}, 2)
    assert [piece["y"].tolist() for piece in cut.inputs] == [
        [0, 1, 2, 3, 4, 5], [6, 7, 8, 9],
    ]  # fmt: skip
    with pytest.raises(FxpartError, match="not 10"):
        reader.read({"x": torch.zeros(5, 2), "y": torch.zeros(9)}, 2)


def test_without_any_batch_dim_the_batch_is_one_microbatch() -> None:
    cut = BatchReader(program(tensor("x", (2, 3), None))).read({"x": torch.zeros(2, 3)}, 4)
    assert (cut.rows, cut.weights) == ((1,), (1.0,))
