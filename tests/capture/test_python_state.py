"""Models that change Python state in forward: every run of a capture starts from the user's."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart.capture.python_state import PythonState
from tests.support.plain_training import ONE, batches_of, difference

TABLES: dict[str, torch.Tensor] = {}


@functools.lru_cache
def ramp(count: int) -> torch.Tensor:
    """A table that is made once and kept."""
    return torch.arange(count).float() * 0.1


class Store:
    """An object of the user's that keeps tensors."""

    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}


class Cached(nn.Module):
    """Tables in a global, in an lru_cache, and in an object that a module has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.store = nn.Linear(8, 8), nn.Linear(8, 4), Store()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "scale" not in TABLES:
            TABLES["scale"] = torch.full((8,), 0.5)
        width = x.shape[-1]
        if width not in self.store.kept:
            self.store.kept[width] = torch.linspace(0, 1, 8)
        tables = ramp(8) + TABLES["scale"] + self.store.kept[width]
        return self.outer(torch.tanh(self.inner(x)) * tables)


class PreHooks(nn.Module):
    """The first forward gives each of many equal layers two hooks and keeps their handles."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(8)])
        self.outer = nn.Linear(8, 4)
        self.handles: list[Any] = []
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.handles:
            for layer in self.layers:
                self.handles.append(
                    layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
                )
                self.handles.append(
                    layer.register_forward_hook(lambda module, args, out: self.seen.append(out))
                )
        self.seen.clear()
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.outer(sum(self.seen))


class Features(nn.Module):
    """An attribute that exists from the first forward on; hooks as methods."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.outer = nn.Linear(8, 4)

    def keep(self, index: int, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.features[index] = out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "features"):
            self.features: dict[int, torch.Tensor] = {}
            for index, module in enumerate(self.body):
                module.register_forward_hook(functools.partial(self.keep, index))
        self.body(x)
        return self.outer(self.features[0] + self.features[2])


class Patched(nn.Module):
    """The first forward replaces the forward of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.patched = nn.Linear(8, 8), nn.Linear(8, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.patched:
            original = self.inner.forward
            self.inner.forward = lambda y: original(y) * 2  # type: ignore[method-assign]
            self.patched = True
        return self.outer(self.inner(x))


@pytest.mark.slow
@pytest.mark.parametrize("build", [Cached, PreHooks, Features, Patched])
def test_models_that_prepare_themselves_in_the_first_forward(build: type[nn.Module]) -> None:
    TABLES.clear()
    assert difference(build, batches_of((8, 8), (8, 4))) == 0.0


@pytest.mark.slow
def test_compile_leaves_no_trace() -> None:
    model, batch = PreHooks(), batches_of((8, 8), (8, 4))[0]
    fxpart.compile(
        model, "local:1", example_inputs=batch, loss=nn.MSELoss(), constraints=ONE, check="off"
    )
    assert not model.handles and not model.seen
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)


@pytest.mark.slow
def test_caches_hold_no_tensor_of_a_tracer() -> None:
    TABLES.clear()
    model, batch = Cached(), batches_of((8, 8), (8, 4))[0]
    fxpart.compile(
        model, "local:1", example_inputs=batch, loss=nn.MSELoss(), constraints=ONE, check="off"
    )
    assert not TABLES and not model.store.kept and ramp.cache_info().currsize == 0


def test_containers_classes_and_closures_are_restored() -> None:
    count = 0

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queue, self.named = deque([1, 2]), OrderedDict(a=1)
            self.nested = ([{"deep": 1}], {3})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            self.queue.append(3)
            self.named["b"] = 2
            self.nested[0][0]["deep"] = 2
            self.nested[1].add(4)
            self.fresh = x
            return x

    model = Odd()
    with PythonState.of(model, None).unchanged():
        model(torch.ones(1))
        model.__class__ = nn.Identity  # type: ignore[assignment]
    assert type(model) is Odd and not hasattr(model, "fresh")
    assert list(model.queue) == [1, 2] and model.named == {"a": 1}
    assert model.nested == ([{"deep": 1}], {3})
    assert count == 0


class _Named:
    __slots__ = ("number",)


class _Constant(_Named):
    """The slot of the base hides behind a property without a setter, as in mpmath's constants."""

    @property
    def number(self) -> tuple[int]:  # type: ignore[override]
        return (1,)


def test_a_slot_behind_a_property() -> None:
    constant = _Constant()
    _Named.number.__set__(constant, 1.0)  # type: ignore[attr-defined]
    with PythonState.of([constant]).unchanged():
        _Named.number.__set__(constant, 2.0)  # type: ignore[attr-defined]
    assert _Named.number.__get__(constant) == 1.0  # type: ignore[attr-defined]


def test_modules_that_pytest_puts_into_asserts_are_not_the_users() -> None:
    def forward(x: Any) -> Any:
        assert x is not None
        return x

    assert "@pytest_ar" in forward.__globals__
    scopes = [scope for scope, _, _ in PythonState.of(forward).variables]
    assert all(scope is not vars(forward.__globals__["@pytest_ar"]) for scope in scopes)
