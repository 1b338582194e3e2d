"""Which part of a batch goes to the model, which to the loss, and what the loss is without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional

from fxpart.capture import capture
from fxpart.capture.call_arguments import CallArguments, split_batch_arguments
from fxpart.capture.flat_batch import assemble, flatten_batch, look_up, unflatten_batch
from fxpart.capture.model_outputs import mean_square, named_tensors
from fxpart.errors import FxpartError


class Two(nn.Module):
    """Two inputs, the second optional."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x if bias is None else x + bias


class Open(nn.Module):
    """Takes any keyword."""

    def forward(self, x: torch.Tensor, **rest: torch.Tensor) -> torch.Tensor:
        return x


def parts_of(batch: Any, model: nn.Module, loss: Any, kwargs: bool = False) -> CallArguments:
    return split_batch_arguments(model, loss, flatten_batch(batch), has_kwargs=kwargs)


T = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("batch", "model", "loss", "args", "kwargs", "targets", "named"),
    [
        ((T, T), Two(), None, 2, [], 0, []),
        ((T, T), Two(), functional.mse_loss, 1, [], 1, []),
        ((T, T), Two(), nn.MSELoss(), 1, [], 1, []),
        ((T, T, T), Two(), functional.mse_loss, 2, [], 1, []),
        ((T,), Two(), lambda output: output.mean(), 1, [], 0, []),
        ((T, T, T), Two(), lambda o, a, b: o.mean(), 1, [], 2, []),
        ((T, T, T), Two(), lambda o, a=None: o.mean(), 2, [], 1, []),
        ((T, T, T), Two(), lambda o, *rest: o.mean(), 2, [], 1, []),
        ({"x": T, "target": T}, Two(), functional.mse_loss, 0, ["x"], 0, ["target"]),
        ({"x": T, "label": T}, Two(), functional.mse_loss, 0, ["x"], 1, []),
        ({"x": T, "bias": T, "label": T}, Two(), nn.MSELoss(), 0, ["x", "bias"], 1, []),
        ({"x": T, "target": T}, Open(), functional.mse_loss, 0, ["x"], 0, ["target"]),
        ({"x": T, "label": T}, Open(), functional.mse_loss, 0, ["x"], 1, []),
        ({"x": T, "a": T, "b": T, "target": T}, Open(), nn.MSELoss(), 0, ["x", "a", "b"], 0,
         ["target"]),
    ],
)  # fmt: skip
def test_division(
    batch: Any, model: nn.Module, loss: Any, args: int, kwargs: list[str], targets: int,
    named: list[str],
) -> None:  # fmt: skip
    call = parts_of(batch, model, loss)
    assert len(call.args) == args and list(call.kwargs) == kwargs
    assert len(call.targets) == targets and list(call.named_targets) == named


def test_division_with_positional_and_keyword_items() -> None:
    call = parts_of((T, T, {"bias": T}), Two(), functional.mse_loss, kwargs=True)
    assert len(call.args) == 1 and list(call.kwargs) == ["bias"] and len(call.targets) == 1
    call = parts_of((T, {"target": T}), Two(), functional.mse_loss, kwargs=True)
    assert len(call.args) == 1 and call.named_targets.keys() == {"target"}


@pytest.mark.parametrize(
    ("batch", "loss"),
    [
        ({"x": T}, functional.mse_loss),
        ({"x": T, "a": T, "b": T}, lambda o, a1: o.mean()),
        ((T,), lambda o, a, b: o.mean()),
    ],
)
def test_division_that_cannot_be(batch: Any, loss: Any) -> None:
    with pytest.raises(FxpartError) as caught:
        parts_of(batch, Two(), loss)
    assert caught.value.code == "FXP109"


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclass
class Result:
    score: torch.Tensor
    rest: Any
    loss: torch.Tensor | None = None


def test_outputs_keep_their_names() -> None:
    a, b, c = (torch.full((1,), float(i)) for i in range(3))
    assert list(named_tensors(a)) == ["output"]
    assert list(named_tensors((a, None, [b, c]))) == ["output_0", "output_2_0", "output_2_1"]
    assert list(named_tensors(Pair(a, {"deep": b}))) == ["left", "right_deep"]
    assert list(named_tensors(Result(a, (b, 3)))) == ["score", "rest_0"]
    assert list(named_tensors({"x": a, "y": {"z": b}})) == ["x", "y_z"]
    assert named_tensors({"a_b": a, "a": {"b": b}}) == {"a_b": a, "a_b_1": b}


