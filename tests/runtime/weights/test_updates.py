"""Updates, lent weights, counters, what is measured, what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fxpart.errors import FxpartError
from fxpart.runtime.asynchronous.optimizer_facade import StageOptimizerFacade
from fxpart.runtime.optimizer.update_options import UpdateOptions
from fxpart.runtime.weights import MicrobatchWeightUse, StageWeights, WeightSource
from fxpart.runtime.weights.weight_update import has_finite_gradients
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import MODES, WeightMode

VERSIONS = WeightVersionCounters((3, 2, 1), 1)


def stage(
    mode: str | WeightMode, k: int = 0, *, lr: float = 0.1, momentum: float = 0.9, **options: Any
) -> tuple[nn.Linear, torch.optim.Optimizer, StageWeights]:
    """A linear layer as one of three stages."""
    torch.manual_seed(0)
    module = nn.Linear(2, 2, bias=False).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)
    found = MODES[mode] if isinstance(mode, str) else mode
    return module, optimizer, StageWeights(module, optimizer, found, VERSIONS, k, **options)


def steps(module: nn.Module, weights: StageWeights, count: int, k: int = 0) -> None:
    """Microbatches of ones through the stage, an update after each."""
    outs = {}
    for i in range(count):
        with weights.forward(i):
            outs[i] = module(torch.ones(1, 2, dtype=torch.float64))
        done = i + 1 - VERSIONS.ahead[k]
        if done >= 0:
            with weights.backward(done):
                outs.pop(done).sum().backward()
            weights.update()
            module.zero_grad()


def test_a_guarded_update_counts_and_changes_nothing() -> None:
    module, optimizer, weights = stage("stash", guard=True)
    halving = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    shown = StageOptimizerFacade([optimizer], [list(module.parameters())], None)
    shown.submitted()
    options = UpdateOptions(shown, halving)
    weights.follow(options)
    before = module.weight.detach().clone()
    for value, steps_taken in ((float("nan"), 0), (float("inf"), 0), (1e300, 1)):
        module.weight.grad = torch.full_like(module.weight, value)
        options.submit(weights.updates, weights.updates)
        assert weights.update() is bool(steps_taken)
        assert torch.equal(before, module.weight) is not bool(steps_taken)
    assert (weights.updates, weights.skipped) == (3, 2)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


def test_pipemare_steps_with_smaller_rates_that_are_put_back() -> None:
    """T1: staleness 2 on the first of three stages, 0 on the last; gone after total_updates.

    By default after 100 times the largest staleness.
    """
    for k, total, factors in (
        (0, None, [2 ** max(0.0, 1 - n / 200) for n in range(202)]),
        (0, 4, [2, 2 ** (3 / 4), 2 ** (2 / 4), 2 ** (1 / 4), 1, 1]),
        (2, 4, [1, 1]),
    ):
        module, optimizer, weights = stage("pipemare", k, momentum=0.0, total_updates=total)
        for factor in factors:
            before = module.weight.detach().clone()
            module.weight.grad = torch.ones_like(module.weight)
            weights.update()
            torch.testing.assert_close(
                before - module.weight, torch.full_like(before, 0.1 / factor)
            )
            assert optimizer.param_groups[0]["lr"] == 0.1


def test_lent_weights_hold_for_forward_and_backward_of_their_microbatch() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.full((2, 2), 3.0))
            self.shared = nn.Parameter(torch.full((2, 2), 5.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x @ self.own @ self.shared
            return out

    module = Tied()
    optimizer = torch.optim.SGD([module.own], lr=1.0)
    weights = StageWeights(module, optimizer, MODES["naive"], VERSIONS, 1)
    cells = []
    for i, value in enumerate((7.0, 11.0)):
        lent = torch.full((2, 2), value)
        weights.lend(i, {module.shared: lent})
        x = torch.ones(1, 2, requires_grad=True)
        with weights.forward(i):
            assert module.shared.data_ptr() == lent.data_ptr()
            cells.append((x, module(x)))
        assert float(cells[-1][1][0, 0].detach()) == 2 * 2 * 3 * value
        assert module.shared.data.unique().tolist() == [5.0]
    assert weights.bytes() == 2 * 16
    for i, (x, out) in enumerate(cells):
        own = float(module.own[0, 0].detach())
        with weights.backward(i):
            out.backward(torch.ones_like(out))
        assert x.grad is not None
        assert float(x.grad[0, 0]) == 2 * 2 * own * (7.0, 11.0)[i]
        weights.update()
    assert module.shared.grad is not None and module.shared.data.unique().tolist() == [5.0]
    assert weights.bytes() == 0


def test_the_measure_of_predictions() -> None:
    """A constant gradient: momentum's direction is short at first, and exact in the end."""
    module, _, weights = stage("spectrain-v2", lr=0.01, momentum=0.5)
    weights.watch(2)
    steps(module, weights, 60)
    found = weights.rhos()
    assert [i for i, _ in found] == list(range(2, 58, 2)), "every other update, with staleness"
    assert found[0][1] == 1.0, "nothing to predict by: stale weights"
    # Two updates later: foreseen 2 * 1.5 gradients, moved by 1.75 and 1.875.
    assert found[1][1] == pytest.approx((3.625 - 3) / 3.625) and found[-1][1] < 1e-6
    assert weights.rhos() == []
    weights.watch(0)
    plain, _, other = stage("spectrain-v2", lr=0.01, momentum=0.5)
    steps(plain, other, 60)
    assert torch.equal(plain.weight, module.weight), "watching changes nothing"
    assert other.rhos() == []


