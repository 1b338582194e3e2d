"""Where a loss may read a number from: a change after compile() is refused before the next step."""

from __future__ import annotations

import argparse
import collections
import contextvars
import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import fxpart
from fxpart.errors import FxpartError

BATCH = torch.ones(4, 3) * torch.arange(1, 5).reshape(4, 1) / 4, torch.ones(4, 2)


class Slotted:
    """An object without a dict."""

    __slots__ = ("beta",)

    def __init__(self) -> None:
        self.beta = 1.0


class OfClass:
    """The number is of the class alone."""

    beta = 1.0


class Getter:
    """The number is read by a method, under another name."""

    def __init__(self) -> None:
        self._inner = 1.0

    def get_beta(self) -> float:
        return self._inner


class Mapped:
    """The number is in a dict inside."""

    def __init__(self) -> None:
        self._values = {"beta": 1.0}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._values[name]

    def __getitem__(self, name: str) -> Any:
        return self._values[name]


class AttributeDict(dict[str, Any]):
    """A dict whose elements are read as attributes."""

    __getattr__ = dict.__getitem__


class Pair(NamedTuple):
    """Is replaced as a whole."""

    beta: float


@dataclass(frozen=True)
class Frozen:
    """Is replaced as a whole."""

    beta: float


NAMESPACE = argparse.Namespace(beta=1.0)
SIMPLE = SimpleNamespace(inner=SimpleNamespace(beta=1.0))
SLOTTED = Slotted()
OF_CLASS = OfClass()
GETTER = Getter()
MAPPED = Mapped()
ITEMS = Mapped()
DICT = AttributeDict(beta=1.0)
USER_DICT = collections.UserDict(beta=1.0)
CHAIN: Any = collections.ChainMap({}, {"beta": 1.0})
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("beta", default=1.0)
SETTINGS: dict[str, Any] = {"pair": Pair(1.0)}
FROZEN: dict[str, Any] = {"beta": Frozen(1.0)}
LATER: dict[str, float] = {}
OPTIONAL = SimpleNamespace()


def one() -> float:
    """A function that is replaced."""
    return 1.0


def two() -> float:
    """Its replacement."""
    return 2.0


FUNCTIONS = {"beta": one}


def _scaled(out: torch.Tensor, target: torch.Tensor, *, beta: float) -> torch.Tensor:
    return (out - target).square().mean() * beta


PARTIAL = functools.partial(_scaled, beta=1.0)


def reading(read: Callable[[], float]) -> Callable[..., torch.Tensor]:
    """A loss with a number."""
    return lambda out, target: (out - target).square().mean() * read()


def replaced(space: dict[str, Any], key: str, value: Any) -> Callable[[], None]:
    """A change of one element."""
    return lambda: space.__setitem__(key, value)


CASES: dict[str, tuple[Callable[[], float], Callable[[], object], Callable[[], object]]] = {
    "argparse": (
        lambda: NAMESPACE.beta,
        lambda: setattr(NAMESPACE, "beta", 2.0), lambda: setattr(NAMESPACE, "beta", 1.0),
    ),
    "namespace in a namespace": (
        lambda: SIMPLE.inner.beta,
        lambda: setattr(SIMPLE.inner, "beta", 2.0), lambda: setattr(SIMPLE.inner, "beta", 1.0),
    ),
    "namespace replaced": (
        lambda: SIMPLE.inner.beta,
        lambda: setattr(SIMPLE, "inner", SimpleNamespace(beta=2.0)),
        lambda: setattr(SIMPLE, "inner", SimpleNamespace(beta=1.0)),
    ),
    "slots": (
        lambda: SLOTTED.beta,
        lambda: setattr(SLOTTED, "beta", 2.0), lambda: setattr(SLOTTED, "beta", 1.0),
    ),
    "class, by the object": (
        lambda: OF_CLASS.beta,
        lambda: setattr(OF_CLASS, "beta", 2.0), lambda: delattr(OF_CLASS, "beta"),
    ),
    "class, of the object": (
        lambda: OF_CLASS.beta,
        lambda: setattr(OfClass, "beta", 2.0), lambda: setattr(OfClass, "beta", 1.0),
    ),
    "class": (
        lambda: OfClass.beta,
        lambda: setattr(OfClass, "beta", 2.0), lambda: setattr(OfClass, "beta", 1.0),
    ),
    "method": (
        lambda: GETTER.get_beta(),
        lambda: setattr(GETTER, "_inner", 2.0), lambda: setattr(GETTER, "_inner", 1.0),
    ),
    "getattr": (
        lambda: MAPPED.beta,
        lambda: MAPPED._values.update(beta=2.0), lambda: MAPPED._values.update(beta=1.0),
    ),
    "getitem": (
        lambda: ITEMS["beta"],
        lambda: ITEMS._values.update(beta=2.0), lambda: ITEMS._values.update(beta=1.0),
    ),
    "dict of attributes": (
        lambda: DICT.beta, lambda: DICT.update(beta=2.0), lambda: DICT.update(beta=1.0),
    ),
    "UserDict": (
        lambda: USER_DICT["beta"],
        lambda: USER_DICT.update(beta=2.0), lambda: USER_DICT.update(beta=1.0),
    ),
    "ChainMap": (
        lambda: CHAIN["beta"],
        lambda: CHAIN.maps[1].update(beta=2.0), lambda: CHAIN.maps[1].update(beta=1.0),
    ),
    "ChainMap, in front": (
        lambda: CHAIN["beta"], lambda: CHAIN.update(beta=2.0), lambda: CHAIN.clear(),
    ),
    "contextvar": (
        lambda: VARIABLE.get(), lambda: VARIABLE.set(2.0), lambda: VARIABLE.set(1.0),
    ),
    "named tuple": (
        lambda: SETTINGS["pair"].beta,
        replaced(SETTINGS, "pair", Pair(2.0)), replaced(SETTINGS, "pair", Pair(1.0)),
    ),
    "frozen": (
        lambda: FROZEN["beta"].beta,
        replaced(FROZEN, "beta", Frozen(2.0)), replaced(FROZEN, "beta", Frozen(1.0)),
    ),
    "absent element": (
        lambda: LATER.get("beta", 1.0), replaced(LATER, "beta", 2.0), lambda: LATER.clear(),
    ),
    "absent attribute": (
        lambda: getattr(OPTIONAL, "beta", 1.0),
        lambda: setattr(OPTIONAL, "beta", 2.0), lambda: delattr(OPTIONAL, "beta"),
    ),
    "function": (
        lambda: FUNCTIONS["beta"](),
        replaced(FUNCTIONS, "beta", two), replaced(FUNCTIONS, "beta", one),
    ),
    "environment": (
        lambda: float(os.environ.get("FXPART_TEST_BETA", "1.0")),
        lambda: os.environ.__setitem__("FXPART_TEST_BETA", "2.0"),
        lambda: os.environ.pop("FXPART_TEST_BETA"),
    ),
}  # fmt: skip


