"""Means over a sharded factor: this rank's part of the global mean (Partial)."""

from __future__ import annotations

from typing import Any

import torch

from fxpart.collectives.communicator import Communicator, Size
from fxpart.collectives.factor_shares import MEAN, SUM, Axes, share

_ATEN = torch.ops.aten


def mean_rows(
    mesh: Communicator,
    axes: Axes | tuple[Axes, ...],
    size: Size | tuple[Size, ...],
    x: torch.Tensor,
    dim: int | list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the local mean times this rank's fraction; large sums would overflow in half
    precision.
    """
    dims = list(range(x.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    dims = dims or list(range(x.dim()))
    part = share(mesh, axes, size)
    if part == 0:
        return x.sum(dims, keepdim, dtype=dtype)
    return x.mean(dims, keepdim, dtype=dtype) * part


def _loss(name: str, overload: str = "default") -> Any:
    """Return the sharded form of a loss with one term per element, or per row."""
    op = getattr(getattr(_ATEN, name), overload)
    arguments = [a.name for a in op._schema.arguments]
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}

    def form(
        mesh: Communicator,
        axes: Axes | tuple[Axes, ...],
        size: Size | tuple[Size, ...],
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the local mean times this rank's fraction; other reductions unchanged."""
        given = defaults | dict(zip(arguments, args, strict=False)) | kwargs
        if given["reduction"] != MEAN:
            found: torch.Tensor = op(**given)
            return found
        part = share(mesh, axes, size)
        if part == 0:
            nothing: torch.Tensor = op(**{**given, "reduction": SUM})
            return nothing
        mean: torch.Tensor = op(**given)
        return mean * part

    form.__name__ = form.__qualname__ = f"{name}_rows"
    form.__doc__ = (
        f"``aten.{name}`` with its factors cut: this mesh rank's part of the mean (Partial)."
    )
    return form


mse_loss_rows = _loss("mse_loss")
l1_loss_rows = _loss("l1_loss")
smooth_l1_loss_rows = _loss("smooth_l1_loss")
huber_loss_rows = _loss("huber_loss")
binary_cross_entropy_rows = _loss("binary_cross_entropy")
binary_cross_entropy_with_logits_rows = _loss("binary_cross_entropy_with_logits")
soft_margin_loss_rows = _loss("soft_margin_loss")
kl_div_rows = _loss("kl_div")
poisson_nll_loss_rows = _loss("poisson_nll_loss")
hinge_embedding_loss_rows = _loss("hinge_embedding_loss")
ctc_loss_rows = _loss("ctc_loss", "Tensor")
