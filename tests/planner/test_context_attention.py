"""Context parallelism of models whose attention reads views, broadcast keys, or position tables."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpart
from fxpart import FxpartError, Program
from fxpart.verification.comparison import verify

pytestmark = pytest.mark.slow


def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over all targets."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


class Strided(nn.Module):
    """Attention whose inputs are strided views, with keys and values of so many heads."""

    def __init__(self, keys: int, values: int, batch: bool) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.inner = nn.ModuleList(nn.Linear(16, 2 * heads) for heads in (8, keys, values))
        self.heads, self.batch = (8, keys, values), batch

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        query, key, value = (
            layer(x).view(*ids.shape, 2, heads).permute(0, 3, 1, 2)
            for layer, heads in zip(self.inner, self.heads, strict=True)
        )
        key = key if self.batch else key[:1]
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(x + found.transpose(1, 2).flatten(2))


def strided(keys: int = 8, values: int = 8, batch: bool = True) -> Program:
    """The module over two ranks that share sequences."""
    torch.manual_seed(0)
    ids = torch.randint(4, 31, (4, 16))
    return fxpart.compile(
        Strided(keys, values, batch), "local:2", example_inputs=(ids, ids.roll(-1, 1)), loss=loss,
        constraints={"mesh": "cp=2", "stages": 1}, optimizer="sgd",
    )  # fmt: skip


@pytest.mark.parametrize("heads", [8, 1])
def test_strided_queries_keys_and_values(heads: int) -> None:
    """Fused kernels read rows as if their elements were next to each other."""
    found = verify(strided(heads, heads), steps=2)
    assert found.passed and found.largest <= 1e-6


@pytest.mark.parametrize(("keys", "values", "batch"), [(1, 8, True), (8, 1, True), (8, 8, False)])
def test_keys_that_are_broadcast_otherwise(keys: int, values: int, batch: bool) -> None:
    with pytest.raises(FxpartError, match="FXP105") as caught:
        strided(keys, values, batch)
    assert "cannot shard the queries of scaled_dot_product_attention" in str(caught.value)


class Positioned(nn.Module):
    """Causal attention over embeddings and the first rows of a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(20, 16), nn.Parameter(torch.randn(8, 16))
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids) + self.places[: ids.shape[1]]
        query, key, value = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.head(hidden + mixed.transpose(1, 2).flatten(2))
        return out


def test_a_table_of_positions_of_the_full_length() -> None:
    torch.manual_seed(0)
    ids = torch.randint(20, (4, 8))
    program = fxpart.compile(
        Positioned(), "local:2", example_inputs=(ids, ids),
        loss=loss, constraints={"mesh": "cp=2", "stages": 1},
    )  # fmt: skip
    assert verify(program, steps=2).passed
    trainer = program.trainer("sgd")
    trainer.step((ids[:, :4], ids[:, :4]))
    trainer.close()
