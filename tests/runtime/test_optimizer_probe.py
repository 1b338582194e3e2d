"""Which optimizers may be divided: those that need whole rows, and those that change their rule."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart.errors import FxpartError

Rule = Callable[[dict[str, Any], torch.Tensor, torch.Tensor], torch.Tensor]

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"mesh": "dp=2", "stages": 1, "zero": 1},
    "zero2": {"mesh": "dp=2", "stages": 1, "zero": 2},
    "zero3": {"mesh": "dp=2", "stages": 1, "zero": 3},
    "tensor": {"mesh": "tp=2", "stages": 1},
    "stages": {"mesh": "none", "stages": 2},
    "replicas": {"mesh": "dp=2", "stages": 1, "zero": 0},
}
ONE = {"mesh": "none", "stages": 1}


class Ruled(torch.optim.Optimizer):
    """Each parameter by a rule of its state, itself and its gradient."""

    def __init__(self, parameters: Any, rule: Rule, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.rule(self.state[p], p, p.grad), alpha=group["lr"])


def others(p: torch.Tensor, kept: int) -> tuple[int, ...]:
    """All dims but one."""
    return tuple(dim for dim in range(p.dim()) if dim != kept)


def central_rows(state: Any, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Gradient centralization over dim 1."""
    return grad - grad.mean(1, keepdim=True) if p.dim() > 1 else grad


