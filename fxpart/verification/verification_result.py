"""The result of a comparison of two training runs: the differences of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import torch

TOLERANCE = 1e-6
NOISE = 1e-6


class _VerificationStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only struct without unknown fields."""


class ParameterDifference(
    _VerificationStruct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """One parameter: largest difference of its gradient over the steps, and final difference.

    Each difference is ``|a - b| / |b|`` in the Euclidean norm. equal: whether all bits agree.
    noise: the single-process gradient is below NOISE times the norm of all gradients, so it is only
    rounding (such as the bias of attention keys, whose true gradient is zero); its relative
    difference is meaningless and an optimizer like Adam amplifies it. If bits need not agree, noise
    also holds if rounding changes a single process as much, by
    :mod:`fxpart.verification.rounding_error`.
    """

    name: str
    gradient: float
    parameter: float
    equal: bool
    noise: bool = False


class Verification(_VerificationStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The comparison of a partitioned run with a single process.

    losses: per step (partitioned, single process). exact: whether bits had to agree (each stage is
    one rank, and no gradient is summed over stages in another order). equal: whether they did.
    largest: the largest relative difference of a loss, gradient, parameter or buffer, without
    noise. eager_loss, eager_gradient: relative differences of the first step to the user's module,
    None if it could not run. eager_differences: descriptions of differences from the user's module
    beyond rounding, over all steps. passed: within the tolerance, and equal to the user's module
    within rounding.
    """

    ranks: int
    stages: int
    steps: int
    microbatches: int
    losses: tuple[tuple[float, float], ...]
    differences: tuple[ParameterDifference, ...]
    buffers_equal: bool
    exact: bool
    equal: bool
    largest: float
    tolerance: float
    eager_loss: float | None
    eager_gradient: float | None
    passed: bool
    eager_differences: tuple[str, ...] = ()


@dataclass
class DifferenceTable:
    """Differences collected over the steps. loss: the largest loss difference; others by parameter.

    losses: per step (partitioned, single process). first: single-process gradients of the first
    step.
    """

    loss: float
    losses: list[tuple[float, float]]
    first: Mapping[str, torch.Tensor]
    gradient: dict[str, float]
    equal: dict[str, bool]
    noise: dict[str, bool]

    @classmethod
    def of(cls, names: Iterable[str]) -> DifferenceTable:
        """Return an empty table."""
        listed = list(names)
        return cls(
            0.0, [], {}, dict.fromkeys(listed, 0.0), dict.fromkeys(listed, True),
            dict.fromkeys(listed, False),
        )  # fmt: skip

    def add(
        self,
        loss: torch.Tensor,
        wanted: torch.Tensor,
        found: Mapping[str, torch.Tensor],
        theirs: Mapping[str, torch.Tensor],
    ) -> None:
        """Add one step: losses and gradients of the partitioned run and of the single process."""
        self.losses.append((float(loss), float(wanted)))
        self.loss = max(self.loss, relative(loss, wanted))
        self.first = self.first or theirs
        floor = NOISE * norm(theirs.values())
        for name in self.gradient:
            mine, other = found.get(name), theirs.get(name)
            if mine is None and other is None:
                continue
            self.gradient[name] = max(self.gradient[name], relative(mine, other))
            self.equal[name] &= has_equal_bits(mine, other)
            self.noise[name] |= other is not None and norm([other]) <= floor


def relative(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Return ``|a - b| / |b|`` in float64, Euclidean norm; inf if one is missing or not finite.

    NaN equals NaN.
    """
    if a is None or b is None or a.shape != b.shape:
        return float("inf")
    x, y = a.detach().to(b.device).double().flatten(), b.detach().double().flatten()
    if torch.equal(x, y) or torch.allclose(x, y, rtol=0.0, atol=0.0, equal_nan=True):
        return 0.0
    norm = torch.linalg.vector_norm(y).item()
    found = torch.linalg.vector_norm(x - y).item() / (norm if norm > 0 else 1.0)
    return found if found == found else float("inf")


def norm(tensors: Iterable[torch.Tensor]) -> float:
    """Return the Euclidean norm of all elements of all tensors, in float64."""
    squares = [float(torch.linalg.vector_norm(t.double()) ** 2) for t in tensors]
    return float(sum(squares) ** 0.5)


def has_equal_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Return whether both agree in every bit (NaN equals NaN)."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and relative(a, b) == 0.0
