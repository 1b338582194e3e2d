"""Local forms of lookups whose indices count from the first row of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxpart.collectives.communicator import Communicator, Size
from fxpart.collectives.factor_shares import Axes, span


def index_own_rows(
    mesh: Communicator,
    axes: Axes,
    size: Size,
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """``aten.index`` where the first index is this lane's part of an arange over a dim of ``x``.

    That dim is cut in the same way, so each lane looks up rows of its own; nothing travels.
    """
    start, _ = span(mesh, axes, size)
    here = list(indices)
    first = next(i for i, index in enumerate(here) if index is not None)
    index = here[first]
    assert index is not None, "the first index that is given"
    here[first] = index - start  # type: ignore[operator]
    found: torch.Tensor = torch.ops.aten.index.Tensor(x, here)
    return found
