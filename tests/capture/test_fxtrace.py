"""The last way: a model that torch.export cannot take but torch.fx can."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fxpart.capture import capture
from fxpart.capture.call_arguments import split_batch_arguments
from fxpart.capture.flat_batch import flatten_batch
from fxpart.capture.fx_trace import symbolic_trace
from fxpart.capture.model_with_loss import ModelWithLoss
from fxpart.compiler import KEY
from fxpart.errors import FxpartError


@pytest.fixture(scope="module")
def operator() -> Iterator[str]:
    """A custom operator without a fake kernel, as compiled extensions often are."""
    library = torch.library.Library("fxpart_fxtrace", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    yield "fxpart_fxtrace::twice"
    library._destroy()


class Custom(nn.Module):
    """BatchNorm, dropout, ties, a buffer, and the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.bn = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.lin.weight
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = torch.ops.fxpart_fxtrace.twice(self.lin(x).detach())
        y = self.drop(torch.relu(self.bn(self.lin(x) + y))) + self.shift
        return {"y": self.last(y).view(x.shape[0], 2, 4)}


@pytest.mark.slow
@pytest.mark.usefixtures("operator")
@pytest.mark.parametrize("training", [True, False])
def test_an_operator_without_a_fake_kernel(training: bool) -> None:
    model = Custom()
    batch = (torch.randn(4, 8), torch.randn(4, 2, 4))

    def loss(output: dict[str, torch.Tensor], goal: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output["y"], goal)

    captured = capture(model, batch, loss=loss, training=training, batch_dims={"x": 0, "goal": 0})
    assert captured.method == "symbolic-trace" and not captured.symbolic
    assert len(captured.tried) == 5 and "twice" in captured.tried[0]
    assert captured.aliases == {"last.weight": "lin.weight"} and captured.outputs == ("y",)
    assert captured.eager is not None
    results = []
    for run in (lambda: captured.graph(*batch), lambda: captured.eager(batch)):  # type: ignore[misc]
        model.zero_grad()
        mean = model.bn.running_mean.clone()
        torch.manual_seed(0)
        values = run()
        values[0].backward()
        results.append(
            [*values, *(p.grad for p in model.parameters()), model.bn.running_mean.clone()]
        )
        model.bn.running_mean.copy_(mean)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    modules = {n.meta[KEY].module for n in captured.graph.graph.nodes}
    assert {"lin", "bn", "drop", "last"} <= modules | ({"drop"} if not training else set())
    shapes = [n.meta["val"].shape for n in captured.graph.graph.nodes if n.op == "placeholder"]
    assert [list(s) for s in shapes] == [[4, 8], [4, 2, 4]]


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) + torch.randn(8)


class Picks(Noisy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        return y + y[y > 0].sum()


def whole(model: nn.Module, x: torch.Tensor) -> ModelWithLoss:
    module = ModelWithLoss(
        model, None, split_batch_arguments(model, None, flatten_batch((x,)), has_kwargs=False)
    )
    module.floating = frozenset({"output"})
    return module


def test_nothing_random_is_baked_in() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="random"):
        symbolic_trace(whole(Noisy(), x), (x,))


def test_no_size_is_baked_in() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(FxpartError) as caught:
        symbolic_trace(whole(Picks(), x), (x,))
    assert caught.value.code == "FXP108" and "test_fxtrace.py" in caught.value.problems[0].where
