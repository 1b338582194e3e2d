"""Gradients that a traced graph would lose are noticed."""

from __future__ import annotations

from contextlib import closing
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import fxpart
from fxpart.capture import capture
from fxpart.capture.context_managers import reentrant_checkpoints_recorded
from fxpart.compiler.function_ops import find_function, load
from fxpart.errors import FxpartError
from fxpart.training.trainer_factory import load_trainer


class Round(torch.autograd.Function):
    """Straight-through: the backward is not that of the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class Swish(torch.autograd.Function):
    """Saves memory: the backward is that of the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * s * (1 + x * (1 - s))


class Uses(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.3)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.function(self.lin(x)))


class Reverse(torch.autograd.Function):
    """Reverses gradients; takes a number, and writes them by a mask."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        grad = -ctx.scale * grad
        grad[x > 1] = 0
        return grad, None


class Scale(torch.autograd.Function):
    """Two results, one without a gradient; rows do not depend on each other, but elements do."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = x.norm(dim=-1, keepdim=True)
        return x / size * weight, size

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:  # type: ignore[override]
        x, weight, size = ctx.saved_tensors
        return grad * weight / size, (grad * x / size).sum(0)


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))
        self.reverse = Reverse.apply  # a bound method from before the capture

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.reverse(Round.apply(3 * self.first(x)), 0.7)
        scaled, size = Scale.apply(self.second(hidden) + 1, self.weight)
        return scaled + size


def test_backwards_of_their_own_that_differ_are_called() -> None:
    torch.manual_seed(0)
    model, x = Functions(), torch.randn(6, 4)
    captured = capture(model, (x,))
    assert captured.tried == (
        "custom backward functions (Scale, Reverse, Round): called in the graph",
    )
    found = torch.autograd.grad(captured.graph(x)[-1].square().sum(), list(model.parameters()))
    own = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(map(torch.equal, found, own)) and all(gradient.any() for gradient in own)
    ops = [n.target for n in captured.graph.graph.nodes if find_function(n.target)]
    assert [torch.Tag.pointwise in op.tags for op in ops] == [True, True, False]


def test_one_that_is_kept_trains_without_the_model(tmp_path: Path) -> None:
    """In stages of a sharded batch, and from an exported program."""
    torch.manual_seed(0)
    model, batch = Uses(Round.apply), (torch.randn(4, 4), torch.randn(4, 4))
    model.drop = nn.Identity()
    constraints = {"mesh": "dp=2", "pp": 2, "microbatches": 2}
    program = fxpart.compile(
        model,
        "local:4",
        example_inputs=batch,
        loss=nn.functional.mse_loss,
        constraints=constraints,
        check="on",
    )
    program.export(tmp_path / "program")
    make = partial(torch.optim.SGD, lr=0.1)
    state, model = model.state_dict(), deepcopy(model)
    optimizer = make(model.parameters())
    with (
        closing(program.trainer(make)) as one,
        closing(load_trainer(tmp_path / "program", make, weights=state)) as two,
    ):
        for _ in range(3):
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
            loss.backward()
            assert float(one.step(batch)) == pytest.approx(float(loss), rel=1e-5)
            assert float(two.step(batch)) == pytest.approx(float(loss), rel=1e-5)
            optimizer.step()
            optimizer.zero_grad()


def test_a_function_is_imported_where_its_op_is_unknown() -> None:
    found = load(f"{__name__}:Round", "(Tensor a0) -> Tensor", "of another process", pointwise=True)
    x = torch.tensor([0.4, 1.6], requires_grad=True)
    found(x).sum().backward()
    assert torch.equal(found(x), x.round()) and torch.equal(x.grad, torch.ones(2))


