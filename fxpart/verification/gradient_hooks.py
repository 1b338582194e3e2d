"""Reject gradient hooks, which the captured program does not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fxpart.capture.source_locations import shorten_path
from fxpart.errors import FxpartError, Problem

_MODULE = {
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}
_TENSOR = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
_FIX = (
    "remove the hook; scale or mask gradients in the optimizer, or in forward "
    "(x * scale + (x * (1 - scale)).detach() scales a gradient)"
)


def refuse_gradient_hooks(model: nn.Module, loss: object) -> None:
    """Raise FXP113 for each gradient hook on a parameter or module of the model or the loss."""
    problems = list(_problems(model, loss))
    if problems:
        raise FxpartError(problems)


def _problems(model: nn.Module, loss: object) -> Iterator[Problem]:
    for root, prefix in ((model, ""), (loss, "loss.")):
        if not isinstance(root, nn.Module):
            continue
        for name, parameter in root.named_parameters():
            for slot, method in _TENSOR.items():
                for hook in _hooks(parameter, slot):
                    yield _problem(f"parameter {prefix}{name}", method, hook)
        for name, module in root.named_modules():
            for slot, method in _MODULE.items():
                for hook in _hooks(module, slot):
                    shown = f"{prefix}{name}".rstrip(".") or type(module).__name__
                    yield _problem(f"module {shown}", method, hook)


def _hooks(owner: object, slot: str) -> list[Callable[..., Any]]:
    found = getattr(owner, slot, None)
    return list(found.values()) if found else []


def _problem(where: str, method: str, hook: Callable[..., Any]) -> Problem:
    why = f"the gradient hook {_shown(hook)} was added by {method}, but the program does not run it"
    return Problem("FXP113", where, why, _FIX)


def _shown(hook: Callable[..., Any]) -> str:
    code = getattr(hook, "__code__", getattr(getattr(hook, "__func__", None), "__code__", None))
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return (
        name if code is None else f"{name} ({shorten_path(code.co_filename)}:{code.co_firstlineno})"
    )
