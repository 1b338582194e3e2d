"""The comparison of the captured program with the module as written, each kind of difference."""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart.errors import FxpartError

numpy = pytest.importorskip("numpy")
CALLS = 0
TEMPERATURE = 2.0


class Base(nn.Module):
    """Two layers; subclasses change what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.prepare()

    def prepare(self) -> None:
        """Attributes of a subclass."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """What a subclass does to the hidden values."""
        return hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(torch.tanh(self.first(x))))


class DictOfMeans(Base):
    def prepare(self) -> None:
        self.memory: dict[str, torch.Tensor] = {}

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        mean = hidden.detach().mean(0)
        self.memory["mean"] = 0.5 * self.memory.get("mean", torch.zeros(8)) + mean
        return hidden - self.memory["mean"]


class Window(Base):
    def prepare(self) -> None:
        self.window: deque[torch.Tensor] = deque(maxlen=4)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.window.append(hidden.detach().mean(0))
        return hidden - sum(self.window) / len(self.window)


class LateWarmUp(Base):
    """The counter decides only after very many calls."""

    def prepare(self) -> None:
        self.step = 0

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return hidden * 2 if self.step > 10_000 else hidden


class Schedule:
    def __init__(self) -> None:
        self.number = 0

    def value(self) -> float:
        self.number += 1
        return 1.0 / self.number


class ScheduleObject(Base):
    def prepare(self) -> None:
        self.schedule = Schedule()

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.schedule.value()


class GlobalCounter(Base):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS += 1
        return hidden / CALLS


class ClassCounter(Base):
    number = 0

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        ClassCounter.number += 1
        return hidden / ClassCounter.number


class Count(Base):
    def prepare(self) -> None:
        self.numbers = itertools.count(1)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden / next(self.numbers)


class AlternatingFlag(Base):
    def prepare(self) -> None:
        self.even = False

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.even = not self.even
        return hidden if self.even else -hidden


class NumpyNoise(Base):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * float(numpy.random.uniform(0.5, 1.5))


class OwnGenerator(Base):
    def prepare(self) -> None:
        self.numbers = random.Random(3)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.numbers.random()


class NumpyGenerator(Base):
    def prepare(self) -> None:
        self.numbers = numpy.random.default_rng(3)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * float(self.numbers.random())


class SeldomDropped(Base):
    """An event so rare that other seeds do not find it."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden) if random.random() < 1e-4 else hidden


class Clock(Base):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2 if time.time() % 86_400 * 7 % 2 > 1 else hidden


class InnerGradient(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_(True)
        energy = torch.tanh(self.first(x)).pow(2).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.last(torch.nn.functional.pad(force, (0, 2)))


class TransformedGradient(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def energy(values: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.first(values)).pow(2).sum()

        return self.last(torch.nn.functional.pad(torch.func.grad(energy)(x), (0, 2)))


class LateBuffer(Base):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((8,), 0.5))
        return hidden * self.scale


class NodeHook(Base):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.grad_fn is not None:
            hidden.grad_fn.register_prehook(lambda gradients: tuple(g * 0.5 for g in gradients))
        return hidden


WRONG: list[type[Base]] = [
    DictOfMeans, Window, LateWarmUp, ScheduleObject, GlobalCounter, ClassCounter, Count,
    AlternatingFlag, NumpyNoise, OwnGenerator, NumpyGenerator, SeldomDropped,
    TransformedGradient, LateBuffer, NodeHook,
]  # fmt: skip


class LastValueKept(Base):
    """Keeps what it computed, for people to look at."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen = hidden
        return hidden


class UnreadCounter(Base):
    def prepare(self) -> None:
        self.calls = 0

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden


class LazyTable(Base):
    """Makes a table once and keeps it, as rotary embeddings do."""

    def prepare(self) -> None:
        self.table: torch.Tensor | None = None

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 8)
        return hidden * self.table


class AssignedBuffer(Base):
    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.tensor(0), persistent=False)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        out = hidden * self.mean.sigmoid()
        self.mean = torch.lerp(self.mean, hidden.detach().mean(0), 0.25)
        self.calls = self.calls + 1
        return out + self.mean / self.calls


class UnusedDraw(Base):
    def prepare(self) -> None:
        self.drop = 0.0
        self.dropout = nn.Dropout(0.3)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if random.random() < self.drop else self.dropout(hidden)


# Where the tracer itself finds that it cannot record the module.
CODES = {TransformedGradient: ("FXP108",)}
RIGHT: list[type[Base]] = [
    Base, LastValueKept, UnreadCounter, LazyTable, AssignedBuffer, UnusedDraw, InnerGradient,
]  # fmt: skip


def batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeded inputs and targets."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 2, generator=generator)


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    """A seeded model."""
    torch.manual_seed(0)
    return kind()


def compiled(model: nn.Module, loss: Any = None, **options: Any) -> fxpart.Program:
    """Compiled for one rank, or as the options say."""
    options = {"cluster": "local:1", "microbatches": 1, **options}
    return fxpart.compile(
        model, example_inputs=batch(), loss=loss or nn.functional.mse_loss, **options
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Plain SGD."""
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_a_module_that_differs_is_refused(kind: type[Base]) -> None:
    with pytest.raises(FxpartError) as caught:
        compiled(made(kind))
    assert caught.value.code in CODES.get(kind, ("FXP113",)), str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_a_module_that_is_captured_right_trains_as_in_one_process(kind: type[Base]) -> None:
    model = made(kind)
    plain = copy.deepcopy(model)
    program = compiled(model)
    assert program.plan.check is not None and program.plan.check.status == "passed"
    trainer = program.trainer(sgd)
    if kind is UnusedDraw:
        return
    optimizer = sgd(plain.parameters())
    x, y = batch()
    for scale in (1.0, 0.5, 2.0):
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x * scale), y).backward()
        optimizer.step()
        trainer.step((x * scale, y))
    state = trainer.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_error_names_the_line_that_reads_the_counter() -> None:
    with pytest.raises(FxpartError) as caught:
        compiled(made(LateWarmUp))
    assert "self.step > 10_000" in str(caught.value) and "test_module_check.py" in str(caught.value)


