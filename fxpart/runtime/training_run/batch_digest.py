"""A digest of a batch, so that the same one is known again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from fxpart.runtime.batch.batch_reader import flatten_batch

_MOST = 1 << 20  # bytes of a tensor that are all looked at
_STRETCHES = 16


def digest_batches(batches: Sequence[Any]) -> str:
    """BLAKE2b of batches: of what is in them (4 bytes in hex), then of all that (8 bytes).

    What: names and dtypes, which say where batches can be compared. All: sizes and numbers too; of
    a tensor above 1 MiB, 16 stretches of 64 KiB each. "" where there is nothing in them.
    """
    found, what = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=4)
    any_ = False
    for batch in batches:
        for path, value in flatten_batch((batch,) if isinstance(batch, torch.Tensor) else batch):
            if value is None:
                continue
            any_ = True
            if isinstance(value, torch.Tensor):
                what.update(f"{path}:{value.dtype}".encode())
                found.update(f"{path}:{value.dtype}{tuple(value.shape)}".encode())
                for stretch in _bytes(value):
                    found.update(stretch)
            else:
                plain = isinstance(value, (bool, int, float, str))
                found.update(f"{path}:{value if plain else type(value).__name__!r}".encode())
    return what.hexdigest() + found.hexdigest() if any_ else ""


def _bytes(tensor: torch.Tensor) -> list[Any]:
    plain = tensor.detach().contiguous().reshape(-1)
    if not plain.numel():
        return []
    raw: torch.Tensor = plain.view(torch.uint8) if plain.dtype != torch.bool else plain
    if raw.numel() <= _MOST:
        return [raw.cpu().numpy()]
    size, step = _MOST // _STRETCHES, raw.numel() // _STRETCHES
    return [raw[at * step : at * step + size].cpu().numpy() for at in range(_STRETCHES)]
