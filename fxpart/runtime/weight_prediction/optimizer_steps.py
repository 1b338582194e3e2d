"""The step of an optimizer: its torch.optim class, and SGD and Adam steps some updates ahead.

SGD steps are always ``a W + b x``, with two factors per group. Adam steps are computed in blocks,
without temporary copies of all weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fxpart.compat import (
    foreach_add,
    foreach_add_,
    foreach_addcdiv_,
    foreach_copy_,
    foreach_div_,
    foreach_divide_,
    foreach_mul,
    foreach_mul_,
    foreach_shift_,
    foreach_sqrt,
    step_of,
    steps_as_its_class,
)
from fxpart.runtime.weight_prediction.future_options import Options

# Attributes that a subclass may define without changing the step; overriding any other attribute of
# its base counts as a different step.
_HARMLESS = frozenset(
    {
        "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__init__", "__module__",
        "__orig_bases__", "__parameters__", "__qualname__", "__repr__", "__slots__", "__str__",
        "__static_attributes__", "__weakref__", "add_param_group", "step",
    }
)  # fmt: skip


def step_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    """Return the torch.optim class with the same update, or None if the optimizer has its own.

    A subclass counts as its base if it overrides neither ``step`` nor anything that ``step`` may
    use. A step that a learning-rate scheduler wraps on the instance counts as the class's.
    """
    kind = type(optimizer)
    if not steps_as_its_class(optimizer):
        return None
    for base in kind.__mro__:
        if getattr(torch.optim, base.__name__, None) is base and base is not torch.optim.Optimizer:
            return base if step_of(kind) is step_of(base) else None
        if any(hasattr(base.__mro__[1], name) for name in vars(base) if name not in _HARMLESS):
            return None
    return None


# Elements per block: fits the cache of a CPU core, and fills a GPU.
CPU_BLOCK = 1 << 16
DEVICE_BLOCK = 1 << 25


@dataclass(frozen=True, slots=True)
class AdamStep:
    """One step of a parameter: W <- keep W - by m / (sqrt(v) / root + eps)."""

    keep: float
    by: float
    root: float
    eps: float


def apply_adam_steps(
    weights: Sequence[torch.Tensor],
    firsts: Sequence[torch.Tensor],
    seconds: Sequence[torch.Tensor],
    moves: Sequence[Sequence[AdamStep]],
) -> list[torch.Tensor]:
    """Return the weights after their moves, an equal number for each, as new tensors.

    firsts, seconds: Adam's first and second moments, with the weights' shapes.
    """
    results = [torch.empty_like(w) for w in weights]
    for places, (targets, w, m, v) in blocks(results, weights, firsts, seconds):
        foreach_copy_(targets, w)
        roots = foreach_sqrt(v)
        steps = len(moves[places[0]])
        for number in range(steps):
            step_moves = [moves[place][number] for place in places]
            denominators = roots if number == steps - 1 else [move.clone() for move in roots]
            foreach_divide_(denominators, [move.root for move in step_moves])
            foreach_shift_(denominators, [move.eps for move in step_moves])
            if any(move.keep != 1 for move in step_moves):
                foreach_mul_(targets, [move.keep for move in step_moves])
            foreach_addcdiv_(targets, m, denominators, [-move.by for move in step_moves])
    return results


def compute_nadam_direction(
    gradients: Sequence[torch.Tensor],
    firsts: Sequence[torch.Tensor],
    seconds: Sequence[torch.Tensor],
    factors: Sequence[tuple[float, float, float]],
    eps: float,
) -> None:
    """Replace the gradients g by NAdam's direction (a g + b m) / (sqrt(v / c) + eps), in place.

    factors: (a, b, c) of each.
    """
    for places, (g, m, v) in blocks(gradients, firsts, seconds):
        step_moves = [factors[place] for place in places]
        foreach_mul_(g, [a for a, _, _ in step_moves])
        foreach_add_(g, foreach_mul(m, [b for _, b, _ in step_moves]))
        denominators = foreach_sqrt(v)
        foreach_divide_(denominators, [c**0.5 for _, _, c in step_moves])
        foreach_shift_(denominators, [eps] * len(step_moves))
        foreach_div_(g, denominators)


def blocks(
    *lists: Sequence[torch.Tensor],
) -> Iterator[tuple[list[int], list[list[torch.Tensor]]]]:
    """Yield aligned blocks of tensors of equal shapes: (indices, blocks of each list).

    Small tensors share a block; large contiguous tensors are split as views.
    """
    places: list[int] = []
    pieces: list[list[torch.Tensor]] = [[] for _ in lists]
    filled = 0
    for place, tensors in enumerate(zip(*lists, strict=True)):
        limit = CPU_BLOCK if tensors[0].device.type == "cpu" else DEVICE_BLOCK
        cut = [tensors]
        if tensors[0].numel() > limit and all(t.is_contiguous() for t in tensors):
            cut = list(zip(*(t.view(-1).split(limit) for t in tensors), strict=True))
        for piece in cut:
            if places and filled + piece[0].numel() > limit:
                yield places, pieces
                places, pieces, filled = [], [[] for _ in lists], 0
            places.append(place)
            for block, tensor in zip(pieces, piece, strict=True):
                block.append(tensor)
            filled += piece[0].numel()
    if places:
        yield places, pieces


def combine_linearly(
    weights: Sequence[torch.Tensor], others: Sequence[torch.Tensor], of_weight: float, of: float
) -> list[torch.Tensor]:
    """Return ``of_weight * weights + of * others`` as new tensors, without other allocations."""
    if of_weight == 1.0:
        return foreach_add(weights, others, alpha=of)
    made = foreach_mul(weights, [of_weight] * len(weights))
    foreach_add_(made, others, alpha=of)
    return made


def compute_zero_gradient_factors(options: Sequence[Options]) -> tuple[float, float]:
    """Return the factors of W and of the momentum buffer v after SGD steps with zero gradients.

    One step is linear in both: g = d W (weight decay d), v <- m v + (1 - dampening) g, and W <- W -
    lr v, or W - lr (g + m v) with Nesterov. Without decay the factors are 1 and -lr (m - m^(s+1)) /
    (1 - m) after s steps.
    """
    weight, velocity = (1.0, 0.0), (0.0, 1.0)  # each as factors of the current W and v
    for step in options:
        lr, m, decay = step["lr"], step["momentum"], step["weight_decay"]
        gradient = (decay * weight[0], decay * weight[1])
        if not m:
            move = gradient
        else:
            undamped = 1 - step["dampening"]
            velocity = (
                m * velocity[0] + undamped * gradient[0],
                m * velocity[1] + undamped * gradient[1],
            )
            move = velocity
            if step["nesterov"]:
                move = (gradient[0] + m * velocity[0], gradient[1] + m * velocity[1])
        weight = (weight[0] - lr * move[0], weight[1] - lr * move[1])
    return weight
