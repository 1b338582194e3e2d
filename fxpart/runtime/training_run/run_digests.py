"""Digests in a run's ledger: of batches, and of all that losses depend on bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fxpart.runtime.batch.batch_inputs import flatten_batch

if TYPE_CHECKING:
    from fxpart.runtime.fit import FitLoop

_MOST = 1 << 20  # bytes of a tensor up to which all of it is hashed
_STRETCHES = 16


@dataclass(frozen=True)
class CompletedUpdate:
    """One update for the ledger: its batches of the epoch, and their digest."""

    step: int
    epoch: int
    first: int
    batches: int
    rows: int
    digest: str


def digest_determinants(fit: FitLoop) -> str:
    """Return a digest of all that losses depend on bit by bit, or "" if they may vary."""
    trainer = fit.trainer
    if not trainer.repeats:
        return ""
    kinds = sorted({device.type for device in trainer.parts.devices.values()})
    exact = kinds == ["cpu"] or torch.are_deterministic_algorithms_enabled()
    text = (
        f"{trainer.plan_text} {fit.transport.ranks} {len(fit.transport.local)} "
        f"{trainer.options.describe()} {torch.__version__} {torch.get_num_threads()} {kinds} "
        f"{fit.run.describe()}"
    )
    return digest_text(text) if exact else ""


def digest_text(text: str) -> str:
    """Return the digest of a text, or "" for an empty one."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest() if text else ""


def digest_batches(batches: Sequence[Any]) -> str:
    """Return BLAKE2b digests of batches: of names and dtypes (4 bytes, hex), then of all (8 bytes).

    The first tells whether two batches are comparable. The second includes shapes and values; of a
    tensor above 1 MiB, 16 stretches of 64 KiB each. Return "" for empty batches.
    """
    content, structure = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=4)
    has_values = False
    for batch in batches:
        for path, value in flatten_batch((batch,) if isinstance(batch, torch.Tensor) else batch):
            if value is None:
                continue
            has_values = True
            if isinstance(value, torch.Tensor):
                structure.update(f"{path}:{value.dtype}".encode())
                content.update(f"{path}:{value.dtype}{tuple(value.shape)}".encode())
                for stretch in _bytes(value):
                    content.update(stretch)
            else:
                is_plain = isinstance(value, (bool, int, float, str))
                content.update(f"{path}:{value if is_plain else type(value).__name__!r}".encode())
    return structure.hexdigest() + content.hexdigest() if has_values else ""


def _bytes(tensor: torch.Tensor) -> list[Any]:
    is_plain = tensor.detach().contiguous().reshape(-1)
    if not is_plain.numel():
        return []
    raw: torch.Tensor = is_plain.view(torch.uint8) if is_plain.dtype != torch.bool else is_plain
    if raw.numel() <= _MOST:
        return [raw.cpu().numpy()]
    size, step = _MOST // _STRETCHES, raw.numel() // _STRETCHES
    return [raw[at * step : at * step + size].cpu().numpy() for at in range(_STRETCHES)]
