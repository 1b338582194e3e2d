"""Operations on lists of tensors (``torch._foreach_*``), which torch.optim uses.

On a GPU a whole list is one kernel; elsewhere, and for sparse or mixed tensors, torch loops over
the list. An empty list, which torch rejects, gives an empty list.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensors = Sequence[torch.Tensor]


def foreach_add(to: Tensors, others: Tensors, alpha: float) -> list[torch.Tensor]:
    """Return new tensors ``to + alpha * others``."""
    return list(torch._foreach_add(list(to), list(others), alpha=alpha)) if to else []


def foreach_add_(to: Tensors, others: Tensors, alpha: float = 1.0) -> None:
    """Add in place: ``to += alpha * others``."""
    if to:
        torch._foreach_add_(list(to), list(others), alpha=alpha)


def foreach_shift_(to: Tensors, numbers: Sequence[float]) -> None:
    """Add one number to each tensor in place."""
    if to:
        torch._foreach_add_(list(to), list(numbers))


def foreach_mul(to: Tensors, factors: Sequence[float]) -> list[torch.Tensor]:
    """Return new tensors, each multiplied by its own factor."""
    return list(torch._foreach_mul(list(to), list(factors))) if to else []


def foreach_mul_(to: Tensors, factors: Sequence[float]) -> None:
    """Multiply each tensor by its own factor in place."""
    if to:
        torch._foreach_mul_(list(to), list(factors))


def foreach_div_(to: Tensors, others: Tensors) -> None:
    """Divide in place: ``to /= others``."""
    if to:
        torch._foreach_div_(list(to), list(others))


def foreach_divide_(to: Tensors, divisors: Sequence[float]) -> None:
    """Divide each tensor by its own number in place."""
    if to:
        torch._foreach_div_(list(to), list(divisors))


def foreach_multiply_(to: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor in place by one tensor of no dims (torch._foreach_mul_)."""
    if to:
        torch._foreach_mul_(list(to), factor)


def foreach_norm(of: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the 2-norm of each tensor (torch._foreach_norm)."""
    return list(torch._foreach_norm(list(of), 2.0)) if of else []


def foreach_sqrt(of: Tensors) -> list[torch.Tensor]:
    """Return new tensors of square roots."""
    return list(torch._foreach_sqrt(list(of))) if of else []


def foreach_addcdiv_(to: Tensors, over: Tensors, under: Tensors, values: Sequence[float]) -> None:
    """Add ``values * over / under`` in place, with one value per tensor."""
    if to:
        torch._foreach_addcdiv_(list(to), list(over), list(under), list(values))


def foreach_copy_(to: Tensors, others: Tensors) -> None:
    """Copy ``others`` to ``to`` in place."""
    if to:
        torch._foreach_copy_(list(to), list(others))


def foreach_lerp(start: Tensors, end: Tensors, weight: float) -> list[torch.Tensor]:
    """Return new tensors ``start + weight * (end - start)``, exact for ``weight`` 1."""
    return list(torch._foreach_lerp(list(start), list(end), weight)) if start else []


def foreach_zero_(to: Tensors) -> None:
    """Fill with zeros in place."""
    if to:
        torch._foreach_zero_(list(to))
