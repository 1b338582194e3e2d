"""Check custom backward functions (torch.autograd.Function), which no tracer keeps.

A traced graph contains the ops of such a function's forward and their own gradients. If these equal
the custom backward (a formula that only saves memory), the graph is correct; if not (a
straight-through estimator), training would be silently wrong. So the gradients are compared, and
where they differ, the graph calls the function (:mod:`fxpart.capture.function_calls`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxpart.capture.captured_model import CapturedModel
from fxpart.capture.context_managers import REAL_LIMIT, preserve_tensors
from fxpart.capture.flat_batch import unflatten_batch
from fxpart.capture.function_calls import Call, FunctionOps, NoFunctionOpError
from fxpart.capture.request import CaptureRequest, trace_request
from fxpart.capture.shape_probe import ShapeProbe
from fxpart.capture.source_locations import shorten_path
from fxpart.compat import own_backward
from fxpart.errors import FxpartError, Problem

_HARMLESS = ("torch.utils.checkpoint",)  # recomputes the same gradients
_TOLERANCE = 1e-4


def find_custom_backwards(trial: ShapeProbe, tensors: Sequence[torch.Tensor]) -> list[type]:
    """Return the classes with a custom backward between parameters and the model's results."""
    found: dict[type, None] = {}
    todo = [t.grad_fn for t in trial.returned(tensors).values()]
    seen: set[object] = set()
    while todo:
        function = todo.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        todo += [following for following, _ in function.next_functions]
        kind = own_backward(function)
        if kind is not None and not kind.__module__.startswith(_HARMLESS):
            found[kind] = None
    return list(found)


def keep_custom_backwards(
    captured: CapturedModel, kinds: Sequence[type], calls: Sequence[Call], request: CaptureRequest
) -> CapturedModel:
    """Return a capture whose gradients are the module's, with a note in ``tried``.

    calls: those of one run. Raise FXP108 if no op can replace a function whose gradients differ.
    """
    names = ", ".join(kind.__name__ for kind in kinds)
    traced = _find_difference(captured, request)
    if traced == "":
        note = f"custom backward functions ({names}): gradients equal those of the traced forward"
        return replace(captured, tried=(*captured.tried, note))
    try:
        ops = FunctionOps.of(kinds, calls)
    except NoFunctionOpError as cause:
        raise _refused(kinds, str(cause)) from cause
    with ops.in_place():
        made = trace_request(request)
    different = _find_difference(made, request)
    if different or (different is None and not ops.complete):
        why = different or "the model cannot be run here to compare its gradients"
        raise _refused(kinds, why)
    note = f"custom backward functions ({names}): called in the graph"
    return replace(made, tried=(*made.tried, note))


def _find_difference(captured: CapturedModel, request: CaptureRequest) -> str | None:
    """Return how the graph's gradients differ from the module's, "" if they are equal.

    Both run on the example with one seed. None for models without data, and for those with more
    than 2e8 parameters, which do not run.
    """
    count = sum(captured.state[name].numel() for name in captured.parameters)
    if count > REAL_LIMIT or any(t.device.type == "meta" for t in captured.state.values()):
        return None
    assert captured.eager is not None, "a capture contains its module"
    rows = captured.microbatch_size or min(captured.batch_size, 4)
    eager, inputs = captured.eager, request.resized(rows)
    batch = unflatten_batch(request.parts.tree, inputs)
    with preserve_tensors(request.model, request.loss), torch.random.fork_rng():
        mine = _gradients(captured, lambda: captured.graph(*inputs))
        theirs = _gradients(captured, lambda: eager(batch))
    for name, a, b in zip(captured.parameters, mine, theirs, strict=True):
        if not _close(a, b):
            return f"the gradient of {name} differs from that of the traced forward"
    return ""


def _gradients(captured: CapturedModel, run: Callable[[], Any]) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    parameters = [captured.state[name] for name in captured.parameters]
    wanted = [p for p in parameters if p.requires_grad]
    with torch.enable_grad():
        found = torch.autograd.grad(run()[0], wanted, allow_unused=True)
    by_tensor = {id(p): g for p, g in zip(wanted, found, strict=True)}
    return [by_tensor.get(id(p)) for p in parameters]


def _close(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    scale = float(b.abs().max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)


def _refused(kinds: Sequence[type], why: str) -> FxpartError:
    fix = (
        "make it an operator with a registered backward: torch.library.custom_op with "
        "register_autograd and register_fake; or write it as y + (g(x) - y).detach()"
    )
    return FxpartError(
        Problem("FXP108", _place(kind), f"{kind.__name__} has a custom backward: {why}", fix)
        for kind in kinds
    )


def _place(kind: type) -> str:
    try:
        file, line = inspect.getsourcefile(kind), inspect.getsourcelines(kind)[1]
    except (OSError, TypeError):
        return f"{kind.__module__}.{kind.__qualname__}"
    return f"{shorten_path(file or '')}:{line}: class {kind.__name__}"