def test_batches_come_apart_and_together() -> None:
    batch = {"a": (T, [1, None, Pair(T + 1, "s")]), "b": True}
    parts = flatten_batch(batch)
    assert parts.paths == (("a", 0), ("a", 1, 2, 0))
    assert [(c.path, c.value) for c in parts.constants] == [
        (("a", 1, 0), 1), (("a", 1, 1), None), (("a", 1, 2, 1), "s"), (("b",), True)
    ]  # fmt: skip
    again = unflatten_batch(parts.tree, parts.tensors)
    assert again["a"][0] is T and isinstance(again["a"][1][2], Pair) and again["b"] is True
    assert all(look_up(batch, p) is t for p, t in zip(parts.paths, parts.tensors, strict=True))
    assert look_up(T, (0,)) is T
    assert assemble((T,), {"k": T}) == (T, {"k": T})
    assert assemble(None, {"k": T}) == {"k": T}
    assert assemble(T, None) == (T,)


class WithLoss(nn.Module):
    """Returns its own loss where it gets labels."""

    def __init__(self, as_dict: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.as_dict = as_dict

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        y = self.lin(x)
        loss = None if labels is None else functional.mse_loss(y, labels)
        return {"loss": loss, "y": y} if self.as_dict else Result(y, None, loss)


@pytest.mark.slow
@pytest.mark.parametrize("as_dict", [True, False])
def test_the_outputs_own_loss_or_the_mean_square(as_dict: bool) -> None:
    model = WithLoss(as_dict)
    x, labels = torch.randn(4, 3), torch.randn(4, 3)
    captured = capture(model, {"x": x, "labels": labels})
    assert captured.loss_kind == "output"
    assert captured.outputs == (("y",) if as_dict else ("score",))
    loss, y = captured.graph(x, labels)
    assert torch.equal(loss, functional.mse_loss(y, labels))
    captured = capture(model, {"x": x})
    assert captured.loss_kind == "mean-square" and captured.constants == ()
    loss, y = captured.graph(x)
    assert torch.equal(loss, y.pow(2).mean())
    captured = capture(model, {"x": x, "labels": None})
    assert captured.loss_kind == "mean-square" and captured.constants[0].path == ("labels",)


def test_mean_square_of_several_outputs() -> None:
    outputs = {"a": torch.tensor([3.0]), "n": torch.tensor([5]), "b": torch.tensor([1.0, 2.0])}
    assert mean_square(outputs).item() == (9.0 + 2.5) / 2
    assert mean_square(outputs, frozenset({"a"})).item() == 9.0


def test_a_loss_with_the_shape_of_one_number_is_taken() -> None:
    def one(output: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output, goal).reshape(1, 1)

    captured = capture(nn.Linear(3, 3), (torch.randn(4, 3), torch.randn(4, 3)), loss=one)
    loss, _ = captured.graph(torch.randn(4, 3), torch.randn(4, 3))
    assert loss.shape == () and captured.loss_kind == "given"


class WithScalar(nn.Module):
    """Returns scores and one scalar, under a name or beside them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.lin, self.name = nn.Linear(3, 3), name

    def forward(self, x: torch.Tensor) -> Any:
        y = self.lin(x)
        penalty = y.pow(2).mean()
        return {"y": y, self.name: penalty} if self.name else (y, penalty)


@pytest.mark.parametrize("name", ["aux_loss", "kl", "router_z_loss", "temperature"])
def test_a_scalar_with_the_name_of_a_part_is_no_loss(name: str) -> None:
    with pytest.raises(FxpartError, match="FXP106") as refused:
        capture(WithScalar(name), (torch.randn(4, 3),))
    assert f"loss=lambda out: out['{name}']" in str(refused.value)


@pytest.mark.parametrize("name", ["", "total_loss", "objective", "elbo"])
def test_an_only_scalar_is_the_loss(name: str) -> None:
    captured = capture(WithScalar(name), (torch.randn(4, 3),))
    loss, y = captured.graph(x := torch.randn(4, 3))
    assert captured.loss_kind == "output" and torch.equal(loss, y.pow(2).mean()), x


def evidence(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The negative log-likelihood, and a divergence, of torch.distributions."""
    found, prior = Normal(output, output.exp()), Normal(torch.zeros_like(output), 1.0)
    return (kl_divergence(found, prior) - found.log_prob(target)).sum(-1).mean()


def variance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.gaussian_nll_loss(output, target, output.exp())


@pytest.mark.slow
@pytest.mark.parametrize("loss", [evidence, variance])
def test_checks_of_values_are_left_out_of_the_graph(
    loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises on wrong arguments, by control flow on data; afterwards it checks again."""
    # torch.compile, which other tests use, turns these checks off for good.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    model, batch = nn.Linear(3, 3), (torch.randn(4, 3), torch.randn(4, 3))
    captured = capture(model, batch, loss=loss)
    assert torch.equal(captured.graph(*batch)[0], loss(model(batch[0]), batch[1]))
    with pytest.raises(ValueError, match="loc"):
        evidence(torch.full((1, 3), torch.nan), batch[1])
    with pytest.raises(ValueError, match="var"):
        functional.gaussian_nll_loss(*batch, -torch.ones(4, 3))