def central(state: Any, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Over all dims but the first, as for convolutions."""
    return grad - grad.mean(others(p, 0), keepdim=True) if p.dim() > 1 else grad


def clipped_rows(state: Any, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Each row to a norm of at most 0.05."""
    norm = grad.norm(dim=-1, keepdim=True) if p.dim() > 1 else grad.norm()
    return grad * (0.05 / norm.clamp(min=1e-6)).clamp(max=1)


def column_rates(state: Any, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """A second moment for each column."""
    if p.dim() < 2:
        return grad
    square = grad.square().mean(others(p, 1), keepdim=True)
    state["square"] = state.get("square", torch.zeros_like(square)) * 0.9 + square * 0.1
    return grad / (state["square"].sqrt() + 1e-3)


def row_trust(state: Any, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """LARS for each row."""
    dims = others(p, 0) or (0,)
    own, size = (t.square().sum(dims, keepdim=True).sqrt() for t in (p, grad))
    return grad * (own + 0.01) / (size + 1)


def by_norm(state: Any, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """A rate by the norm of the parameter."""
    return grad / (1 + p.norm())


def by_shape(state: Any, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """A rate by the largest dim."""
    return grad / max(p.shape)


RULES = (central_rows, central, clipped_rows, column_rates, row_trust, by_norm, by_shape)


class Late(torch.optim.SGD):
    """The rate is by the norm of all gradients in some of the steps, which it counts."""

    def __init__(self, parameters: Any, when: Callable[[int], bool], where: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.when, self.where = when, where
        self.number = 0
        for group in self.param_groups:
            group["number"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        mine = [p for group in self.param_groups for p in group["params"]]
        if not mine:
            return
        self.number += 1
        self.param_groups[0]["number"] += 1
        count = self.state[mine[0]].setdefault("number", torch.zeros(()))
        count.add_(1.0)
        at = {
            "attribute": self.number,
            "group": self.param_groups[0]["number"],
            "state": int(count),
        }[self.where]
        norm = torch.stack([p.grad.norm() for p in mine]).norm()
        for p in mine:
            p.sub_(p.grad / (1 + norm) if self.when(at) else p.grad, alpha=0.1)


class Skips(torch.optim.SGD):
    """Leaves a step out whose gradients are large together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        mine = [p for group in self.param_groups for p in group["params"]]
        if sum(p.grad.abs().sum() for p in mine) < self.param_groups[0]["weight_decay"]:
            for p in mine:
                p.sub_(p.grad, alpha=0.1)


class Idle(torch.optim.SGD):
    """Moves nothing in the steps that are tried."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""


def perceptron() -> nn.Module:
    """Some dims are odd, so that ZeRO 3 cuts along different dims."""
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(),
        nn.Linear(5, 5),
    )  # fmt: skip


def convolutions() -> nn.Module:
    """Of 4 dims, of which the first or the second one is odd."""
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.Tanh(), nn.Conv2d(5, 6, 3), nn.Tanh(), nn.Conv2d(6, 3, 2)
    )


MODELS = {
    "perceptron": (perceptron, (4,), (5,)),
    "convolutions": (convolutions, (2, 4, 4), (3, 1, 1)),
}


@cache
def compiled(model: str, layout: str) -> tuple[nn.Module, fxpart.Program]:
    """A module before training and its program, which no trainer changes."""
    kind, size, target = MODELS[model]
    torch.manual_seed(0)
    module = kind()
    constraints = {**LAYOUTS, "one": ONE}[layout]
    if layout == "tensor" and model == "perceptron":
        fxpart.annotate(module, {"2.weight": "tp:S(1)", "0.weight": "tp:S(0)", "0.bias": "tp:S(0)"})
    program = fxpart.compile(
        module, "local:1" if layout == "one" else "local:2",
        example_inputs=(torch.randn(8, *size), torch.randn(8, *target)), loss=nn.MSELoss(),
        microbatches=1, constraints=constraints,
    )  # fmt: skip
    return module, program


def right_or_refused(make: Any, layout: str, model: str = "perceptron", steps: int = 5) -> str:
    """The code with which a trainer is refused, "" where it gives plain PyTorch's numbers."""
    _, size, target = MODELS[model]
    module, program = compiled(model, layout)
    plain, draw = copy.deepcopy(module), torch.Generator().manual_seed(3)
    batches = [
        (torch.randn(8, *size, generator=draw), torch.randn(8, *target, generator=draw))
        for _ in range(steps)
    ]
    try:
        trainer = program.trainer(make)
    except FxpartError as refused:
        assert refused.code in ("FXP109", "FXP115")
        return refused.code
    reference = make(list(plain.parameters()))
    for x, y in batches:
        reference.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        reference.step()
        trainer.step((x, y))
    found = trainer.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-5)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_what_needs_whole_rows(rule: Rule, layout: str) -> None:
    found = right_or_refused(partial(Ruled, rule=rule), layout)
    expected = "FXP109" if layout in ("zero1", "zero2", "zero3", "tensor") else ""
    assert found == expected or (layout == "tensor" and not found)  # which is then right


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero1", "zero3", "stages"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_convolutions(rule: Rule, layout: str) -> None:
    expected = "" if layout == "stages" else "FXP109"
    assert right_or_refused(partial(Ruled, rule=rule), layout, "convolutions") == expected


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_one_rank_is_right(rule: Rule) -> None:
    assert right_or_refused(partial(Ruled, rule=rule), "one") == ""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["attribute", "group", "state"])
@pytest.mark.parametrize(
    "when",
    [lambda n: n >= 4, lambda n: n >= 11, lambda n: n >= 900, lambda n: n % 100 == 0],
    ids=["from 4", "from 11", "from 900", "every 100"],
)
def test_a_rule_that_begins_late(when: Callable[[int], bool], where: str) -> None:
    make = partial(Late, when=when, where=where)
    assert right_or_refused(make, "zero1") == "FXP109"
    assert right_or_refused(make, "stages") == "FXP115"


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0.3, 5.0, 30.0, 300.0])
def test_a_limit_to_all_gradients(limit: float) -> None:
    make = partial(Skips, weight_decay=limit)
    assert right_or_refused(make, "zero2") == "FXP109"
    assert right_or_refused(make, "stages") == "FXP115"
    assert right_or_refused(make, "replicas") == ""


@pytest.mark.slow
def test_nothing_is_known_of_what_moves_nothing() -> None:
    assert right_or_refused(partial(Idle, lr=0.1), "zero1") == "FXP109"
    assert right_or_refused(partial(Idle, lr=0.1), "replicas") == ""


def inherited(kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    """Of a class that is not known."""
    return partial(type(kind.__name__, (kind,), {}), **options)


ELEMENTWISE = [
    inherited(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    inherited(torch.optim.Adam, lr=0.01, amsgrad=True),
    inherited(torch.optim.AdamW, lr=0.01, foreach=True),
    inherited(torch.optim.AdamW, lr=0.01, fused=True),
    inherited(torch.optim.Adagrad, lr=0.1),
    inherited(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    inherited(torch.optim.Adadelta),
    inherited(torch.optim.Adamax, lr=0.01),
    inherited(torch.optim.NAdam, lr=0.01),
    inherited(torch.optim.RAdam, lr=0.01),
    inherited(torch.optim.ASGD, lr=0.05),
    inherited(torch.optim.Rprop, lr=0.01),
]


@pytest.mark.slow
@pytest.mark.parametrize("make", ELEMENTWISE, ids=lambda make: make.func.__name__)
def test_number_by_number_is_accepted_everywhere(make: Any) -> None:
    for layout in ("zero1", "zero3", "tensor", "stages"):
        assert right_or_refused(make, layout, steps=2) == ""


def test_it_is_cheap() -> None:
    """Generously: tens of milliseconds on an idle machine."""
    from fxpart.compat.optimizer_trial import ParameterSplit
    from fxpart.runtime.optimizer.division_check import OptimizerDivision, check_division

    model = nn.TransformerEncoderLayer(512, 8, 2048)
    optimizer = ELEMENTWISE[2](model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    division = OptimizerDivision(
        between=True, copies=False, cut=dict.fromkeys(names.values(), ParameterSplit(2))
    )
    start = time.perf_counter()
    assert check_division(optimizer, division, names)
    assert time.perf_counter() - start < 2.0