def test_watching_costs_memory_only_while_it_watches() -> None:
    module, _, weights = stage("pipeoptim")
    steps(module, weights, 6)
    before = weights.bytes()
    weights.watch(1)
    with weights.forward(6):
        module(torch.ones(1, 2, dtype=torch.float64))
    assert (before, weights.bytes()) == (0, 2 * module.weight.nbytes)


def test_counters() -> None:
    module, _, weights = stage("stash", 1)
    steps(module, weights, 5, 1)
    found = weights.counters()
    assert (found.forwards, found.backwards, found.updates) == (5, 4, 4)
    assert found.recent == (
        MicrobatchWeightUse(0, 0, 0, 0),
        MicrobatchWeightUse(1, 0, 0, 1),
        MicrobatchWeightUse(2, 1, 1, 2),
        MicrobatchWeightUse(3, 2, 2, 3),
    )
    assert [weights.source(i) for i in range(4)] == [
        WeightSource(0),
        WeightSource(0),
        WeightSource(1),
        WeightSource(2),
    ]


def test_leaving_the_schedule_is_told() -> None:
    """The stage, the microbatch, what was expected and what was found."""
    module, _, weights = stage("naive", 1)
    for i in (0, 1):
        with weights.forward(i):
            out = module(torch.ones(1, 2, dtype=torch.float64))
    wrong: list[tuple[Any, str]] = [
        (
            lambda: weights.forward(3),
            "stage 1, microbatch 3.*its forward: the schedule expects 2, but it is 3",
        ),
        (
            lambda: weights.forward(2),
            "microbatch 2.*before its forward: the schedule expects 1, but it is 0",
        ),
        (
            lambda: weights.backward(1),
            "microbatch 1.*its backward: the schedule expects 1, but it is 0",
        ),
        (lambda: weights.backward(2), "microbatch 2.*forwards before its backward"),
    ]
    for enter, message in wrong:
        with pytest.raises(FxpartError, match=f"(?s)FXP900.*{message}"), enter():
            raise AssertionError("it must not begin")
    with pytest.raises(
        FxpartError, match="(?s)FXP900.*microbatch 1 was read.*set for microbatch 0"
    ):
        x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
        del out
        module, _, weights = stage("naive", 1)
        outs = []
        for i in (0, 1):
            with weights.forward(i):
                outs.append(module(x))
        with weights.backward(0):
            outs[1].sum().backward()
    with pytest.raises(FxpartError, match="(?s)FXP900.*restart"):
        weights.restart(0)


def test_an_error_in_a_stage_leaves_its_own_weights() -> None:
    module, _, weights = stage("spectrain")
    steps(module, weights, 4)
    before, address = module.weight.detach().clone(), module.weight.data_ptr()
    with pytest.raises(RuntimeError), weights.forward(4):
        assert module.weight.data_ptr() != address
        module(torch.ones(1, 3, dtype=torch.float64))
    assert module.weight.data_ptr() == address and torch.equal(module.weight, before)


def test_choices_that_do_not_go_together() -> None:
    for base in ("first stage", "delayed"):
        with pytest.raises(FxpartError, match="predicts from an old version"):
            stage(WeightMode("own", base=base, look_forward="staleness"))
    with pytest.raises(FxpartError, match="two buffers"):
        stage("2bw")


def test_state_is_carried_over_a_restart() -> None:
    """PipeMare's delta: saved after a drain, loaded into another process's stage."""
    results = []
    for carries in (False, True):
        module, optimizer, weights = stage("pipemare", total_updates=9)
        steps(module, weights, 6)
        for done in (4, 5):  # drained
            with weights.backward(done):
                (module.weight.sum() * 2).backward()
            weights.update()
            module.zero_grad()
        weights.restart(weights.updates)
        if carries:
            other, its, fresh = stage("pipemare", total_updates=9)
            other.load_state_dict(module.state_dict())
            its.load_state_dict(optimizer.state_dict())
            fresh.load_state_dict(weights.state_dict())
            module, weights = other, fresh
        assert weights.updates == 6
        steps(module, weights, 6)
        results.append(module.weight.detach().clone())
    assert torch.equal(*results)


@pytest.mark.slow
def test_compiled_stages() -> None:
    """Where the backward reads the forward's weights they work, with the bits of eager."""
    for mode in ("stash", "spectrain-v2"):
        results = []
        for compiles in (False, True):
            module, _, weights = stage(mode)
            if compiles:
                module.compile(backend="aot_eager")
            steps(module, weights, 6)
            results.append(module.weight.detach().clone())
        assert torch.equal(*results)
    module, _, weights = stage("spectrain")
    module.compile(backend="aot_eager")
    with pytest.raises(FxpartError, match="(?s)FXP109.*torch.compile"), weights.forward(0):
        raise AssertionError("it must not begin")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_gradients_that_are_numbers(dtype: torch.dtype) -> None:
    """Large ones too, whose sum is none."""
    parameters = [torch.nn.Parameter(torch.zeros(3, 5, dtype=dtype)) for _ in range(3)]
    assert has_finite_gradients(parameters)
    largest = torch.finfo(dtype).max
    for parameter in parameters[1:]:
        parameter.grad = torch.full_like(parameter, largest)
    assert has_finite_gradients(parameters)
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert parameters[2].grad is not None
        parameters[2].grad[1, 4] = bad
        assert not has_finite_gradients(parameters)
    parameters[2].grad = torch.full_like(parameters[2], -largest)
    assert has_finite_gradients(parameters)
