"""What is kept of a forward between the two: no weights, nothing for too long, nothing written."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from live_bytes import live
from torch import nn
from torch.nn import functional

from fxpart.collectives.parameter_regather import ParameterRegather
from fxpart.errors import FxpartError
from fxpart.runtime.weights import StageWeights
from fxpart.runtime.weights.saved_tensor_hooks import SavedWeightHooks
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import MODES

NAIVE, STASH = MODES["naive"], MODES["stash"]
VERSIONS = WeightVersionCounters((2, 1), 1)  # stage 0 misses one update


class Own(nn.Module):
    """Parameters by name, and a function of them and the input."""

    def __init__(self, run: Callable[..., torch.Tensor], **given: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in given.items():
            self.register_parameter(name, nn.Parameter(tensor))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the function gives."""
        return self.run(x, **dict(self.named_parameters()))


def passed(
    module: nn.Module,
    mode: Any,
    inputs: list[torch.Tensor],
    *,
    make: Any = torch.optim.SGD,
    hooks: Any = None,
) -> list[torch.Tensor]:
    """F0 F1 B0, an update, B1: the gradient of each input that has one."""
    optimizer = make([p for p in module.parameters() if p.requires_grad], lr=0.5)
    weights = StageWeights(module, optimizer, mode, VERSIONS, 0)
    outs = []
    for i, x in enumerate(inputs):
        with weights.forward(i):
            if hooks is None:
                outs.append(module(x))
            else:
                with hooks():
                    outs.append(module(x))
    for i, out in enumerate(outs):
        with weights.backward(i):
            out.backward(torch.ones_like(out))
        weights.update()
        optimizer.zero_grad()
        del out
        outs[i] = torch.empty(0)
    return [x.grad for x in inputs if x.grad is not None]


def rows(count: int = 2, *shape: int, dtype: Any = torch.float64) -> list[torch.Tensor]:
    """Inputs of a seed."""
    draw = torch.Generator().manual_seed(1)
    shape = shape or (3, 4)
    return [torch.randn(*shape, dtype=dtype, generator=draw).requires_grad_() for _ in range(count)]


@pytest.mark.parametrize(("ahead", "seen"), [(1, [0]), (2, [0, 1, 2, 3])])
def test_autograd_keeps_what_no_update_changes(
    ahead: int, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first is looked at where no update comes before the backward; the same bits."""
    looked: list[int] = []
    hooks = SavedWeightHooks.hooks
    monkeypatch.setattr(
        SavedWeightHooks, "hooks", lambda self, at: looked.append(at) or hooks(self, at)
    )
    torch.manual_seed(0)
    module = nn.Linear(4, 2).double()
    versions = WeightVersionCounters((ahead,) if ahead == 1 else (2, 1), 1)
    weights = StageWeights(module, torch.optim.SGD(module.parameters(), lr=0.5), NAIVE, versions, 0)
    flying: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for at, x in enumerate(rows(4)):
        with weights.forward(at):
            flying.append((x, module(x), module.weight.detach().clone()))
        if len(flying) == ahead:
            given, out, read = flying.pop(0)
            with weights.backward(at + 1 - ahead):
                out.backward(torch.ones_like(out))
            assert given.grad is not None
            assert torch.equal(given.grad, torch.ones_like(out) @ module.weight.detach())
            assert ahead > 1 or torch.equal(read, module.weight.detach())
            weights.update()
            module.zero_grad()
    assert looked == seen


LINEAR: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3, padding=1), nn.ConvTranspose1d(2, 1, 3)
    ),
    "einsum": lambda: Own(lambda x, w: torch.einsum("bi,io->bo", x, w), w=torch.randn(4, 3)),
    "repeated": lambda: Own(lambda x, w: x @ w @ w.T @ w, w=torch.randn(4, 3)),
    "narrow": lambda: Own(lambda x, w: x @ w[1:5, ::2] * w[0, 0], w=torch.randn(6, 4)),
    "cast": lambda: Own(lambda x, w: x.float() @ w.float().T, w=torch.randn(3, 4)),
    "scale": lambda: Own(lambda x, w: (x * w) @ w[:, None], w=torch.randn(4)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_after_an_update_linear_layers_send_back_through_the_new_weights(name: str) -> None:
    """The gradient of the input of B1, the bits of plain autograd on the weights of then."""
    torch.manual_seed(0)
    module = LINEAR[name]().double()
    given = rows()
    before = module(given[1])
    found = passed(module, NAIVE, given)[1]
    for parameter, old in zip(module.parameters(), _one_update(name), strict=True):
        parameter.data.copy_(old)  # the weights that it read: one update less
    other = given[1].detach().requires_grad_()
    out = module(other)
    out.backward(torch.ones_like(out))
    assert other.grad is not None and torch.equal(found, other.grad)
    assert not torch.equal(before, out)


def _one_update(name: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module, x = LINEAR[name]().double(), rows()[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    out = module(x)
    out.backward(torch.ones_like(out))
    optimizer.step()
    return [p.detach().clone() for p in module.parameters()]


def test_a_cast_stays_the_forward_s_where_the_backward_reads_its_weights() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w.to(torch.bfloat16).T

    for mode, changes in ((STASH, False), (NAIVE, True)):
        module = Own(run, w=torch.full((3, 4), 2.0))
        given = rows(dtype=torch.bfloat16)
        found = passed(module, mode, given)
        assert torch.equal(found[0], torch.full_like(found[0], 6.0))
        assert torch.equal(found[1], found[0]) is not changes


def test_parameters_in_one_storage_and_complex_ones() -> None:
    flat = torch.arange(1.0, 25.0, dtype=torch.float64)

    def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (x @ a.view(4, 3)) @ b.view(3, 4)

    module = Own(run, a=flat[:12], b=flat[12:])
    expected = (torch.ones(3, 4, dtype=torch.float64) @ flat[12:].view(3, 4).T) @ flat[:12].view(
        4, 3
    ).T
    assert torch.equal(passed(module, STASH, rows())[1], expected)

    def turned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(x.to(w.dtype) @ w.conj().T) * torch.view_as_real(w)[0].sum()

    w = torch.randn(3, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    plain = rows()[1]
    out = turned(plain, w)
    out.backward(torch.ones_like(out))
    assert plain.grad is not None
    assert torch.equal(passed(Own(turned, w=w.clone()), STASH, rows())[1], plain.grad)
    assert not torch.equal(passed(Own(turned, w=w.clone()), NAIVE, rows())[1], plain.grad)


class OutOfPlace(torch.optim.SGD):
    """Puts new tensors into the parameters instead of writing the old ones."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


@pytest.mark.parametrize("mode", ["stash", "naive", "spectrain"])
def test_optimizers_that_put_new_tensors_into_parameters(mode: str) -> None:
    found = []
    for make in (torch.optim.SGD, OutOfPlace):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv1d(3, 2, 1), nn.Flatten(), nn.Linear(8, 3)).double()
        found.append(passed(module, MODES[mode], rows(2, 2, 3, 4), make=make))
    for some, other in zip(*found, strict=True):
        torch.testing.assert_close(some, other)