def trainer_of(loss: Any, model: nn.Module | None = None) -> Any:
    """Of one process."""
    torch.manual_seed(0)
    program = fxpart.compile(
        model or nn.Linear(3, 2), "local:1", example_inputs=BATCH, loss=loss, microbatches=1,
        check="off",
    )  # fmt: skip
    return program.trainer(lambda p: torch.optim.SGD(p, lr=0.1))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_change_is_refused(name: str) -> None:
    read, change, back = CASES[name]
    trainer = trainer_of(reading(read))
    trainer.step(BATCH)
    change()
    try:
        assert read() == 2.0
        for _ in range(2):
            with pytest.raises(FxpartError) as caught:
                trainer.step(BATCH)
            assert {p.code for p in caught.value.problems} == {"FXP113"}
    finally:
        back()
    assert read() == 1.0
    trainer.step(BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_keywords_of_a_partial_are_watched(inside: bool) -> None:
    loss = functools.partial(_scaled, beta=1.0)
    trainer = trainer_of((lambda out, target: loss(out, target)) if inside else loss)
    trainer.step(BATCH)
    loss.keywords["beta"] = 2.0
    with pytest.raises(FxpartError, match="FXP113"):
        trainer.step(BATCH)


class Model(nn.Module):
    """A model with numbers of its class and of its arguments."""

    scale = 1.0

    def __init__(self, args: Any) -> None:
        super().__init__()
        self.args = args
        self.lin = nn.Linear(3, 2)
        self.act = torch.tanh

    def forward(self, x: torch.Tensor) -> Any:
        return self.act(self.lin(x)) * self.scale * self.args.beta


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "scale", 2.0),
        lambda m: setattr(m.args, "beta", 2.0),
        lambda m: setattr(m, "args", argparse.Namespace(beta=2.0)),
        lambda m: setattr(m, "act", torch.sin),
    ],
)
def test_a_model_is_watched(change: Callable[[Model], None]) -> None:
    model = Model(argparse.Namespace(beta=1.0))
    trainer = trainer_of(nn.functional.mse_loss, model)
    trainer.step(BATCH)
    change(model)
    with pytest.raises(FxpartError, match="FXP113"):
        trainer.step(BATCH)


@pytest.mark.slow
def test_equal_values_may_be_replaced() -> None:
    model = Model(argparse.Namespace(beta=1.0))
    trainer = trainer_of(nn.functional.mse_loss, model)
    model.args = argparse.Namespace(beta=1.0)
    trainer.step(BATCH)
    model.args.beta = 2.0
    with pytest.raises(FxpartError, match="args"):
        trainer.step(BATCH)


class Listing(nn.Module):
    """A model that keeps what it saw, which a loop may empty."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.detach())
        return self.lin(x)  # type: ignore[no-any-return]


def test_a_list_that_a_loop_empties_is_no_change() -> None:
    model = Listing()
    trainer = trainer_of(nn.functional.mse_loss, model)
    for _ in range(2):
        model.seen = []
        model(BATCH[0])
        model.seen.clear()
        trainer.step(BATCH)


@pytest.mark.slow
def test_a_look_is_cheap() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)), nn.Linear(3, 2))
    trainer = trainer_of(reading(lambda: NAMESPACE.beta), model)
    trainer.agreement.guard()
    start = time.perf_counter()
    for _ in range(100):
        trainer.agreement.guard()
    assert time.perf_counter() - start < 0.1
