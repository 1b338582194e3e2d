"""Global batches from loaders that are written for one rank's rows.

Data-parallel tools give each of ``count`` ranks its own batch of a loader. A plan decides which
rank computes which rows, so each rank reads all of them: ``count`` successive batches as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from fxpart.errors import error

_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator",
    "multiprocessing_context", "prefetch_factor", "persistent_workers", "in_order",
)  # fmt: skip


class MergedBatchSampler(BatchSampler):
    """Indices of ``count`` successive batches of another batch sampler as one batch."""

    def __init__(self, batch_sampler: Any, count: int) -> None:
        """batch_sampler: its last merged batch may have fewer of its batches."""
        self.inner, self.count = batch_sampler, count
        self.sampler: Any = getattr(batch_sampler, "sampler", None)
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.batch_size = int(getattr(batch_sampler, "batch_size", None) or 1) * count

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the merged batches."""
        merged: list[int] = []
        for index, batch in enumerate(self.inner, 1):
            merged += batch
            if index % self.count == 0:
                yield merged
                merged = []
        if merged and not self.drop_last:
            yield merged

    def __len__(self) -> int:
        """Return the number of merged batches."""
        whole, rest = divmod(len(self.inner), self.count)
        return whole + bool(rest and not self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to a sampler that shuffles by it."""
        for each in (self.inner, self.sampler):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)


def merge_batches(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """Return a loader whose batches have the rows of ``count`` batches of ``loader``.

    No rows are repeated: the last batch has fewer. FXP109 for a loader without automatic batches.
    """
    options = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    options["worker_init_fn"] = _same_on_all_ranks(loader.worker_init_fn)
    if count == 1:
        loader.worker_init_fn = options["worker_init_fn"]
        return loader
    if isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None:
        size, last = loader.batch_size * count, loader.drop_last
        return DataLoader(loader.dataset, batch_size=size, drop_last=last, **options)
    inner = loader.batch_sampler
    if inner is None or isinstance(loader.dataset, IterableDataset):
        raise error(
            "FXP109",
            where="DataLoader(batch_size=None)",
            why=f"the batches of {count} ranks cannot be combined into the global batch, because "
            "the loader does not form the batches",
            fix="pass batch_size= or batch_sampler= to the DataLoader",
        )
    if type(inner) is BatchSampler:
        sampler = BatchSampler(inner.sampler, inner.batch_size * count, inner.drop_last)
        return DataLoader(loader.dataset, batch_sampler=sampler, **options)
    return DataLoader(loader.dataset, batch_sampler=MergedBatchSampler(inner, count), **options)


def _same_on_all_ranks(worker_init: Any) -> Any:
    """Return a worker's initialization that seeds all ranks alike: transformers' has ``rank``."""
    if isinstance(worker_init, partial) and worker_init.keywords.get("rank"):
        return partial(worker_init.func, *worker_init.args, **{**worker_init.keywords, "rank": 0})
    return worker_init
