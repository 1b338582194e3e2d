"""Proxy optimizers and schedulers, which act on copies."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

# Hooks and the step of the real optimizer, which a scheduler may wrap, are not copied.
_NOT_TAKEN = ("state", "param_groups", "step")
_HOOKS = "_hooks"


def make_proxy_scheduler(scheduler: LRScheduler) -> tuple[LRScheduler, torch.optim.Optimizer]:
    """Return a copy of the scheduler, and an optimizer without parameters that it controls.

    The copy uses ``copy.deepcopy`` with the optimizer replaced, also for nested schedulers
    (SequentialLR, ChainedScheduler). ``_opt_called`` marks the optimizer as stepped, which avoids
    the scheduler's warning.
    """
    real: torch.optim.Optimizer = scheduler.optimizer
    kind = type(real)
    if isinstance(
        getattr(kind, "param_groups", None), property
    ):  # it shows the groups of other optimizers
        kind = torch.optim.Optimizer
    stand_in = object.__new__(kind)
    stand_in.__dict__.update(real.__dict__)
    stand_in.defaults = real.defaults
    stand_in.param_groups = [
        {name: copy.copy(value) if name != "params" else [] for name, value in group.items()}
        for group in real.param_groups
    ]
    for group in stand_in.param_groups:
        for name, value in group.items():
            if isinstance(value, torch.Tensor):
                group[name] = value.clone()
    stand_in.state = defaultdict(dict)
    stand_in._opt_called = True  # type: ignore[attr-defined]
    return copy.deepcopy(scheduler, {id(real): stand_in}), stand_in


def make_proxy_optimizer(
    real: torch.optim.Optimizer, parameters: Mapping[torch.Tensor, torch.Tensor]
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and groups for other parameters, without state.

    parameters: of the real one -> of the new one. It has no hooks.
    """
    return _copy_without_state(
        real,
        [
            {**group, "params": [parameters[p] for p in group["params"]]}
            for group in real.param_groups
        ],
        {id(p): q for p, q in parameters.items()},
    )


def optimizer_over(
    real: torch.optim.Optimizer,
    members: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
    fallback: torch.Tensor,
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and options over other parameters, without state.

    members: for each group of the real optimizer, pairs of one of its parameters and a new one; a
    parameter may have several new ones, or none. fallback: replaces references to a parameter
    without a new one. Tensors among the options are copied; hooks are omitted.
    """
    groups = []
    for group, pairs in zip(real.param_groups, members, strict=True):
        options = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        if "param_names" in group:
            names = dict(zip(map(id, group["params"]), group["param_names"], strict=True))
            options["param_names"] = [names[id(p)] for p, _ in pairs]
        groups.append({"params": [q for _, q in pairs], **options})
    memo: dict[int, Any] = {id(p): fallback for g in real.param_groups for p in g["params"]}
    memo |= {id(p): q for pairs in reversed(members) for p, q in reversed(pairs)}
    return _copy_without_state(real, groups, memo)


def _copy_without_state(
    real: torch.optim.Optimizer, groups: list[dict[str, Any]], parameters: Mapping[int, Any]
) -> torch.optim.Optimizer:
    """Copy an optimizer's attributes around other groups; parameters: the new ones, by identity."""
    made = object.__new__(type(real))
    made.state = defaultdict(dict)
    made.param_groups = groups
    memo: dict[int, Any] = {
        **parameters,
        id(real): made,
        id(real.state): made.state,
        id(real.param_groups): made.param_groups,
    }
    for theirs, mine in zip(real.param_groups, made.param_groups, strict=True):
        memo |= {id(theirs): mine, id(theirs["params"]): mine["params"]}
    for name, value in real.__dict__.items():
        if name not in _NOT_TAKEN:
            hooks = name.endswith(_HOOKS)
            made.__dict__[name] = type(value)() if hooks else copy.deepcopy(value, dict(memo))
    return made


def step_of(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return the class's step without torch's wrapper for hooks (``hooked``).

    Otherwise hooks registered for all optimizers would be called for internal steps.
    """
    step: Any = kind.step
    plain: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return plain


def steps_as_its_class(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the instance's step is that of its class, or a scheduler's wrapper of it.

    Uses ``_wrapped_by_lr_sched`` of torch 2.4 and later; without it a wrapped step counts as
    different.
    """
    own: Any = vars(optimizer).get("step")
    if own is None:
        return True
    function = getattr(own, "__func__", own)
    inner = getattr(function, "__wrapped__", None)
    return bool(getattr(function, "_wrapped_by_lr_sched", False)) and (
        inner is type(optimizer).step
    )


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Mark the optimizer as stepped (``_opt_called``), since schedulers warn otherwise."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
    """Replace an instance's step, also for schedulers created before.

    step: takes the instance, like a method. ``_wrapped_by_lr_sched`` tells schedulers not to wrap
    it, since :func:`mark_stepped` counts.
    """
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks are registered on the instance's step (``_optimizer_step_*_hooks``)."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return any(vars(optimizer).get(name) for name in names)
