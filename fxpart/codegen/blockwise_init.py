"""Init functions that create a large tensor in blocks of rows, to limit peak memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fxpart.errors import error

Init = Callable[[str, torch.Tensor], torch.Tensor]
Slices = tuple[slice, ...]


class InBlocks:
    """An init function for tables that no rank can store: it is called for blocks of rows.

        weights=InBlocks(lambda name, like: torch.empty_like(like, device="cpu").normal_(0, 0.01))

    Each rank creates only the blocks of its own rows, one at a time. The random generator is seeded
    by the program's seed, the tensor name and the block number, so values do not depend on the
    plan. init: name, a meta tensor of a block's shape (of the whole tensor if it has fewer rows or
    no dims) -> a tensor of that shape.

    folder: on a local disk. Tensors of several blocks are memory-mapped files there, so that a CPU
    rank may train tables larger than its memory; the system writes rows that are not in use to the
    disk. The files have no names and end with the process: save checkpoints. Sparse gradients and
    fxpart.optim.RowWiseAdagrad touch only the rows of a batch.
    """

    def __init__(
        self, init: Init, rows: int = 1 << 16, *, folder: str | Path | None = None
    ) -> None:
        """rows: number of rows per block."""
        if rows < 1:
            raise ValueError(f"rows={rows}: a block needs at least 1 row")
        self.init, self.rows, self.folder = init, rows, folder

    def divides(self, like: torch.Tensor) -> bool:
        """Return whether a whole tensor has several blocks, so that the result is no one else's."""
        return bool(like.dim()) and like.shape[0] > self.rows

    def __call__(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor; the caller seeds the random generator."""
        return self.init(name, like)

    def part(
        self,
        name: str,
        like: torch.Tensor,
        slices: Slices | None,
        seeded: Callable[[int, Callable[[], torch.Tensor]], torch.Tensor],
    ) -> torch.Tensor:
        """Return a tensor, or the part of it that ``slices`` selects.

        like: the whole tensor on the meta device. seeded: calls a function with the generator
        seeded for a block. A function result of the wrong shape is returned unchanged; the caller
        reports it.
        """
        count = like.shape[0] if like.dim() else 0
        if not self.divides(like):
            whole = seeded(0, lambda: self.init(name, like))
            fits = slices is not None and whole.shape == like.shape
            return whole[slices] if fits else whole
        cuts = slices or (slice(None),) * like.dim()
        first, last, _ = cuts[0].indices(count)
        made = self._allocate(name, like[cuts].shape, like.dtype)
        for start in range(first - first % self.rows, last, self.rows):
            stop = min(start + self.rows, count)
            block = like[start:stop]
            found = seeded(start // self.rows, lambda block=block: self.init(name, block))  # type: ignore[misc]
            if found.shape != block.shape or found.is_meta:
                return found
            low, high = max(start, first), min(stop, last)
            made[low - first : high - first] = found[(slice(low - start, high - start), *cuts[1:])]
        return made

    def _allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor, in the folder if there is one. FXP110 if it cannot be there."""
        size = torch.Size(shape).numel()
        if self.folder is None or not size:
            return torch.empty(shape, dtype=dtype)
        try:
            handle, path = tempfile.mkstemp(dir=self.folder, prefix="fxpart-table-")
            try:
                # Reserve the space: a write to a mapping without space ends the process.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(handle, 0, size * dtype.itemsize)
                mapped = torch.from_file(path, shared=True, size=size, dtype=dtype)
            finally:
                os.close(handle)
                os.unlink(path)
        except (OSError, RuntimeError) as cause:
            raise error(
                "FXP110",
                where=f"{name}, memory-mapped in {self.folder}",
                why=f"{type(cause).__name__}: {cause}",
                fix=f"use a folder on a local disk with {size * dtype.itemsize:,} bytes free",
            ) from cause
        return mapped.view(shape)
