"""Models with parallel branches: two towers over text and image, and four branches into a trunk."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, PATCH, TOKENS, WORDS = 64, 48, 12, 97


class Layer(nn.Module):
    """Attention over tokens and a feed-forward part, both with residuals and dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        parts = self.qkv(self.first(x)).view(rows, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts.unbind(0))
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(rows, tokens, width)))
        y: torch.Tensor = x + self.dropout(self.down(torch.relu(self.up(self.second(x)))))
        return y


class TwoTowers(nn.Module):
    """Text and image in towers of their own, joined by a product; the loss tells pairs apart."""

    def __init__(self, layers: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.words, self.patches = nn.Embedding(WORDS, WIDTH), nn.Linear(PATCH, WIDTH)
        self.text = nn.Sequential(*(Layer(WIDTH, dropout) for _ in range(layers)))
        self.image = nn.Sequential(*(Layer(WIDTH, dropout) for _ in range(layers)))
        self.join = nn.Linear(2 * WIDTH, 5)

    def forward(
        self, text: torch.Tensor, image: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        left = self.text(self.words(text)).mean(1)
        right = self.image(self.patches(image)).mean(1)
        joined = self.join(torch.cat([left, right], -1))
        return {"loss": nn.functional.cross_entropy(joined, labels), "logits": joined}


class FourBranches(nn.Module):
    """One input through four branches of layers, summed, and a trunk of one layer."""

    def __init__(self, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH, WIDTH)
        self.branches = nn.ModuleList(
            nn.Sequential(*(Layer(WIDTH, dropout) for _ in range(layers))) for _ in range(4)
        )
        self.trunk, self.head = Layer(WIDTH, dropout), nn.Linear(WIDTH, 5)

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.patches(image)
        x = torch.stack([branch(x) for branch in self.branches]).mean(0)
        logits = self.head(self.trunk(x)).mean(1)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def two_towers(rows: int = 8, layers: int = 4) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model, the same each time, and a batch."""
    torch.manual_seed(0)
    model = TwoTowers(layers).train()
    return model, {
        "text": torch.randint(WORDS, (rows, TOKENS)),
        "image": torch.randn(rows, TOKENS, PATCH),
        "labels": torch.randint(5, (rows,)),
    }


def four_branches(rows: int = 8, layers: int = 2) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model, the same each time, and a batch."""
    torch.manual_seed(0)
    model = FourBranches(layers).train()
    return model, {
        "image": torch.randn(rows, TOKENS, PATCH),
        "labels": torch.randint(5, (rows,)),
    }


MODELS = {"towers": two_towers, "branches": four_branches}
