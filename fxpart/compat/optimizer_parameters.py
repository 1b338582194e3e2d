"""Names of the parameters of an optimizer instance, and whether ranks can copy the instance."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch

from fxpart.compat import has_step_hooks, steps_as_its_class, storage_identity
from fxpart.errors import FxpartError, Problem, error
from fxpart.optim import MatrixOptimizer

# Optimizers of torch without sparse support: https://docs.pytorch.org/docs/stable/sparse.html
_DENSE_ONLY = (
    "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "ASGD", "Rprop",
    "Adafactor", "LBFGS", "Muon",
)  # fmt: skip
_FIX = 'use optimizer={"tables.*": torch.optim.SparseAdam, "*": torch.optim.AdamW}'


def is_followed(instance: torch.optim.Optimizer) -> bool:
    """Return whether a trainer has replaced the instance's step."""
    step = getattr(vars(instance).get("step"), "__func__", None)
    return bool(getattr(step, "of_trainer", False))


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def optimizer_error(kind: str, why: str, fix: str) -> FxpartError:
    """Return FXP115 for an optimizer instance that cannot be honored."""
    return error("FXP115", where=f"optimizer {kind}", why=why, fix=fix)


def name_optimizer_parameters(
    instance: torch.optim.Optimizer, model: Mapping[str, torch.Tensor]
) -> tuple[tuple[str, ...], ...]:
    """Return for each group of an optimizer the names of its parameters, in order.

    model: the model's parameters by name. Raises FXP115 for an instance over other parameters,
    with a parameter twice, with hooks, or with a step or an optimizer of its own inside, which no
    copy would repeat.
    """
    kind = type(instance).__name__
    known = {id(tensor): name for name, tensor in model.items()}
    shared = {storage_identity(t): n for n, t in model.items() if t.numel()}
    found = [
        [known.get(id(p), shared.get(storage_identity(p)) if p.numel() else None) for p in mine]
        for mine in (group["params"] for group in instance.param_groups)
    ]
    every = [name for mine in found for name in mine]
    foreign = sum(name is None for name in every)
    if foreign:
        raise optimizer_error(
            kind,
            f"{foreign} of its {len(every)} parameters do not belong to the model",
            "create it from model.parameters() of the compiled model (not of a copy), or pass "
            "its class",
        )
    named = tuple(tuple(str(name) for name in mine) for mine in found)
    twice = sorted({str(name) for name in every if every.count(name) > 1})
    if twice:
        raise optimizer_error(
            kind,
            f"it has {', '.join(twice[:3])} twice, so each step would update it twice",
            "list each parameter once, in one group",
        )
    _check_step(instance)
    return named


def check_gradient_layouts(
    optimizer: torch.optim.Optimizer,
    names: Iterable[str],
    sparse: Container[str],
    shown: Mapping[str, str],
) -> None:
    """Raise FXP109 for each of the optimizer's parameters whose gradient it does not support.

    names: of its parameters. sparse: parameters with sparse gradients. shown: names in messages
    where they differ.
    """
    kind, problems = type(optimizer), list[Problem]()
    dense_only = isinstance(optimizer, MatrixOptimizer) or any(
        kind is getattr(torch.optim, name, None) for name in _DENSE_ONLY
    )
    for name in names:
        where = f"optimizer {kind.__name__}, {shown.get(name, name)}"
        if dense_only and name in sparse:
            why = "its gradient is sparse (sparse=True), which this optimizer does not support"
            problems.append(Problem("FXP109", where, why, _FIX))
        if kind is torch.optim.SparseAdam and name not in sparse:
            why = "its gradient is dense, but this optimizer supports sparse gradients only"
            problems.append(Problem("FXP109", where, why, _FIX))
    if problems:
        raise FxpartError(problems)


def _check_step(instance: torch.optim.Optimizer) -> None:
    inner = [k for k, v in vars(instance).items() if _is_optimizer(v)]
    why = ""
    if has_step_hooks(instance):
        why = "hooks are registered on its step, which would see only one rank's parameters"
    elif not steps_as_its_class(instance) and not is_followed(instance):
        why = "its step method was replaced in the instance"
    elif inner:
        why = f"its attribute {inner[0]!r} is another optimizer"
    if why:
        raise optimizer_error(
            type(instance).__name__, why, "pass a plain instance, its class, or a function"
        )
