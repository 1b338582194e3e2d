"""What rounding makes of one process: what verify lets pass for it, and what it must not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import fxpart
from fxpart.api import Program
from fxpart.cli.verify import describe
from fxpart.compat.optimizer_choice import choose
from fxpart.verification import comparison, rounding_error
from fxpart.verification.comparison import PartitionedRun
from fxpart.verification.float64 import Float64Mode, LowPrecisionInputError, to_float64
from fxpart.verification.rounding_error import FACTOR, Convert, RoundingBounds, measure_rounding
from fxpart.verification.single_process import SingleProcessTrainer
from fxpart.verification.verification_result import TOLERANCE, Verification, relative

ATEN = torch.ops.aten
WORDS, WIDTH, ROWS, LENGTH = 200, 64, 24, 32


class Head(nn.Module):
    """Embedding, dropout and a tied head: its bias's gradient is a sum of 768 that cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.out = nn.Linear(WIDTH, WORDS)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        z: torch.Tensor = self.out(self.dropout(self.embed(tokens)))
        loss = nn.functional.cross_entropy(z.flatten(0, 1), targets.flatten())
        return loss + 1e-3 * z.pow(2).mean()


class Swallowed(nn.Module):
    """Half of its gradient is lost in float32, wherever the weights are moved by their last bit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.31, 0.37, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return (((self.weight + 1e6) - 1e6) * x).pow(2).mean()


@cache
def halved(dtype: torch.dtype = torch.float32) -> Program:
    """Head on two ranks, each with half of the rows of both microbatches."""
    torch.manual_seed(0)
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH))
    return fxpart.compile(
        Head().to(dtype), "local:2", example_inputs=(tokens, tokens.roll(-1, 1)), microbatches=2,
        constraints={"mesh": "dp=2", "stages": 1},
    )  # fmt: skip


@cache
def swallowed() -> Program:
    """Swallowed on two ranks."""
    return fxpart.compile(
        Swallowed(), "local:2", example_inputs=(torch.linspace(1.0, 2.0, 64).reshape(8, 8),),
        microbatches=1, constraints={"mesh": "dp=2", "stages": 1},
    )  # fmt: skip


def batch(program: Program) -> tuple[torch.Tensor, ...]:
    """The example."""
    assert program.captured.example is not None
    given: tuple[torch.Tensor, ...] = program.captured.example()
    return given


def one(
    program: Program, convert: Convert | None = None, seed: int | None = None
) -> SingleProcessTrainer:
    """One process of the program."""
    return SingleProcessTrainer(
        program.captured, program.graph, choose("adamw").make,
        microbatches=program.plan.microbatches, convert=convert, multiple=2,
        seed=program.plan.seed if seed is None else seed,
    )  # fmt: skip


def known(program: Program) -> list[RoundingBounds]:
    """A copy of what is known after each measure."""
    found = measure_rounding(
        lambda convert: one(program, convert), lambda: list(batch(program)), 2, relative
    )
    return [RoundingBounds(k.loss, dict(k.gradient), dict(k.state)) for k in found]


def trained(program: Program, given: Any = None, steps: int = 2) -> PartitionedRun:
    """What the partitioned run gives. given: another batch than that of the comparison."""
    trainer = program.trainer(need_loss=False)
    seen = PartitionedRun([], [], {})
    for _ in range(steps):
        seen.losses.append(trainer.backward(batch(program) if given is None else given))
        seen.gradients.append(trainer.gradients())
        trainer.update()
    seen.state.update(trainer.state_dict())
    trainer.close()
    return seen


def judged(program: Program, seen: PartitionedRun) -> Verification:
    """That against one process."""
    return comparison.compare(program, choose("adamw").make, batch(program), seen)


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever one process begins a step in double precision."""
    counted: list[int] = []

    class Counted(Float64Mode):
        def __init__(self) -> None:
            super().__init__()
            counted.append(1)

    monkeypatch.setattr(rounding_error, "Float64Mode", Counted)
    return counted


@pytest.mark.slow
def test_a_sum_that_cancels_passes() -> None:
    """Replicas add up the bias's gradient in two halves: no fault, and told as noise."""
    found = halved().verify(steps=3)
    assert found.passed and not found.exact
    assert {d.name for d in found.differences if d.noise} <= {"out.bias"}
    assert found.largest <= TOLERANCE


