"""Which dim carries the batch: inferred for the usual and the odd, asked for where unclear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxpart.capture import CapturedModel, capture
from fxpart.capture.batch_dims import hypotheses, resize
from fxpart.errors import FxpartError
from fxpart.verification.single_process import WholeGraph


def dims(captured: CapturedModel) -> dict[str, int | None]:
    return {spec.name: spec.batch_dim for spec in captured.inputs}


class Masked(nn.Module):
    """x [B, S, 4] with a mask [S, S] and positions [S]."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        y = self.lin(x) + positions.unsqueeze(-1)
        return (y @ y.transpose(1, 2) + mask).softmax(-1) @ y


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 5, 8])
def test_mask_and_positions_have_no_batch_dim_even_if_sizes_coincide(rows: int) -> None:
    inputs = (torch.randn(rows, 5, 4), torch.zeros(5, 5), torch.arange(5.0))
    captured = capture(Masked(), inputs)
    assert dims(captured) == {"x": 0, "mask": None, "positions": None}
    assert captured.symbolic and captured.output_dims == (0,)


@pytest.mark.slow
def test_a_leading_mask_does_not_set_the_batch_size() -> None:
    class Swapped(Masked):
        def forward(self, mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x, mask, torch.zeros(x.shape[1]))

    captured = capture(Swapped(), (torch.zeros(6, 6), torch.randn(4, 6, 4)))
    assert dims(captured) == {"mask": None, "x": 0}
    assert captured.batch_size == 4


class Recurrent(nn.Module):
    """An LSTM over [length, batch, 4], all steps or the last one out."""

    def __init__(self, every_step: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8)
        self.head = nn.Linear(8, 2)
        self.every_step = every_step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(x)
        return self.head(states if self.every_step else states[-1])


@pytest.mark.slow
@pytest.mark.parametrize("every_step", [True, False])
def test_a_sequence_in_front_is_told_from_the_batch(every_step: bool) -> None:
    captured = capture(Recurrent(every_step), (torch.randn(5, 3, 4),))
    assert dims(captured) == {"x": 1}
    assert captured.batch_size == 3
    assert captured.output_dims == (1 if every_step else 0,)


@pytest.mark.slow
def test_unclear_without_data() -> None:
    with torch.device("meta"):
        model = Recurrent(True)
    with pytest.raises(FxpartError) as caught:
        capture(model, (torch.randn(5, 3, 4),))
    assert caught.value.code == "FXP104"
    assert "batch_first" in str(caught.value) and "batch_dims=" in str(caught.value)
    captured = capture(model, (torch.randn(5, 3, 4),), batch_dims={"x": 1})
    assert dims(captured) == {"x": 1}


