"""Check by running the model whether a batch can be split along the inferred dims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from fxpart.capture.context_managers import REAL_LIMIT, preserve_buffers, training_mode
from fxpart.capture.shape_probe import ShapeProbe


def batch_first_is_off(module: nn.Module) -> bool:
    """Return whether a recurrent layer takes [length, batch, ...], torch's default for them.

    Attention layers do not count: models that use them with batch_first=False usually transpose
    inside and keep the batch in dim 0 outside.
    """
    return any(
        isinstance(m, (nn.RNNBase, nn.Transformer)) and not m.batch_first for m in module.modules()
    )


def is_batch_independent(
    trial: ShapeProbe,
    tensors: Sequence[torch.Tensor],
    dims: Sequence[int | None],
    outputs: Mapping[str, int | None],
) -> bool | None:
    """Return whether each half of the batch gives that half of the outputs, in evaluation mode.

    Return None if unknown: no data, one row, more than 2e8 parameters, no output with rows, or
    random results even in evaluation mode. A model that fails on a half cannot be split.
    """
    whole = trial.whole
    sizes = {t.shape[d] for t, d in zip(tensors, dims, strict=True) if d is not None}
    rows = {name: dim for name, dim in outputs.items() if dim is not None}
    small = sum(p.numel() for p in whole.parameters()) <= REAL_LIMIT
    if trial.mode is not None or not small or not rows or min(sizes, default=0) < 2:
        return None
    half = min(sizes) // 2

    def run(batch: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        with trial.state.unchanged():
            return whole(tuple(batch))  # type: ignore[no-any-return]

    with training_mode(whole, False), preserve_buffers(whole), torch.no_grad():
        together = run(t.clone() for t in tensors)
        again = run(t.clone() for t in tensors)
        if not all(_close(again[name], together[name]) for name in rows):
            return None
        for start, length in ((0, half), (half, min(sizes) - half)):
            try:
                part = run(_cut(t, d, start, length) for t, d in _pairs(tensors, dims))
            except Exception:  # the user's module may raise anything
                return False
            for name, dim in rows.items():
                share = together[name].shape[dim] // min(sizes)
                wanted = together[name].narrow(dim, start * share, length * share)
                if not _close(part[name], wanted):
                    return False
    return True


def _pairs(
    tensors: Sequence[torch.Tensor], dims: Sequence[int | None]
) -> list[tuple[torch.Tensor, int | None]]:
    return list(zip(tensors, dims, strict=True))


def _cut(tensor: torch.Tensor, dim: int | None, start: int, length: int) -> torch.Tensor:
    cut = tensor if dim is None else tensor.narrow(dim, start, length)
    return cut.clone()


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = float(b.abs().max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4 * scale, equal_nan=True)