@pytest.mark.slow
def test_it_is_told_what_passes_above_the_promise() -> None:
    """Beside the verdict, by count; nothing where all is within it."""
    found = halved().verify(steps=1)
    rows = [replace(d, gradient=1e-7, parameter=1e-7, noise=False) for d in found.differences]
    above = [replace(rows[0], gradient=5e-6, noise=True), *rows[1:]]
    text = "\n".join(describe(replace(found, differences=tuple(above))))
    assert "1 parameter differs by more, but not by more than rounding errors" in text
    text = "\n".join(describe(replace(found, differences=tuple(rows))))
    assert "equal within 1e-06" in text and "by more" not in text


@pytest.mark.slow
def test_double_precision_alone_covers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nudges it passes, and without both it does not."""
    seen = trained(halved())
    monkeypatch.setattr(rounding_error, "RUNS", 0)
    assert judged(halved(), seen).passed
    monkeypatch.setattr(rounding_error, "LIMIT", -1.0)
    assert not judged(halved(), seen).passed


def scaled(name: str, factor: float) -> Callable[[PartitionedRun], PartitionedRun]:
    """Every step's gradient of one parameter times a factor."""
    return lambda seen: PartitionedRun(
        seen.losses,
        [{n: g * factor if n == name else g for n, g in step.items()} for step in seen.gradients],
        seen.state,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [
        scaled("out.bias", 1 + 1e-4),
        scaled("embed.weight", 1 + 1e-5),
        lambda seen: PartitionedRun(
            [loss * (1 + 1e-5) for loss in seen.losses], seen.gradients, seen.state
        ),
        lambda seen: PartitionedRun(
            seen.losses, seen.gradients, {n: t * (1 + 1e-5) for n, t in seen.state.items()}
        ),
    ],
    ids=["a bias's gradient", "a weight's gradient", "losses", "parameters"],
)
def test_small_faults_are_found(
    broken: Callable[[PartitionedRun], PartitionedRun], doubled: list[int]
) -> None:
    """Though double precision was asked."""
    assert not judged(halved(), broken(trained(halved()))).passed
    assert doubled


@pytest.mark.slow
def test_a_lost_microbatch_is_found(doubled: list[int]) -> None:
    """The second microbatch is the first once more."""
    half = ROWS // 2
    repeated = tuple(torch.cat([t[:half], t[:half]]) for t in batch(halved()))
    assert not judged(halved(), trained(halved(), repeated)).passed
    assert doubled


@pytest.mark.slow
def test_another_mask_is_found(doubled: list[int]) -> None:
    """One process itself, but with the masks of another seed."""
    other = one(halved(), seed=halved().plan.seed + 1)
    seen = PartitionedRun([], [], other.state)
    for _ in range(2):
        seen.losses.append(other.backward(list(batch(halved()))))
        seen.gradients.append(other.gradients())
        other.update()
    assert not judged(halved(), seen).passed
    assert doubled


@pytest.mark.slow
def test_a_large_distance_does_not_count(doubled: list[int]) -> None:
    """Float32 loses percents of this gradient; a fault of a percent is found all the same."""
    before, after = known(swallowed())
    assert doubled and before.gradient == after.gradient
    process, exact = one(swallowed()), one(swallowed(), to_float64)
    for run in (process, exact):
        run.backward([t.to(run.state["weight"].dtype) for t in batch(swallowed())])
    assert relative(exact.gradients()["weight"], process.gradients()["weight"]) > 1e-2
    assert judged(swallowed(), trained(swallowed())).passed
    assert not judged(swallowed(), scaled("weight", 1.01)(trained(swallowed()))).passed


