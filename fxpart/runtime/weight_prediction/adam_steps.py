"""Adam steps some updates ahead, computed in blocks without temporary copies of all weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fxpart.compat import (
    foreach_add_,
    foreach_addcdiv_,
    foreach_copy_,
    foreach_div_,
    foreach_divide_,
    foreach_mul,
    foreach_mul_,
    foreach_shift_,
    foreach_sqrt,
)

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
