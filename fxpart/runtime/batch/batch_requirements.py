"""The inputs that a rank needs of each batch, and a sampler that loads only its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpart.errors import error
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.batch.mesh_rank_batch import (
    BatchSlicer,
    count_row_parts,
    get_global_inputs,
    get_row_multiple,
)
from fxpart.runtime.mesh.mesh_ranks import MeshRank

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class BatchRequirements:
    """The inputs and rows that this process needs; ``step`` accepts a batch of only these.

    names: the inputs that its stages take. paths: their paths in the batch. multiple: the row count
    of a batch must be a multiple of it.
    """

    names: frozenset[str]
    paths: tuple[Path, ...]
    multiple: int
    _spec: ProgramSpec
    _readers: tuple[BatchSlicer, ...]
    _microbatches: int

    @classmethod
    def of(
        cls, mesh_ranks: Sequence[MeshRank], names: frozenset[str], microbatches: int
    ) -> BatchRequirements:
        """Return the requirements of this process's mesh ranks."""
        spec = mesh_ranks[0].spec
        readers = tuple(BatchSlicer(mesh_rank.spec, mesh_rank.index) for mesh_rank in mesh_ranks)
        paths = tuple(i.path for i in get_global_inputs(spec) if i.name in names)
        return cls(names, paths, get_row_multiple(spec), spec, readers, microbatches)

    def rows(self, count: int) -> list[int]:
        """Return which of a global batch's ``count`` rows these are, in the order for
        ``local=True``.

        The mesh ranks share the rows of each microbatch. Returns all rows if no input is sharded.
        FXP105 if ``count`` rows cannot be divided.
        """
        parts = count_row_parts(self._spec)
        cut = [i for i in get_global_inputs(self._spec) if parts[i.name] > 1]
        if not cut:
            return list(range(count))
        if count % self.multiple or not count:
            raise error(
                "FXP105", where=f"a batch of {count} rows",
                why=f"{self.multiple} ranks take equal parts of each microbatch",
                fix=f"pass a multiple of {self.multiple} rows",
            )  # fmt: skip
        entry = cut[0].shape[cut[0].batch_dim or 0]
        if isinstance(entry, int):
            sizes = [entry] * (count // entry)
        else:
            units = count // self.multiple
            pieces = min(self._microbatches, units)
            small, more = divmod(units, pieces)
            sizes = [(small + (i < more)) * self.multiple for i in range(pieces)]
        found: dict[int, None] = {}
        for reader in self._readers:
            start = 0
            for size in sizes:
                mine = reader.rows(cut[0].name, size) + start
                found.update(dict.fromkeys(mine.tolist()))
                start += size
        return list(found)

    def select(self, batch: Any) -> Any:
        """Return the batch with None in place of inputs that are not needed."""
        return self._select(batch, ())

    def _select(self, value: Any, path: Path) -> Any:
        if path in self.paths:
            return value
        if isinstance(value, Mapping):
            return {key: self._select(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, (tuple, list)):
            return tuple(self._select(inner, (*path, at)) for at, inner in enumerate(value))
        bare = isinstance(value, torch.Tensor) and path == () and (0,) not in self.paths
        return None if bare or (path and isinstance(value, torch.Tensor)) else value

    def sampler(
        self, size: int, batch_size: int, *, shuffle: bool = False, seed: int = 0
    ) -> BatchRowSampler:
        """Return a ``batch_sampler`` for a DataLoader with the rows that this rank needs.

        size: samples of the data set. batch_size: rows of the global batch. A smaller last batch
        keeps as many rows as the ranks can divide. Pass these batches to steps with ``local=True``.
        """
        return BatchRowSampler(self, size, batch_size, shuffle, seed)


class BatchRowSampler:
    """Indices into a data set, one list per global batch; all ranks shuffle alike.

    epoch: set it before each pass over the data for another order.
    """

    def __init__(
        self, requirements: BatchRequirements, size: int, batch_size: int, shuffle: bool, seed: int
    ) -> None:
        """Build the sampler; see :meth:`BatchRequirements.sampler`.

        FXP109 if the ranks cannot divide ``batch_size``.
        """
        if batch_size < 1 or batch_size % requirements.multiple:
            raise error(
                "FXP109", where=f"batch_size={batch_size}",
                why=f"{requirements.multiple} ranks take equal parts of each batch",
                fix=f"use a multiple of {requirements.multiple}",
            )  # fmt: skip
        self.epoch = 0
        self._requirements, self._size, self._batch = requirements, size, batch_size
        self._shuffle, self._seed = shuffle, seed
        self._rows: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """Return the number of batches."""
        return self._size // self._batch + bool(self._count_last_rows())

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's indices of each batch."""
        order = torch.arange(self._size)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(self._size, generator=generator)
        for start in range(0, len(self) * self._batch, self._batch):
            whole = start + self._batch <= self._size
            count = self._batch if whole else self._count_last_rows()
            if count not in self._rows:
                self._rows[count] = self._requirements.rows(count)
            yield [int(order[start + row]) for row in self._rows[count]]

    def _count_last_rows(self) -> int:
        """Return the rows of the smaller last batch."""
        left = self._size % self._batch
        return left - left % self._requirements.multiple
