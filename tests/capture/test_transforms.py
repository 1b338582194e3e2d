"""torch.vmap in a model is refused with its line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fxpart


class Mapped(nn.Module):
    def __init__(self, mapped: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.weights = nn.Parameter(torch.randn(3, 5, 5))
        self.mapped = mapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mapped(self.first(x), self.weights)


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "weights": lambda h, w: torch.vmap(lambda each: h @ each)(w).mean(0),
    "rows": lambda h, w: torch.vmap(lambda row: row @ w[0])(h),
    "nested": lambda h, w: torch.vmap(lambda e: torch.vmap(lambda r: r @ e)(h))(w).mean(0),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_vmap_is_refused(way: str) -> None:
    batch = torch.randn(8, 4), torch.randn(8, 5)
    with pytest.raises(fxpart.FxpartError, match="vmap") as refused:
        fxpart.compile(
            Mapped(WAYS[way]), "local:1", example_inputs=batch, loss=nn.functional.mse_loss,
            microbatches=1,
        )  # fmt: skip
    assert refused.value.code == "FXP108"
    assert "test_transforms.py" in str(refused.value)
