"""Local forms of lookups whose indices count from the first global row."""

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
    """Run ``aten.index`` if the first index is this rank's shard of an arange over a dim of ``x``.

    That dim is sharded in the same way, so each rank looks up its own rows without communication.
    """
    start, _ = span(mesh, axes, size)
    here = list(indices)
    first = next(i for i, index in enumerate(here) if index is not None)
    index = here[first]
    assert index is not None, "an index is not None"
    here[first] = index - start  # type: ignore[operator]
    found: torch.Tensor = torch.ops.aten.index.Tensor(x, here)
    return found