@pytest.mark.slow
def test_what_is_within_the_promise_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measure is taken where 1e-6 holds, and double precision only where nudging is too little.

    In float64 nothing is near 1e-6.
    """
    monkeypatch.setattr(comparison, "measure_rounding", None)
    assert halved(torch.float64).verify(steps=2).passed


def test_double_precision_comes_last(doubled: list[int]) -> None:
    """It is asked only after nudging; its measure is FACTOR times the distance, by name."""
    program = halved()
    found = measure_rounding(
        lambda convert: one(program, convert), lambda: list(batch(program)), 1, relative
    )
    first = dict(next(found).gradient)
    assert not doubled
    second = next(found).gradient
    assert len(doubled) == 1
    process, exact = one(program), one(program, to_float64)
    process.backward(list(batch(program)))
    with Float64Mode():
        exact.backward(list(batch(program)))
    for name, gradient in process.gradients().items():
        distance = relative(exact.gradients()[name], gradient)
        assert 0 < distance < 1e-4, "the masks are those of float32"
        assert second[name] == max(first[name], FACTOR * distance)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_models_are_nudged_only(dtype: torch.dtype) -> None:
    """In float64 there is nothing wider; fewer bits than float32 are another thing."""
    assert len(known(halved(dtype))) == 1


RANDOM: dict[str, Callable[[torch.Tensor], Any]] = {
    "dropout": lambda x: nn.functional.dropout(x, 0.3),
    "native_dropout": lambda x: ATEN.native_dropout(x, 0.3, True)[0],
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_().log(),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape, dtype=torch.float32),
    "rand": lambda x: torch.rand(x.shape),
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 2),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_those_of_float32(name: str) -> None:
    """Equal draws: the same zeros, and the same values but for rounding; the tensor's own dtype."""
    x = torch.linspace(-1.0, 1.0, 64).reshape(1, 8, 8)
    x = x if name != "multinomial" else x[0]
    torch.manual_seed(3)
    plain = RANDOM[name](x)
    torch.manual_seed(3)
    with Float64Mode():
        found = RANDOM[name](x.double())
    assert found.dtype == (torch.float64 if plain.is_floating_point() else plain.dtype)
    assert torch.equal(found == 0, plain == 0)
    torch.testing.assert_close(found, plain.to(found.dtype), rtol=1e-6, atol=1e-6)


def test_a_kept_value_is_not_rounded() -> None:
    """Dropout leaves float64 as it is, its gradient too."""
    x = torch.full((64,), 1 / 3, dtype=torch.float64, requires_grad=True)
    for drop in (RANDOM["dropout"], RANDOM["native_dropout"]):
        with Float64Mode():
            y = drop(x)
            (gradient,) = torch.autograd.grad(y.sum(), x)
        kept = y.detach() != 0
        assert 0 < kept.sum() < 64
        torch.testing.assert_close(y[kept], x[kept] / 0.7, rtol=1e-15, atol=0.0)
        assert gradient.dtype == torch.float64 and torch.equal(gradient != 0, kept)


def test_named_dtypes_are_widened() -> None:
    """Casts, factories and reductions that name float32, and those that mean it."""
    x = torch.linspace(0.0, 1.0, 8, dtype=torch.float64, requires_grad=True)
    with Float64Mode():
        found = [
            x.to(torch.float32), x.softmax(0, dtype=torch.float32), torch.ones(3),
            torch.arange(4, dtype=torch.float32), x.sum(dtype=torch.float32), torch.tensor([3]) / 2,
            torch.ones(3, dtype=torch.int64).float(), torch.full((2,), 0.5),
        ]  # fmt: skip
        ones = torch.ones(3, dtype=torch.complex64)
        (gradient,) = torch.autograd.grad(found[0].pow(2).sum(), x)
    assert [t.dtype for t in (*found, gradient)] == [torch.float64] * 9
    assert ones.dtype == torch.complex128
    assert torch.equal(found[0].detach(), x.detach())


def test_what_knows_no_double_runs_in_float32() -> None:
    """An op that takes float32 only gets it, also one that writes its operand."""
    with torch.library._scoped_library("rounding_test", "DEF") as library:
        library.define("half(Tensor x) -> Tensor")
        library.define("halve_(Tensor(a!) x) -> ()")
        library.impl("half", lambda x: _single(x) / 2, "CPU")
        library.impl("halve_", lambda x: _single(x).div_(2) and None, "CPU")
        x = torch.full((1,), 0.5, dtype=torch.float64)
        with Float64Mode():
            found = torch.ops.rounding_test.half(x)
            torch.ops.rounding_test.halve_(x)
    assert found.dtype == x.dtype == torch.float64
    assert found.item() == x.item() == 0.25


def _single(x: torch.Tensor) -> torch.Tensor:
    """x, if float32."""
    if x.dtype != torch.float32:
        raise NotImplementedError(f"not for {x.dtype}")
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fewer_bits_are_refused(dtype: torch.dtype) -> None:
    """Met as an argument or as a value."""
    narrow = torch.ones(2, dtype=dtype)
    with Float64Mode():
        with pytest.raises(LowPrecisionInputError, match="in the graph"):
            torch.ones(2).to(dtype)
        with pytest.raises(LowPrecisionInputError, match="in the graph"):
            _ = narrow + 1
