"""What must hold of every rule with every optimizer, and where rules are exact or agree."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from optimizers_stepped import (
    OPTIMIZERS,
    bits,
    give_gradients,
    parameters,
    same_bits,
    step,
    zero_gradients,
)
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxpart.errors import FxpartError
from fxpart.runtime.weight_prediction import RULES, Predictor, make_predictor

Made = tuple[list[nn.Parameter], torch.optim.Optimizer, Predictor]


def stepped(
    name: str,
    rule: str,
    updates: int = 3,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    size: float = 1.0,
) -> Made:
    """Parameters, their optimizer after some updates, a predictor that saw them."""
    weights = parameters(dtype, seed, size)
    optimizer = OPTIMIZERS[name](weights)
    look = make_predictor(rule, optimizer)
    for update in range(updates):
        give_gradients(weights, 100 * seed + update, sparse=name == "sparse", size=size)
        update_once(optimizer, look)
    return weights, optimizer, look


def update_once(optimizer: torch.optim.Optimizer, look: Predictor) -> None:
    """A step, the predictor told."""
    look.before_update()
    step(optimizer)
    look.after_update()


def farthest(made: list[torch.Tensor], others: Any) -> float:
    """The largest difference of any number."""
    return max(float((a - b).detach().abs().max()) for a, b in zip(made, others, strict=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_is_touched(name: str, rule: str) -> None:
    """And no look ahead is the parameters' own data; what is predicted is new, and repeats."""
    weights, optimizer, look = stepped(name, rule)
    give_gradients(weights, 7)
    gradients = [p.grad.clone() for p in weights if p.grad is not None]
    before, random = bits(optimizer), torch.get_rng_state()
    first = look.predict(3)
    again = look.predict(3)
    now = look.predict(0)
    assert same_bits(before, bits(optimizer)) and torch.equal(random, torch.get_rng_state())
    for place, p in enumerate(weights):
        assert torch.equal(p.grad, gradients[place])
        assert now[place].data_ptr() == p.data_ptr() and torch.equal(now[place], p)
        assert first[place].data_ptr() not in (p.data_ptr(), again[place].data_ptr())
        assert torch.equal(first[place], again[place])
        assert not first[place].requires_grad and first[place].stride() == p.stride()
    other = stepped(name, rule)
    for made in (weights, other[0]):
        give_gradients(made, 9, sparse=name == "sparse")
    update_once(optimizer, look)
    update_once(other[1], other[2])
    assert same_bits(bits(optimizer), bits(other[1]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shadow_is_really_stepping_a_clone(name: str) -> None:
    _, _, look = stepped(name, "shadow")
    weights, optimizer, _ = stepped(name, "shadow")
    for updates in (1, 2, 3):
        zero_gradients(weights, sparse=name == "sparse")
        step(optimizer)
        for _ in range(2):
            for made, real in zip(look.predict(updates), weights, strict=True):
                assert torch.equal(made, real)


def test_every_optimizer_of_torch_is_tried() -> None:
    kinds = {
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    tried = {make.func for make in OPTIMIZERS.values() if isinstance(make, partial)}
    assert kinds - tried == {torch.optim.Optimizer}


CLOSED = [
    name
    for name, make in OPTIMIZERS.items()
    if isinstance(make, partial)
    and make.func in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
]


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("seed", range(3))
def test_decaying_is_shadow(name: str, seed: int) -> None:
    """To 6e-8 in single precision, twice the last place of weights under 1/2; 1e-15 in double."""
    for dtype, most in ((torch.float32, 6e-8), (torch.float64, 1e-15)):
        options = {"dtype": dtype, "seed": seed, "size": 0.2}
        closed = stepped(name, "decaying", **options)[2]
        weights, _, shadow = stepped(name, "shadow", **options)
        for updates in (1, 2, 3):
            assert farthest(closed.predict(updates), shadow.predict(updates)) <= most
        assert max(float(p.detach().abs().max()) for p in weights) < 0.5


@pytest.mark.parametrize("name", CLOSED)
def test_decaying_is_exact_without_gradients(name: str) -> None:
    weights, optimizer, look = stepped(name, "decaying", dtype=torch.float64)
    expected = [look.predict(updates) for updates in (1, 2, 5)]
    zero_gradients(weights)
    found = []
    for update in range(1, 6):
        step(optimizer)
        if update in (1, 2, 5):
            found.append([p.data.clone() for p in weights])
    for made, real in zip(expected, found, strict=True):
        assert farthest(made, real) <= 1e-15
    assert farthest(expected[0], expected[1]) > 1e-4 or name == "sgd"


@settings(max_examples=40)
@given(
    lr=st.floats(1e-4, 0.5),
    updates=st.integers(1, 8),
    maximize=st.booleans(),
    rule=st.sampled_from(["linear", "difference"]),
)
def test_linear_is_exact_for_constant_gradients(
    lr: float, updates: int, maximize: bool, rule: str
) -> None:
    """SGD without momentum."""
    weights = parameters(torch.float64)
    optimizer = torch.optim.SGD(weights, lr=lr, maximize=maximize)
    look = make_predictor(rule, optimizer)
    give_gradients(weights, 1)
    update_once(optimizer, look)
    expected = look.predict(updates)
    for _ in range(updates):
        optimizer.step()
    assert farthest(expected, weights) <= 1e-13


@pytest.mark.parametrize("name", [*CLOSED, *(n for n in OPTIMIZERS if "nadam" in n)])
def test_linear_goes_where_the_optimizer_went(name: str) -> None:
    """One update ahead is the step that was made, once more: momentum, Nesterov, decay and all."""
    weights, optimizer, look = stepped(name, "linear", updates=2, dtype=torch.float64)
    before = [p.data.clone() for p in weights]
    give_gradients(weights, 3)
    update_once(optimizer, look)
    decoupled = [g["lr"] * g["weight_decay"] for g in optimizer.param_groups]
    if not optimizer.param_groups[0].get("decoupled_weight_decay"):
        decoupled = [0.0]
    for made, real, old in zip(look.predict(1), weights, before, strict=True):
        moved = real - old * (1 - decoupled[0])  # what is not decay
        assert torch.allclose(made, real * (1 - decoupled[0]) + moved, atol=1e-13, rtol=0)
    for near, far, real in zip(look.predict(1), look.predict(4), weights, strict=True):
        assert torch.allclose(far - real, 4 * (near - real), atol=1e-13, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_groups_and_missing_gradients(rule: str) -> None:
    """Each group by its own rate; what an update skips stays; so does what none has moved yet."""
    weights = parameters()
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = torch.optim.SGD(
        [
            {"params": [weights[0], frozen]},
            {"params": [weights[1]], "lr": 0.2, "momentum": 0.5},
            {"params": [weights[2]], "weight_decay": 0.1},
        ],
        lr=0.1, momentum=0.9,
    )  # fmt: skip
    look = make_predictor(rule, optimizer)
    order = [weights[0], frozen, weights[1], weights[2]]
    assert all(a is b for a, b in zip(look.parameters, order, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(look.predict(2), order, strict=True))
    for update in range(3):
        give_gradients(weights, update)
        weights[2].grad = weights[2].grad if update < 2 else None
        update_once(optimizer, look)
    made = look.predict(2)
    assert torch.equal(made[1], frozen) and torch.equal(made[3], weights[2])
    assert made[1].data_ptr() != frozen.data_ptr()
    for place, group in ((0, 0), (2, 1)):
        alone = torch.optim.SGD([order[place]], **_options(optimizer.param_groups[group]))
        alone.state[order[place]] = optimizer.state[order[place]]
        single = make_predictor(rule, alone)
        if rule == "difference":
            buffer = optimizer.state[order[place]]["momentum_buffer"]
            lr = optimizer.param_groups[group]["lr"]
            expected = order[place] - 2 * lr * buffer
        else:
            expected = single.predict(2)[0]
        assert torch.allclose(made[place], expected, atol=1e-6, rtol=0)
        assert not torch.allclose(made[place], order[place], atol=1e-3)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_a_rate_in_a_tensor(rule: str, make: Any) -> None:
    made = []
    for lr in (0.01, torch.tensor(0.01, dtype=torch.float64)):
        weights = parameters(torch.float64)
        optimizer = make(weights, lr=lr)
        look = make_predictor(rule, optimizer)
        for update in range(3):
            give_gradients(weights, update)
            update_once(optimizer, look)
        made.append(look.predict(3))
    assert farthest(*made) == 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients(rule: str, momentum: float) -> None:
    """An embedding's: the same as dense ones."""
    made = []
    for sparse in (True, False):
        weights = parameters()
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=momentum)
        look = make_predictor(rule, optimizer)
        for update in range(3):
            give_gradients(weights, update, sparse=True)
            if not sparse:
                for p in weights:
                    p.grad = p.grad.to_dense()
            update_once(optimizer, look)
        made.append(look.predict(2))
        assert look.state_bytes() >= 0
    assert farthest(*made) <= 1e-7


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["sgd", "nesterov", "nadam", "adamw", "momentum"])
def test_a_loaded_state_predicts_the_same(rule: str, name: str) -> None:
    weights, optimizer, look = stepped(name, rule)
    new = copy.deepcopy(weights)
    again = OPTIMIZERS[name](new)
    again.load_state_dict(optimizer.state_dict())
    other = make_predictor(rule, again)
    other.load_state_dict(look.state_dict())
    assert all(map(torch.equal, look.predict(3), other.predict(3)))
    if name in ("adamw", "momentum") and rule != "difference":  # all is in the optimizer's state
        assert all(map(torch.equal, look.predict(3), make_predictor(rule, again).predict(3)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["momentum", "nesterov", "adamw", "nadam", "rmsprop"])
def test_half_precision(rule: str, name: str) -> None:
    _, _, look = stepped(name, rule, dtype=torch.bfloat16)
    exact = stepped(name, rule)[2].predict(2)
    for made, p, close in zip(look.predict(2), look.parameters, exact, strict=True):
        assert made.dtype == torch.bfloat16 and not torch.equal(made, p)
        assert torch.allclose(made.float(), close, atol=0.05)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [*OPTIMIZERS][:-1])
def test_an_update_that_is_left_out(rule: str, name: str) -> None:
    """As a guard does where a gradient is no number: the hooks run, the step does not."""
    weights, optimizer, look = stepped(name, rule)
    for p in weights:
        p.grad = torch.full_like(p, math.nan)
    look.before_update()
    look.after_update()
    assert all(made.isfinite().all() for made in look.predict(2))
    give_gradients(weights, 5)
    update_once(optimizer, look)
    other = stepped(name, rule)
    give_gradients(other[0], 5)
    update_once(other[1], other[2])
    assert all(map(torch.equal, look.predict(2), other[2].predict(2)))


def test_complex_parameters() -> None:
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.NAdam):
        for rule in RULES:
            weights = [nn.Parameter(torch.randn(3, dtype=torch.complex64))]
            options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
            optimizer = kind(weights, lr=0.1, **options)
            look = make_predictor(rule, optimizer)
            weights[0].grad = torch.randn(3, dtype=torch.complex64)
            update_once(optimizer, look)
            (made,) = look.predict(2)
            assert made.dtype == torch.complex64 and made.isfinite().all()
            assert not torch.equal(made, weights[0])


def test_large_and_strided_parameters() -> None:
    """Cut into blocks, or not: the same bits."""
    from fxpart.runtime.weight_prediction import optimizer_steps

    torch.manual_seed(0)
    for rule in ("linear", "decaying"):
        large = torch.randn(3, optimizer_steps.CPU_BLOCK + 5)
        weights = [nn.Parameter(large), nn.Parameter(large.t()), nn.Parameter(torch.randn(7))]
        optimizer = torch.optim.AdamW(weights, lr=0.01)
        look = make_predictor(rule, optimizer)
        gradient = torch.randn_like(large)
        for p, g in zip(weights, (gradient, gradient.t(), torch.randn(7)), strict=True):
            p.grad = g
        update_once(optimizer, look)
        made = look.predict(3)
        assert torch.equal(made[0], made[1].t()) and made[1].stride() == weights[1].stride()
        small = torch.optim.AdamW(weights[2:], lr=0.01)
        small.state[weights[2]] = optimizer.state[weights[2]]
        assert torch.equal(make_predictor(rule, small).predict(3)[0], made[2])


def test_hooks_of_the_real_optimizer_are_not_called() -> None:
    weights, optimizer, look = stepped("adagrad", "shadow")
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append("all"))
    try:
        look.predict(2)
    finally:
        handle.remove()
    assert not calls
    optimizer.step()
    assert calls == ["before", "after"] and weights[0].grad is not None


def test_unknown_rule_and_what_cannot_be_copied() -> None:
    weights = parameters()
    with pytest.raises(FxpartError, match="prediction rule is unknown"):
        make_predictor("sideways", torch.optim.SGD(weights))
    optimizer = torch.optim.Adagrad(weights)
    optimizer.stream = (n for n in range(3))  # type: ignore[attr-defined]
    with pytest.raises(FxpartError, match="weight prediction needs a copy"):
        make_predictor("shadow", optimizer)
