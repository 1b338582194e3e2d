"""Init functions that make a tensor some rows at a time, so that nobody has to hold all of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

Init = Callable[[str, torch.Tensor], torch.Tensor]
Slices = tuple[slice, ...]


class InBlocks:
    """An init function for tables that no rank can hold: it is called for blocks of rows.

        weights=InBlocks(lambda name, like: torch.empty_like(like, device="cpu").normal_(0, 0.01))

    Each rank has the function make the blocks of its own rows alone, one at a time. Random numbers
    are seeded by the program's seed, the name and the number of the block, so that they depend on
    no plan. init: name, a meta tensor of a block's shape (of the whole for a tensor of fewer rows,
    or without dims) -> a tensor of that shape.
    """

    def __init__(self, init: Init, rows: int = 1 << 16) -> None:
        """rows: of a block."""
        if rows < 1:
            raise ValueError(f"rows={rows}: a block has 1 or more")
        self.init, self.rows = init, rows

    def __call__(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """All of a tensor, whose random numbers the caller seeds."""
        return self.init(name, like)

    def part(
        self,
        name: str,
        like: torch.Tensor,
        slices: Slices | None,
        seeded: Callable[[int, Callable[[], torch.Tensor]], torch.Tensor],
    ) -> torch.Tensor:
        """A tensor, or the part that ``slices`` take of it.

        like: whole, on the meta device. seeded: calls a function with the generator seeded for a
        block. What the function returns in another shape is given back: the caller says so.
        """
        count = like.shape[0] if like.dim() else 0
        if count <= self.rows:
            whole = seeded(0, lambda: self.init(name, like))
            fits = slices is not None and whole.shape == like.shape
            return whole[slices] if fits else whole
        cuts = slices or (slice(None),) * like.dim()
        first, last, _ = cuts[0].indices(count)
        made = torch.empty(like[cuts].shape, dtype=like.dtype)
        for start in range(first - first % self.rows, last, self.rows):
            stop = min(start + self.rows, count)
            block = like[start:stop]
            found = seeded(start // self.rows, lambda block=block: self.init(name, block))  # type: ignore[misc]
            if found.shape != block.shape or found.is_meta:
                return found
            low, high = max(start, first), min(stop, last)
            made[low - first : high - first] = found[(slice(low - start, high - start), *cuts[1:])]
        return made