@pytest.mark.slow
def test_the_error_names_the_line_that_draws() -> None:
    with pytest.raises(FxpartError) as caught:
        compiled(made(SeldomDropped))
    assert "random.random() < 1e-4" in str(caught.value)


def test_a_clock_that_decides_is_refused() -> None:
    with pytest.raises(FxpartError, match=r"time\.time\(\)"):
        compiled(made(ClockSchedule))


class ClockSchedule(Base):
    def prepare(self) -> None:
        self.start = time.time()

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2 if time.time() - self.start > 3600 else hidden


@pytest.mark.slow
def test_everything_is_restored() -> None:
    model = made(AssignedBuffer)
    model.notes = {"list": [1, 2], "tensor": torch.ones(2)}  # type: ignore[assignment]
    before = copy.deepcopy(model.state_dict())
    buffer, python, arrays = model.mean, random.getstate(), numpy.random.get_state()[1].copy()
    drawn = torch.get_rng_state()
    model.first.weight.grad = torch.ones_like(model.first.weight)
    compiled(model)
    assert model.mean is buffer and random.getstate() == python
    assert (numpy.random.get_state()[1] == arrays).all()
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(model.first.weight.grad, torch.ones_like(model.first.weight))
    assert model.last.weight.grad is None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.slow
@pytest.mark.parametrize("check", ["auto", "on"])
def test_a_model_without_data_is_skipped_or_refused(check: str) -> None:
    with torch.device("meta"):
        model = Base()
    if check == "on":
        with pytest.raises(FxpartError, match="FXP109"):
            compiled(model, check="on")
        return
    program = compiled(model)
    assert program.plan.check is not None and program.plan.check.status == "skipped"
    assert "meta" in program.plan.check.reason


def test_check_off_is_recorded_and_explained() -> None:
    program = compiled(made(LateWarmUp), check="off")
    assert program.plan.check is not None and program.plan.check.status == "off"
    from fxpart.report.explanation_text import explain

    assert "check=off" in explain(program.plan)
    with pytest.raises(FxpartError, match="FXP109"):
        compiled(made(Base), check="maybe")


@pytest.mark.slow
def test_equal_requests_give_equal_plans() -> None:
    plans = {compiled(made(Base)).plan.dumps() for _ in range(2)}
    assert len(plans) == 1


@pytest.mark.slow
def test_verify_fails_where_the_module_differs() -> None:
    found = compiled(made(DictOfMeans), check="off").verify(3)
    assert not found.passed and found.eager_differences


@pytest.mark.slow
def test_partial_losses_are_looked_at() -> None:
    class Growing:
        def __init__(self) -> None:
            self.seen: list[float] = []

        def __call__(self, out: torch.Tensor, target: torch.Tensor, power: int) -> torch.Tensor:
            self.seen.append(1.0)
            return ((out - target).abs() ** power).mean() * len(self.seen)

    with pytest.raises(FxpartError, match="FXP113"):
        compiled(made(Base), partial(Growing(), power=2))
