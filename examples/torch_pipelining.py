"""fxpart's split under torch.distributed.pipelining's own schedule.

    torchrun --nproc-per-node 2 examples/torch_pipelining.py

The model is never whole: each rank draws the weights of its own stage by an init function, which
gives the same numbers whatever the plan is. Torch's Schedule1F1B runs the stages; the embedding,
which is the head on the last one, is kept one weight by ``share_gradients``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import fxpart

WORDS, WIDTH, LENGTH, ROWS = 64, 256, 32, 32


class Language(nn.Module):
    """The next word from this one; the embedding is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss."""
        x = self.words(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        scores = self.head(x)
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


def batch(step: int) -> dict[str, torch.Tensor]:
    """Counting on from a random word: what comes next can be learnt."""
    start = torch.randint(0, WORDS, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    ids = (start + torch.arange(LENGTH + 1)) % WORDS
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def init(name: str, meta: torch.Tensor) -> torch.Tensor:
    """Any rank that needs this name draws the same numbers, whatever the plan is."""
    if name.endswith("bias"):
        return torch.zeros(meta.shape)
    return torch.randn(meta.shape) * 0.05


def main(steps: int = 20) -> None:
    """Train and print the loss on the rank that has it."""
    with torch.device("meta"):
        model = Language()
    program = fxpart.compile(
        model,
        "local:2",
        example_kwargs=batch(0),
        microbatches=4,
        constraints={"mesh": "none", "stages": 2},
    )
    stages = program.to_pipeline_stages(weights=init)
    schedule = Schedule1F1B(stages[0], **stages.options)
    optimizer = torch.optim.AdamW([p for _, p in stages.named_parameters()], lr=1e-3)
    for step in range(steps):
        losses: list[torch.Tensor] = []
        schedule.step(**stages.feed(batch(step)), losses=losses)
        stages.share_gradients()
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print(f"step {step:>3}  loss {torch.stack(losses).mean():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
