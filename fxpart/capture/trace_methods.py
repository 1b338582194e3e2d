"""Trace methods in order: torch.export symbolic, static, strict, then torch.fx."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.export import Dim, ExportedProgram, export

from fxpart.capture.empty_selections import Branches
from fxpart.capture.equal_masks import EqualMasks
from fxpart.capture.failure_causes import problem_of
from fxpart.capture.forward_gradients import gradients_recorded
from fxpart.capture.integer_regions import inline_integer_regions, select_by_constants
from fxpart.capture.model_with_loss import ModelWithLoss
from fxpart.capture.python_state import PythonState
from fxpart.compat import deferred_code, grad_modes_kept
from fxpart.errors import FxpartError

MAX_BATCH = 1 << 20

Result = TypeVar("Result")


@dataclass(frozen=True)
class TraceMethod:
    """One trace method: its label, the reported method, and what is symbolic."""

    label: str
    method: str
    strict: bool
    symbolic: bool
    sequences: bool


WAYS = (
    TraceMethod("export, symbolic batch and sequence", "export", False, True, True),
    TraceMethod("export, symbolic batch", "export", False, True, False),
    TraceMethod("export, fixed batch", "export", False, False, False),
    TraceMethod("strict export, symbolic batch", "export-strict", True, True, False),
    TraceMethod("strict export, fixed batch", "export-strict", True, False, False),
    TraceMethod("torch.fx symbolic trace, fixed batch", "symbolic-trace", False, False, False),
)


def sequence_dims(
    tensors: Sequence[torch.Tensor], batch_dims: Sequence[int | None]
) -> tuple[frozenset[int], ...]:
    """Return, per input, the dims that may be a sequence length.

    The second dim of integer inputs [batch, length] gives the lengths, and the dim of those without
    rows (the values of all bags); every non-batch dim of that size in any input counts.
    """
    sizes = {
        t.shape[0 if b is None else 1 - b]
        for t, b in zip(tensors, batch_dims, strict=True)
        if t.dtype in (torch.int64, torch.int32)
        and ((b is None and t.dim() == 1) or (b is not None and b < 2 and t.dim() == 2))
    }
    sizes -= {0, 1}
    return tuple(
        frozenset(
            d
            for d, size in enumerate(t.shape)
            if d != b and size in sizes and (not t.is_floating_point() or d == 1 or b is None)
        )
        for t, b in zip(tensors, batch_dims, strict=True)
    )


def run_export(
    whole: ModelWithLoss,
    tensors: Sequence[torch.Tensor],
    batch_dims: Sequence[int | None],
    way: TraceMethod,
    python: PythonState,
    branches: Branches,
) -> ExportedProgram:
    """Run torch.export with one method; raise torch's errors.

    python: the Python state of model and loss, restored after the trace. branches: decides branches
    on data, unless the method is strict.
    """
    shapes = _shapes(tensors, batch_dims, way) if way.symbolic else None
    gradients = nullcontext() if way.strict else gradients_recorded()
    masks = nullcontext() if way.strict else EqualMasks()
    decided = nullcontext() if way.strict else branches.decided()
    with python.unchanged(), deferred_code(), grad_modes_kept(), gradients, masks, decided:
        exported = export(whole, (tuple(tensors),), dynamic_shapes=shapes, strict=way.strict)
    inline_integer_regions(exported.graph_module)
    select_by_constants(exported)
    return exported


def _shapes(
    tensors: Sequence[torch.Tensor], batch_dims: Sequence[int | None], way: TraceMethod
) -> dict[str, object]:
    batch = Dim("batch", min=1, max=MAX_BATCH)
    lengths = sequence_dims(tensors, batch_dims)
    specs: list[dict[int, object]] = []
    for i, dim in enumerate(batch_dims):
        spec: dict[int, object] = {}
        if way.sequences:
            spec |= dict.fromkeys(lengths[i], Dim.AUTO)
        if dim is not None:
            spec[dim] = batch
        specs.append(spec)
    return {"batch": tuple(specs)}


def run_first_successful(
    ways: Sequence[TraceMethod], attempt: Callable[[TraceMethod], Result]
) -> tuple[TraceMethod, Result, list[tuple[TraceMethod, Exception]]]:
    """Return the result of the first method that works, with the failures before it.

    Raise :class:`AllTraceMethodsFailedError` if none works.
    """
    failures: list[tuple[TraceMethod, Exception]] = []

    def is_final(failed: tuple[TraceMethod, Exception]) -> bool:
        return isinstance(failed[1], FxpartError) or problem_of(failed[1]).code == "FXP103"

    for way in ways:
        if way.method == "symbolic-trace" and any(map(is_final, failures)):
            break  # torch.fx would silently record one branch, one size, or constant gradients
        try:
            return way, attempt(way), failures
        except Exception as failure:  # torch.export raises many unrelated types
            failures.append((way, failure))
    raise AllTraceMethodsFailedError(failures)


class AllTraceMethodsFailedError(Exception):
    """Raised if no trace method works; ``failures`` pairs each with its exception."""

    def __init__(self, failures: list[tuple[TraceMethod, Exception]]) -> None:
        """Store the failures in order."""
        self.failures = failures
        super().__init__(f"{len(failures)} trace methods failed")
