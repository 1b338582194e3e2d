"""One operation on a list of tensors at once (``torch._foreach_*``), which torch.optim is built of.

On a GPU a whole list is one kernel; elsewhere, and for sparse or mixed tensors, torch goes through
the list. An empty list, which torch refuses, gives an empty list.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensors = Sequence[torch.Tensor]


def foreach_add(to: Tensors, others: Tensors, alpha: float) -> list[torch.Tensor]:
    """New tensors ``to + alpha * others``."""
    return list(torch._foreach_add(list(to), list(others), alpha=alpha)) if to else []


def foreach_add_(to: Tensors, others: Tensors, alpha: float = 1.0) -> None:
    """``to += alpha * others`` in place."""
    if to:
        torch._foreach_add_(list(to), list(others), alpha=alpha)


def foreach_shift_(to: Tensors, numbers: Sequence[float]) -> None:
    """``to += number`` in place, each its own."""
    if to:
        torch._foreach_add_(list(to), list(numbers))


def foreach_mul(to: Tensors, factors: Sequence[float]) -> list[torch.Tensor]:
    """New tensors ``to * factor``, each by its own."""
    return list(torch._foreach_mul(list(to), list(factors))) if to else []


def foreach_mul_(to: Tensors, factors: Sequence[float]) -> None:
    """``to *= factor`` in place, each by its own."""
    if to:
        torch._foreach_mul_(list(to), list(factors))


def foreach_div_(to: Tensors, others: Tensors) -> None:
    """``to /= others`` in place."""
    if to:
        torch._foreach_div_(list(to), list(others))


def foreach_divide_(to: Tensors, divisors: Sequence[float]) -> None:
    """``to /= divisor`` in place, each by its own number."""
    if to:
        torch._foreach_div_(list(to), list(divisors))


def foreach_sqrt(of: Tensors) -> list[torch.Tensor]:
    """New tensors of square roots."""
    return list(torch._foreach_sqrt(list(of))) if of else []


def foreach_addcdiv_(to: Tensors, over: Tensors, under: Tensors, values: Sequence[float]) -> None:
    """``to += values * over / under`` in place, each with its own number."""
    if to:
        torch._foreach_addcdiv_(list(to), list(over), list(under), list(values))


def foreach_copy_(to: Tensors, others: Tensors) -> None:
    """Copy in place."""
    if to:
        torch._foreach_copy_(list(to), list(others))


def foreach_lerp(start: Tensors, end: Tensors, weight: float) -> list[torch.Tensor]:
    """New tensors ``start + weight * (end - start)``, exact at ``weight`` 1 too."""
    return list(torch._foreach_lerp(list(start), list(end), weight)) if start else []


def foreach_zero_(to: Tensors) -> None:
    """Fill with zeros in place."""
    if to:
        torch._foreach_zero_(list(to))
