"""Names of state: ties by storage, buffers of every kind, names that a graph cannot hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart.capture import CapturedModel, capture
from fxpart.capture.model_tensors import state_of
from fxpart.compat import storage_identity


def attributes(captured: CapturedModel) -> set[str]:
    return {str(n.target) for n in captured.graph.graph.nodes if n.op == "get_attr"}


class Views(nn.Module):
    """Two parameters on one storage; a third that is a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(self.a.data)
        self.part = nn.Parameter(self.a.data[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.a) @ self.b @ self.part.t()


def test_ties_are_found_by_storage_and_views_are_not_ties() -> None:
    model = Views()
    captured = capture(model, (torch.randn(3, 4),))
    assert captured.aliases == {"b": "a"}
    assert captured.parameters == ("a", "part")
    assert attributes(captured) == {"a", "part"}
    loss, _ = captured.graph(torch.randn(3, 4))
    loss.backward()
    assert model.b.grad is None and model.a.grad is not None


class Sharing(nn.Module):
    """A weight, and a second tensor that is in a part of its memory."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        flat = torch.randn(32)
        self.a = nn.Parameter(flat[:16].view(4, 4))
        self.kind = kind
        if kind in ("parameter", "beside", "frozen"):
            self.b = nn.Parameter(flat[12:16] if kind != "beside" else flat[16:20])
            self.b.requires_grad_(kind != "frozen")
            self.a.requires_grad_(kind != "frozen")
        elif kind == "attribute":
            self.b = self.a.detach()[0]
        else:
            self.register_buffer("written", torch.zeros(8) if kind == "buffers" else flat[:4])
            self.register_buffer("b", self.written[:4])
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "buffers":
            with torch.no_grad():
                self.written.add_(x.mean())
        return self.head(torch.tanh(x @ self.a) * self.b)


@pytest.mark.parametrize(
    "kind", ["parameter", "attribute", "buffer", "buffers", "beside", "frozen"]
)
def test_tensors_that_change_with_each_other_are_refused(kind: str) -> None:
    given: Any = {"example_inputs": (torch.randn(4, 4),) * 2, "loss": nn.functional.mse_loss}
    if kind in ("beside", "frozen"):
        fxpart.compile(Sharing(kind), "local:1", **given, check="off")
        return
    with pytest.raises(fxpart.FxpartError, match="two tensors in the same memory") as caught:
        fxpart.compile(Sharing(kind), "local:1", **given)
    assert caught.value.code == "FXP113" and "b" in caught.value.problems[0].where.split(", ")


def test_ties_on_meta() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"in": nn.Linear(4, 4), "out": nn.Linear(4, 4)})
        model["out"].weight = model["in"].weight
    state = state_of(model)
    assert state.aliases == {"out.weight": "in.weight"}
    a, b = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    assert storage_identity(a) != storage_identity(b)
    assert storage_identity(a) == storage_identity(a.view(4))
    assert storage_identity(a) != storage_identity(a[:2])


class Kinds(nn.Module):
    """Buffers saved and not saved, a plain tensor, a constant in forward, unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("saved", torch.ones(4))
        self.register_buffer("dropped", torch.full((4,), 2.0), persistent=False)
        self.plain = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.saved + self.dropped - self.plain + torch.tensor([0.5])


def test_every_kind_of_tensor_has_a_name() -> None:
    model = Kinds()
    captured = capture(model, (torch.randn(3, 4),))
    assert captured.persistent == {"saved"}
    assert {"lin.weight", "lin.bias", "unused.weight", "unused.bias"} == set(captured.parameters)
    constants = set(captured.state) - set(captured.parameters) - {"saved", "dropped"}
    assert "plain" in constants and len(constants) == 2
    assert attributes(captured) == set(captured.state) - {"unused.weight", "unused.bias"}
    x = torch.randn(5, 4)
    _, output = captured.graph(x)
    assert torch.equal(output, model(x))
    with torch.no_grad():
        model.lin.weight.zero_()
    assert torch.equal(captured.graph(x)[1], model(x))


class Clash(nn.Module):
    """Names that torch.fx wants for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = nn.Linear(4, 4)
        self.code = nn.Linear(4, 4)
        self.meta = nn.Parameter(torch.ones(4))

    def forward(self, graph: torch.Tensor) -> torch.Tensor:
        return self.code(self.graph(graph)) * self.meta


def test_names_that_a_graph_module_has_itself() -> None:
    model = Clash()
    captured = capture(model, (torch.randn(3, 4),))
    x = torch.randn(3, 4)
    assert torch.equal(captured.graph(x)[1], model(x))
    for name, parameter in model.named_parameters():
        assert captured.state[captured.aliases.get(name, name)] is parameter


class LossWithState(nn.Module):
    """A loss that has a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("weight", torch.ones(4))

    def forward(self, output: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        return ((output - goal).pow(2) * self.weight).mean() * self.scale


def test_the_loss_has_names_too() -> None:
    loss = LossWithState()
    captured = capture(nn.Linear(4, 4), (torch.randn(3, 4), torch.randn(3, 4)), loss=loss)
    assert captured.state["loss.scale"] is loss.scale and "loss.scale" in captured.parameters
    assert "loss.weight" in captured.persistent


def test_inputs_named_like_builtins_and_like_each_other() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, input: torch.Tensor, rng_key: torch.Tensor) -> torch.Tensor:
            return self.lin(input) + rng_key

    captured = capture(Odd(), (torch.randn(3, 4), torch.randn(3, 4)))
    names = [n.name for n in captured.graph.graph.nodes if n.op == "placeholder"]
    assert names == [spec.name for spec in captured.inputs]
    assert len(set(names)) == 2 and "rng_key" not in names
