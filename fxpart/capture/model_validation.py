"""Which objects can be captured at all: plain modules, not what other tools made of them."""

from __future__ import annotations

import torch
from torch import nn

from fxpart.compat import unwrapped
from fxpart.errors import FxpartError, Problem, error


def plain_module(model: object) -> nn.Module:
    """The module to capture, a compiled one unwrapped; FXP108 for scripted, parallel or hooked."""
    if not isinstance(model, nn.Module):
        raise error(
            "FXP109",
            where="model",
            why=f"it is of type {type(model).__name__}, not a torch.nn.Module",
            fix="give the module itself",
        )
    module = unwrapped(model)
    problems = [p for p in (_scripted(module), _parallel(module), *_hooks(module)) if p is not None]
    if problems:
        raise FxpartError(problems)
    return module


def _scripted(model: nn.Module) -> Problem | None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            why = "a scripted or traced module has no Python code to follow"
            return Problem("FXP108", name or "model", why, "give the nn.Module it was made of")
    return None


def _parallel(model: nn.Module) -> Problem | None:
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        why = f"{type(model).__name__} replicates the model; fxpart does that itself"
        return Problem("FXP108", "model", why, "give model.module")
    return None


def _hooks(model: nn.Module) -> list[Problem]:
    """Backward hooks change gradients behind the graph's back."""
    return [
        Problem(
            "FXP108",
            name or "model",
            "it has a backward hook, which is not in the graph",
            "remove the hook, or do its work in forward or in the optimizer",
        )
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]