class Fixed(nn.Module):
    """A model that knows its batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).reshape(2, 3, 4)


@pytest.mark.slow
def test_a_size_fixed_in_the_code_is_an_error_with_the_line_and_the_way_out() -> None:
    with pytest.raises(FxpartError) as caught:
        capture(Fixed(), (torch.randn(6, 4),))
    text = str(caught.value)
    assert caught.value.code == "FXP104" and "test_batch_dims.py" in text and "reshape" in text
    captured = capture(Fixed(), (torch.randn(6, 4),), batch_dims={"x": 0})
    assert not captured.symbolic and captured.microbatch_size == 6
    assert captured.inputs[0].shape == (6, 4)


def test_nothing_grows() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x).mean(0)

    with pytest.raises(FxpartError) as caught:
        capture(Pooled(), (torch.randn(6, 4),))
    assert caught.value.code == "FXP104" and "do not grow" in str(caught.value)


def test_offsets_into_an_input_that_is_not_cut_are_unclear() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(10, 4)

        def forward(self, items: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return self.bag(items, offsets)

    inputs = (torch.randint(0, 10, (12,)), torch.tensor([0, 3, 6, 9]))
    with pytest.raises(FxpartError) as caught:
        capture(Bag(), inputs)
    assert caught.value.code == "FXP104" and "half of the batch" in str(caught.value)


@pytest.mark.slow
def test_rows_that_influence_each_other_beside_an_uncut_input_are_asked_for() -> None:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return (self.lin(x) @ self.lin(x).t()) * scale

    with pytest.raises(FxpartError, match="half of the batch"):
        capture(Contrast(), (torch.randn(6, 4), torch.ones(1)))
    captured = capture(
        Contrast(), (torch.randn(6, 4), torch.ones(1)), batch_dims={"x": 0, "scale": None}
    )
    assert dims(captured) == {"x": 0, "scale": None}


def test_batch_dims_given_overrule_and_none_means_no_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    captured = capture(model, (torch.randn(6, 4),), batch_dims={"input": None})
    assert dims(captured) == {"input_1": None} or dims(captured) == {"input": None}
    assert captured.batch_size == 1 and not captured.symbolic


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ({"nope": 0}, "FXP109", "Known inputs: x"),
        ({"x": 5}, "FXP109", "out of range"),
        ({"x": "batch"}, "FXP109", "not the number of a dim"),
        ({"x": 0, "mask": 1, "positions": 0}, "FXP104", "sizes differ"),
    ],
)
def test_wrong_batch_dims(given: dict[str, Any], code: str, words: str) -> None:
    inputs = (torch.randn(3, 5, 4), torch.zeros(5, 5), torch.arange(5.0))
    with pytest.raises(FxpartError) as caught:
        capture(Masked(), inputs, batch_dims=given)
    assert caught.value.code == code and words in str(caught.value)


def test_negative_dims_count_from_the_end() -> None:
    captured = capture(nn.Linear(4, 4), (torch.randn(6, 3, 4),), batch_dims={"input": -3})
    assert captured.inputs[0].batch_dim == 0


@pytest.mark.slow
def test_batch_size_repeats_or_cuts_the_example() -> None:
    example = (torch.arange(12.0).reshape(3, 4),)
    for size in (2, 7):
        captured = capture(nn.Linear(4, 4), example, batch_size=size)
        assert captured.example is not None
        (batch,) = captured.example()
        assert batch.shape == (size, 4)
        assert torch.equal(batch, example[0].repeat(3, 1)[:size])


@pytest.mark.parametrize("option", ["batch_size", "microbatch_size"])
def test_wrong_sizes(option: str) -> None:
    options: dict[str, Any] = {option: 0}
    with pytest.raises(FxpartError, match=option):
        capture(nn.Linear(4, 4), (torch.randn(6, 4),), **options)


@pytest.mark.slow
def test_a_fixed_capture_takes_the_microbatch_size() -> None:
    class Even(nn.Module):
        """Works for even batches of any size, but not for a symbol."""

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.lin(x)
            return y + len(list(range(x.shape[0])))

    captured = capture(Even(), (torch.randn(8, 4),), microbatch_size=2)
    assert not captured.symbolic and captured.microbatch_size == 2
    assert captured.inputs[0].shape == (2, 4) and captured.batch_size == 8
    assert any("symbolic" in line for line in captured.tried)


def test_the_conventional_hypothesis_comes_first() -> None:
    tensors = [torch.zeros(4, 6), torch.zeros(6, 6), torch.zeros(4)]
    first = next(iter(hypotheses(["a", "b", "c"], tensors, {})))
    assert first == (0, None, 0)
    assert resize(torch.arange(3), 0, 5).tolist() == [0, 1, 2, 0, 1]


@pytest.mark.slow
def test_one_tensor_given_twice_is_two_inputs() -> None:
    """``labels=input_ids`` in the example must not tie the two in training."""

    class Scorer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            scores = self.head(self.embed(ids)).flatten(0, 1)
            return nn.functional.cross_entropy(scores, labels.flatten())

    model = Scorer()
    ids, labels = torch.randint(0, 11, (2, 4, 6)).unbind()
    captured = capture(model, example_kwargs={"ids": ids, "labels": ids}, loss=lambda loss: loss)
    assert [spec.name for spec in captured.inputs] == ["ids", "labels"]
    found = WholeGraph(captured.graph, captured.state).run(ids, labels)[0]
    assert torch.equal(found, model(ids, labels))
