"""Differences between two runs of the same steps, beyond rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fxpart.verification.comparison_runs import ComparisonStep

SINGLE, DOUBLE = 2e-5, 1e-6  # relative differences explained by rounding
NOISE = 1e-6  # fraction of the gradient norm below which a gradient is only rounding
_COARSE = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
_COARSE_PRECISIONS = {"bf16": 5e-2, "fp8": 5e-2}


@dataclass(frozen=True)
class NumericDifference:
    """kind: "loss", "gradient", "state" or "input gradient". name: what differs. step: from 1.

    size: |a - b| / |b| in the Euclidean norm; inf if one is missing or the shapes differ.
    """

    kind: str
    name: str
    step: int
    size: float


def differences(
    module: Sequence[ComparisonStep],
    program: Sequence[ComparisonStep],
    tolerance: float,
    coarse: float = 0.0,
) -> list[NumericDifference]:
    """Return the differences above the tolerance. coarse: tolerance of low-precision models."""
    found: list[NumericDifference] = []
    for index, (mine, theirs) in enumerate(zip(module, program, strict=True), 1):
        limit = max(tolerance, coarse)
        size = distance(theirs.loss, mine.loss)
        if size > limit:
            found.append(NumericDifference("loss", "loss", index, size))
        for kind, ours, others in (
            ("gradient", mine.gradients, theirs.gradients),
            ("input gradient", mine.inputs, theirs.inputs),
            ("state", mine.state, theirs.state),
        ):
            found += [
                NumericDifference(kind, name, index, size)
                for name, size in _sizes(ours, others, limit, gradients=kind != "state")
            ]
    return found


def _sizes(
    ours: Mapping[str, torch.Tensor | None],
    theirs: Mapping[str, torch.Tensor | None],
    limit: float,
    *,
    gradients: bool,
) -> Iterator[tuple[str, float]]:
    floor = 0.0
    if gradients:
        norms = [float(torch.linalg.vector_norm(t)) for t in ours.values() if t is not None]
        floor = max(NOISE, limit / 10) * sum(n * n for n in norms if n == n) ** 0.5
    for name, mine in ours.items():
        other = theirs.get(name)
        if mine is None and other is None:
            continue
        if gradients and (mine is None or other is None):
            left = mine if other is None else other
            assert left is not None
            if not bool(left.any()):  # a zero gradient equals a missing one
                continue
        size = distance(other, mine, floor)
        if size > limit:
            yield name, size


def distance(a: torch.Tensor | None, b: torch.Tensor | None, floor: float = 0.0) -> float:
    """Return ``|a - b| / |b|``; 0 below the floor, inf if the tensors cannot be compared."""
    if a is None or b is None or a.shape != b.shape:
        return float("inf")
    if torch.equal(a, b):
        return 0.0
    x, y = _comparable(a), _comparable(b)
    here, there = torch.isfinite(x), torch.isfinite(y)
    if not bool((here & there).all()):
        same = (here == there) & (here | (x == y) | (torch.isnan(x) & torch.isnan(y)))
        if not bool(same.all()):
            return float("inf")
        x, y = x[here], y[there]
    apart = float(torch.linalg.vector_norm(x - y))
    scale = float(torch.linalg.vector_norm(y))
    if apart <= floor:
        return 0.0
    return apart / scale if scale > 0 else float("inf") if apart > 1e-12 else 0.0


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as real numbers of at least single precision."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.double() if not tensor.is_floating_point() else tensor.float()


def coarseness(tensors: Sequence[torch.Tensor], precision: str) -> float:
    """Return the tolerance of a model with lower precision than float32, 0 for other models."""
    found = [_COARSE[t.dtype] for t in tensors if t.dtype in _COARSE]
    if precision in _COARSE_PRECISIONS:
        found.append(_COARSE_PRECISIONS[precision])
    return max(found, default=0.0)
