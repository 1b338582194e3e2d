"""Whether the rows along a dim are independent of each other, asked of the model's own numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fxpart.capture.modes import kept_buffers, training_mode
from fxpart.capture.trial import REAL_LIMIT, Trial


def batch_first_is_off(module: nn.Module) -> bool:
    """Whether a recurrent layer inside takes [length, batch, ...], torch's default for these.

    Attention and transformer layers are left out: models that use them with batch_first=False
    usually transpose inside, and keep the batch in front outside.
    """
    return any(
        isinstance(m, (nn.RNNBase, nn.Transformer)) and not m.batch_first for m in module.modules()
    )


def rows_are_independent(
    trial: Trial,
    tensors: Sequence[torch.Tensor],
    dims: Sequence[int | None],
    outputs: Mapping[str, int | None],
) -> bool | None:
    """Replace row 0 of every input by row 1 and see whether any other row of the outputs changes.

    In evaluation mode, with data. None where it cannot be said: no data, one row, a model of more
    than 2e8 parameters, or no output with rows.
    """
    whole = trial.whole
    sizes = {t.shape[d] for t, d in zip(tensors, dims, strict=True) if d is not None}
    rows = [name for name, dim in outputs.items() if dim is not None]
    small = sum(p.numel() for p in whole.parameters()) <= REAL_LIMIT
    if trial.mode is not None or not small or not rows or min(sizes, default=0) < 2:
        return None
    changed = tuple(_copied_row(t, d) for t, d in zip(tensors, dims, strict=True))
    with training_mode(whole, False), kept_buffers(whole), torch.no_grad():
        before, after = whole(tuple(tensors)), whole(changed)
    for name in rows:
        dim = outputs[name]
        assert dim is not None
        length = before[name].shape[dim] - 1
        first, second = (t.narrow(dim, 1, length) for t in (before[name], after[name]))
        if not torch.allclose(first, second, rtol=1e-5, atol=1e-6, equal_nan=True):
            return False
    return True


def _copied_row(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    if dim is None:
        return tensor
    copy = tensor.detach().clone()
    copy.select(dim, 0).copy_(tensor.select(dim, 1))
    return copy
