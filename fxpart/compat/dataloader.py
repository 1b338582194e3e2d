"""Private state of a DataLoader's iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, dataloader


def skip_batches(batches: Iterator[Any], count: int) -> int | None:
    """Skip a DataLoader's next ``count`` batches without loading them; return the number skipped.

    Return None if impossible: this works only for a single-process loader of a map-style dataset,
    whose iterator's ``_next_index`` returns the indices of the next batch. Workers have already
    started loading and drawing random numbers.
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