class Halves(torch.autograd.Function):
    """Its backward depends on a number, and its forward does not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.rows = rows
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return 3 * grad / ctx.rows, None


def test_a_number_of_rows_couples_them() -> None:
    model = Uses(lambda x: Halves.apply(x, x.shape[0]))
    batch = (torch.randn(4, 4), torch.randn(4, 4))
    with pytest.raises(FxpartError, match="Halves_.* combines rows") as caught:
        fxpart.compile(
            model, "local:1", example_inputs=batch, loss=nn.functional.mse_loss, microbatches=2
        )
    assert caught.value.code == "FXP114"


def test_a_function_that_cannot_be_imported() -> None:
    with pytest.raises(FxpartError) as caught:
        load("tests_no_module:Gone", "(Tensor a0) -> Tensor", "Gone_0", pointwise=True)
    assert caught.value.code == "FXP108" and "tests_no_module" in caught.value.problems[0].why


NOISE = torch.ones(4)


def make_function(compute: Any) -> Any:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, other: Any = None) -> torch.Tensor:
            return compute(x)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            return 2 * grad, None

    return Doubled.apply


TANH = make_function(torch.tanh)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (make_function(lambda x: x + torch.rand_like(x)), "draws random numbers"),
        (make_function(lambda x: x + NOISE), "uses tensors that are not its arguments"),
        (lambda x: TANH(x, torch.tanh), "argument 1 of Doubled.apply is a builtin_function"),
        (make_function(lambda x: x.add_(1)), "writes its arguments in place"),
    ],
)
def test_a_backward_of_its_own_that_no_op_can_call(function: Any, why: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(FxpartError) as caught:
        capture(Uses(function), (torch.randn(3, 4),))
    problem = caught.value.problems[0]
    assert problem.code == "FXP108" and "register_autograd" in problem.fix and why in problem.why
    assert "test_gradients.py" in problem.where and "class Doubled" in problem.where


def test_one_that_agrees_is_taken_and_told() -> None:
    captured = capture(Uses(Swish.apply), (torch.randn(3, 4),))
    assert "Swish" in captured.tried[-1]


def test_one_that_cannot_be_compared_is_called() -> None:
    with torch.device("meta"):
        model = Uses(Swish.apply)
    captured = capture(model, (torch.randn(3, 4),))
    assert "called in the graph" in captured.tried[-1]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_no_concern(reentrant: bool) -> None:
    """Also one that runs its forward without gradients; unless no argument needs one."""
    x = torch.randn(3, 4)
    model = Uses(lambda y: checkpoint(torch.tanh, y, use_reentrant=reentrant))
    captured = capture(model, (x,))
    assert captured.tried == ()
    assert torch.autograd.grad(captured.graph(x)[-1].sum(), model.lin.weight)[0].any()
    model.function = lambda y: y + checkpoint(model.lin, y.detach(), use_reentrant=reentrant)
    found, own = (
        torch.autograd.grad(run.sum(), model.lin.bias)[0]
        for run in (capture(model, (x,), training=False).graph(x)[-1], model.eval()(x))
    )
    assert torch.equal(found, own) and own.mean() == (3 if reentrant else 6)


def test_captures_at_the_same_time_leave_checkpoints_as_they_were() -> None:
    before = CheckpointFunction.apply
    with reentrant_checkpoints_recorded(), reentrant_checkpoints_recorded():
        assert CheckpointFunction.apply is not before
    assert CheckpointFunction.apply == before


def test_hooks_are_refused() -> None:
    def hooked(x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 2)
        return x

    with pytest.raises(FxpartError) as caught:
        capture(Uses(hooked), (torch.randn(3, 4),))
    assert "register_hook" in caught.value.problems[0].where
    model = Uses(torch.tanh)
    model.lin.register_full_backward_hook(lambda module, before, after: None)
    with pytest.raises(FxpartError) as caught:
        capture(model, (torch.randn(3, 4),))
    assert caught.value.problems[0].where == "lin"


@pytest.mark.parametrize(
    ("wrap", "code"),
    [
        (torch.jit.script, "FXP108"),
        (nn.DataParallel, "FXP108"),
        (lambda module: module.forward, "FXP109"),
    ],
)
def test_what_is_no_plain_module(wrap: Any, code: str) -> None:
    with pytest.raises(FxpartError) as caught:
        capture(wrap(nn.Linear(4, 4)), (torch.randn(3, 4),))
    assert caught.value.code == code


@pytest.mark.slow
def test_a_compiled_module_is_unwrapped() -> None:
    captured = capture(torch.compile(nn.Linear(4, 4)), (torch.randn(3, 4),))
    assert captured.parameters == ("weight", "bias") and captured.model_name == "Linear"
