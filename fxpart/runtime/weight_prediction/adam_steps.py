"""Adam's arithmetic some updates ahead, in blocks: no more memory than the result."""

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

# Elements that are worked on at a time: what stays in a core's cache, and what fills a GPU.
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
    """New tensors: each weight after its moves, which are as many for each.

    firsts, seconds: Adam's averages of gradients and of their squares, with the weights' shapes.
    """
    made = [torch.empty_like(w) for w in weights]
    for places, (to, w, m, v) in blocks(made, weights, firsts, seconds):
        foreach_copy_(to, w)
        roots = foreach_sqrt(v)
        steps = len(moves[places[0]])
        for number in range(steps):
            now = [moves[place][number] for place in places]
            under = roots if number == steps - 1 else [one.clone() for one in roots]
            foreach_divide_(under, [one.root for one in now])
            foreach_shift_(under, [one.eps for one in now])
            if any(one.keep != 1 for one in now):
                foreach_mul_(to, [one.keep for one in now])
            foreach_addcdiv_(to, m, under, [-one.by for one in now])
    return made


def compute_nadam_direction(
    gradients: Sequence[torch.Tensor],
    firsts: Sequence[torch.Tensor],
    seconds: Sequence[torch.Tensor],
    factors: Sequence[tuple[float, float, float]],
    eps: float,
) -> None:
    """Make the gradients g, in place, the direction (a g + b m) / (sqrt(v / c) + eps) of NAdam.

    factors: (a, b, c) of each.
    """
    for places, (g, m, v) in blocks(gradients, firsts, seconds):
        now = [factors[place] for place in places]
        foreach_mul_(g, [a for a, _, _ in now])
        foreach_add_(g, foreach_mul(m, [b for _, b, _ in now]))
        under = foreach_sqrt(v)
        foreach_divide_(under, [c**0.5 for _, _, c in now])
        foreach_shift_(under, [eps] * len(now))
        foreach_div_(g, under)


def blocks(
    *lists: Sequence[torch.Tensor],
) -> Iterator[tuple[list[int], list[list[torch.Tensor]]]]:
    """Aligned pieces of tensors of equal shapes: (places, the pieces of each list), a block a time.

    Small tensors share a block; large contiguous ones are cut, as views.
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
            for kept, tensor in zip(pieces, piece, strict=True):
                kept.append(tensor)
            filled += piece[0].numel()
    if places:
        yield places, pieces