def test_frozen_parameters_and_buffers_have_one_version() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    for parameter in module[2].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    weights = StageWeights(module, optimizer, STASH, VERSIONS, 0)
    for i in range(2):
        with weights.forward(i):
            out = module(torch.randn(3, 4))
    del out
    weights._in_flight.pop(0)  # as if its backward had run
    weights.update()
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    assert weights.bytes() == trained > 0
    assert int(module[1].num_batches_tracked) == 2  # type: ignore[arg-type]


def test_what_is_written_after_the_forward_is_told() -> None:
    module = Own(lambda x, w: torch.tanh(x * w), w=torch.ones(4))
    weights = StageWeights(module, torch.optim.SGD(module.parameters(), lr=0.1), NAIVE, VERSIONS, 0)
    x = torch.randn(3, 4)
    with weights.forward(0):
        out = module(x)
    x.add_(1.0)
    with pytest.raises(FxpartError, match="modified in place after the forward"):
        with weights.backward(0):
            out.sum().backward()


@pytest.mark.slow
def test_a_graph_that_is_dropped_is_freed() -> None:
    """Ops that save their own results do not keep themselves alive."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Softmax(-1))
    weights = StageWeights(module, torch.optim.SGD(module.parameters(), lr=0.1), NAIVE, VERSIONS, 0)

    class Mark:
        pass

    mark = Mark()
    gone = weakref.ref(mark)
    with weights.forward(0):
        out = module(torch.randn(3, 4))
    out.grad_fn.metadata["mark"] = mark
    del mark, out
    gc.collect()
    assert gone() is None


def test_no_copy_of_the_model_in_memory() -> None:
    """By the allocator's own account: two in flight and an update, with weights of 4 MB."""
    held = {}
    for name in ("naive", "pipeoptim", "spectrain", "stash"):
        module = nn.Linear(1000, 1000)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        weights = StageWeights(module, optimizer, MODES[name], VERSIONS, 0)
        outs = []
        for i in range(2):
            with weights.forward(i):
                outs.append(module(torch.randn(2, 1000)))
        with weights.backward(0):
            outs[0].sum().backward()
        for parameter in module.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
        start = live()
        weights.update()
        with weights.forward(2):
            outs.append(module(torch.randn(2, 1000)))
        held[name] = (live() - start) / 4e6
    assert held["stash"] > 0.9
    assert max(held[name] for name in ("naive", "pipeoptim", "spectrain")) < 0.1


def test_hooks_of_others_inside() -> None:
    """Those that gather parameters again leave what they do not gather to these."""
    torch.manual_seed(0)
    modules = [nn.Linear(4, 3).double(), nn.Linear(4, 3).double()]
    modules[1].load_state_dict(modules[0].state_dict())
    for mode in (STASH, NAIVE):
        plain = passed(modules[0], mode, rows())
        inside = passed(modules[1], mode, rows(), hooks=ParameterRegather().hooks)
        assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))
        assert mode is STASH or not torch.equal(*[functional.normalize(x) for x in inside])


def test_autocast() -> None:
    """Casts that autocast makes and keeps: the backward sees the new weights, in its dtype."""
    module = nn.Linear(4, 3)
    given = rows(dtype=torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    weights = StageWeights(module, optimizer, NAIVE, VERSIONS, 0)
    outs = []
    for i, x in enumerate(given):
        with weights.forward(i), torch.autocast("cpu", torch.bfloat16):
            outs.append(module(x))
    with weights.backward(0):
        outs[0].sum().backward()
    weights.update()
    with weights.backward(1):
        outs[1].sum().backward()
    expected = torch.ones(3, 3).bfloat16() @ module.weight.detach().bfloat16()
    assert torch.equal(given[1].grad, expected.float())  # type: ignore[arg-type]
