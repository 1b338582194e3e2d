"""Validate that a model is a plain module, without wrappers of other tools."""

from __future__ import annotations

import torch
from torch import nn

from fxpart.compat import unwrapped
from fxpart.errors import FxpartError, Problem, error


def plain_module(model: object) -> nn.Module:
    """Return the module to capture, unwrapped from torch.compile.

    Raise FXP108 for scripted, parallel and hooked modules.
    """
    if not isinstance(model, nn.Module):
        raise error(
            "FXP109",
            where="model",
            why=f"it is of type {type(model).__name__}, not a torch.nn.Module",
            fix="pass the module itself",
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
            return Problem("FXP108", name or "model", why, "pass the original nn.Module")
    return None


def _parallel(model: nn.Module) -> Problem | None:
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        why = f"{type(model).__name__} replicates the model; fxpart does that itself"
        return Problem("FXP108", "model", why, "pass model.module")
    return None


def _hooks(model: nn.Module) -> list[Problem]:
    """Return problems for backward hooks, which change gradients outside of the graph."""
    return [
        Problem(
            "FXP108",
            name or "model",
            "it has a backward hook, which is not in the graph",
            "remove the hook, or move its computation to forward or to the optimizer",
        )
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]
