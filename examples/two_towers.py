"""Text and image in towers of their own, side by side: the stages of a plan need not be a chain.

Stages of one tower do not wait for those of the other, so that no microbatch passes all four in a
row: the pipeline fills sooner, and fewer microbatches are in flight. ``python
examples/two_towers.py`` runs the four ranks in one process, ``torchrun --nproc-per-node 4`` each in
its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

import fxpart

WIDTH, TOKENS, WORDS, PATCH, LAYERS = 64, 16, 256, 48, 4


class Layer(nn.Module):
    """Tokens are mixed, then channels (Tolstikhin et al., MLP-Mixer, 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Sequential(nn.Linear(TOKENS, 64), nn.GELU(), nn.Linear(64, TOKENS))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From and to [rows, TOKENS, WIDTH]."""
        x = x + self.tokens(self.first(x).mT).mT
        y: torch.Tensor = x + self.channels(self.second(x))
        return y


class TwoTowers(nn.Module):
    """Tells which text belongs to which image of a batch by the product of their vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.patches = nn.Embedding(WORDS, WIDTH), nn.Linear(PATCH, WIDTH)
        self.text = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.image = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.same = nn.Linear(WIDTH, 1)

    def forward(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """From [rows, TOKENS] and [rows, TOKENS, PATCH] to a logit a row."""
        left = self.text(self.words(text)).mean(1)
        right = self.image(self.patches(image)).mean(1)
        logits: torch.Tensor = self.same(left * right).squeeze(-1)
        return logits


def model() -> TwoTowers:
    """Random weights from a fixed seed."""
    torch.manual_seed(0)
    return TwoTowers()


def batches(steps: int, rows: int = 16) -> Iterator[tuple[torch.Tensor, ...]]:
    """Texts, images, and whether both are of the same of eight kinds."""
    random = torch.Generator().manual_seed(1)
    patterns = torch.randn(8, TOKENS, PATCH, generator=random)
    for _ in range(steps):
        kind = torch.randint(8, (rows,), generator=random)
        same = torch.randint(2, (rows,), generator=random)
        other = torch.where(same > 0, kind, (kind + 1) % 8)
        text = 32 * kind[:, None] + torch.randint(32, (rows, TOKENS), generator=random)
        yield text, patterns[other], same.float()


def program() -> fxpart.Program:
    """Four ranks, planned from one batch."""
    return fxpart.compile(
        model(),
        "local:4",
        example_inputs=next(batches(1)),
        loss=nn.functional.binary_cross_entropy_with_logits,
        microbatches=4,
        constraints={"stages": 4},
    )


def main(steps: int = 30) -> list[float]:
    """Plan, say which stages feed which, train."""
    made = program()
    trainer = made.trainer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    if trainer.rank == 0:
        for source, target, _ in made.plan.stage_edges:
            names = [made.plan.stages[k].label for k in (source, target)]
            print(f"stage {source} feeds stage {target}: {names[0]} -> {names[1]}")
    losses = []
    for step, batch in enumerate(batches(steps)):
        losses.append(trainer.step(batch).item())
        if trainer.rank == 0:
            print(f"step {step:2d}  loss {losses[-1]:.4f}", flush=True)
    trainer.close()
    return losses


if __name__ == "__main__":
    main()
