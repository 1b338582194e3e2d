"""Operations on lists of tensors, and stand-ins for optimizers and schedulers, of fxpart.compat."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fxpart import compat

ONES = [torch.tensor([1.0, 2.0]), torch.tensor([[4.0]])]
TWOS = [torch.tensor([8.0, 16.0]), torch.tensor([[32.0]])]
EACH = [2.0, 3.0]
NEW: dict[str, tuple[Callable[..., list[torch.Tensor]], tuple[object, ...], list[list[float]]]] = {
    "add": (compat.foreach_add, (ONES, TWOS, 0.5), [[5, 10], [20]]),
    "mul": (compat.foreach_mul, (ONES, EACH), [[2, 4], [12]]),
    "sqrt": (compat.foreach_sqrt, ([t * t for t in ONES],), [[1, 2], [4]]),
    "lerp": (compat.foreach_lerp, (ONES, TWOS, 2.0), [[15, 30], [60]]),
}
INPLACE: dict[str, tuple[Callable[..., None], tuple[object, ...], list[list[float]]]] = {
    "add_": (compat.foreach_add_, (TWOS, 0.5), [[5, 10], [20]]),
    "shift_": (compat.foreach_shift_, (EACH,), [[3, 4], [7]]),
    "mul_": (compat.foreach_mul_, (EACH,), [[2, 4], [12]]),
    "div_": (compat.foreach_div_, (TWOS,), [[1 / 8, 1 / 8], [1 / 8]]),
    "divide_": (compat.foreach_divide_, ([2.0, 4.0],), [[0.5, 1], [1]]),
    "addcdiv_": (compat.foreach_addcdiv_, (TWOS, ONES, [1.0, 2.0]), [[9, 10], [20]]),
    "copy_": (compat.foreach_copy_, (TWOS,), [[8, 16], [32]]),
    "zero_": (compat.foreach_zero_, (), [[0, 0], [0]]),
}


@pytest.mark.parametrize("name", NEW)
def test_new_tensors(name: str) -> None:
    call, given, expected = NEW[name]
    assert [t.flatten().tolist() for t in call(*given)] == expected
    assert [t.flatten().tolist() for t in ONES] == [[1, 2], [4]]
    assert call(*([] if isinstance(x, list) else x for x in given)) == []


@pytest.mark.parametrize("name", INPLACE)
def test_in_place(name: str) -> None:
    call, given, expected = INPLACE[name]
    to = [t.clone() for t in ONES]
    call(to, *given)
    assert [t.flatten().tolist() for t in to] == expected
    call([], *([] if isinstance(x, list) else x for x in given))


def test_a_scheduler_standing_in() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=torch.tensor(1.0))
    real = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    copied, stand_in = compat.make_proxy_scheduler(real)
    assert copied.optimizer is stand_in and not stand_in.param_groups[0]["params"]
    copied.step()  # without a warning: warnings of a skipped step would be wrong
    assert float(stand_in.param_groups[0]["lr"]) == 0.5
    assert float(optimizer.param_groups[0]["lr"]) == 1 and real.last_epoch == 0


def test_an_optimizer_standing_in() -> None:
    real, mine = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.LBFGS([real], lr=0.5)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.register_step_pre_hook(lambda *_: None)
    made = compat.make_proxy_optimizer(optimizer, {real: mine})
    assert type(made) is torch.optim.LBFGS and made.param_groups[0]["params"] == [mine]
    assert made._params is made.param_groups[0]["params"]  # type: ignore[attr-defined]
    assert "step" not in vars(made) and not made._optimizer_step_pre_hooks
    assert made.param_groups[0]["lr"] == 0.5 and not made.state


def test_the_step_alone() -> None:
    kind = torch.optim.SGD
    optimizer = kind([nn.Parameter(torch.ones(1))])  # the class's step is wrapped by the first
    step = compat.step_of(kind)
    assert step is not kind.step and not hasattr(step, "hooked")
    heard: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: heard.append(1))
    step(optimizer)
    assert not heard
    optimizer.step()
    assert heard


def test_an_optimizer_over_other_parameters() -> None:
    """Groups, names and attributes are those of the real one; state and hooks stay behind."""
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    real = torch.optim.Adam(
        [{"params": [("a", first)]}, {"params": [("b", second)], "lr": torch.tensor(0.5)}]
    )
    real.cached = [first, second]  # type: ignore[attr-defined]
    new, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    made = compat.optimizer_over(real, [[(first, new), (first, other)], []], torch.zeros(0))
    assert [len(group["params"]) for group in made.param_groups] == [2, 0]
    assert made.param_groups[0]["params"][1] is other
    assert made.param_groups[0]["param_names"] == ["a", "a"]
    assert made.param_groups[1]["lr"] is not real.param_groups[1]["lr"]
    assert made.cached[0] is new and made.cached[1].numel() == 0  # type: ignore[attr-defined]
    assert not made.state and not compat.has_step_hooks(made)
    real.register_step_pre_hook(lambda *_: None)
    assert compat.has_step_hooks(real)


def test_a_replaced_step_is_known_to_schedulers() -> None:
    real = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    before = torch.optim.lr_scheduler.StepLR(real, 1)
    assert compat.steps_as_its_class(real)
    calls: list[object] = []
    compat.replace_step(real, lambda self: calls.append(self))
    after = torch.optim.lr_scheduler.StepLR(real, 1)
    assert not compat.steps_as_its_class(real)
    real.step()
    compat.mark_stepped(real)
    assert calls == [real]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before.step()
        after.step()
