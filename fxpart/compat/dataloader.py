"""What a DataLoader's iterator does not say in public."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, dataloader


def skip_batches(batches: Iterator[Any], count: int) -> int | None:
    """Pass over a DataLoader's next ``count`` batches without loading them; how many there were.

    None where that cannot be: only a process that loads by itself from a data set by index can,
    whose iterator's ``_next_index`` gives the indices of the next batch. Workers have begun to
    load, and their random numbers with them.
    """
    kind = getattr(dataloader, "_SingleProcessDataLoaderIter", None)
    if kind is None or not isinstance(batches, kind) or not hasattr(batches, "_next_index"):
        return None
    if isinstance(getattr(batches, "_dataset", None), IterableDataset):
        return None
    for done in range(count):
        try:
            batches._next_index()
        except StopIteration:
            return done
    return count
