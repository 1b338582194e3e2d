"""Models, and what each rank does with torch's schedules on fxpart's stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fxpart

ROWS = 8


class Language(nn.Module):
    """Blocks with dropout; a mask that all of them use; head and embedding are one weight."""

    def __init__(self, width: int = 16, words: int = 24, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(
        self, ids: torch.Tensor, keep: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        x, mask = self.embed(ids), keep[:, :, None] < 0.5
        for block in self.blocks:
            x = x + self.dropout(torch.tanh(block(x)).masked_fill(mask, 0.0))
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return {"loss": loss}


class Vision(nn.Module):
    """Convolutions, batch norms, residual connections."""

    def __init__(self, width: int = 6, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.stem(images)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(x + norm(conv(x)))
        return {"loss": nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)}


def batch(kind: str, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if kind == "vision":
        images = torch.randn(ROWS, 3, 6, 6, generator=generator)
        return {"images": images, "labels": torch.randint(0, 5, (ROWS,), generator=generator)}
    ids = torch.randint(0, 24, (ROWS, 6), generator=generator)
    keep = torch.ones(ROWS, 6)
    keep[::2, 4:] = 0.0
    return {"ids": ids, "keep": keep, "labels": ids.flip(1)}


def program(kind: str, stages: int, microbatches: int = 4) -> fxpart.Program:
    torch.manual_seed(3)
    model = Vision() if kind == "vision" else Language()
    return fxpart.compile(
        model,
        f"local:{stages}",
        example_kwargs=batch(kind),
        microbatches=microbatches,
        constraints={"mesh": "none", "stages": stages},
        batch_coupling="per-microbatch" if kind == "vision" else None,
    )


Answer = tuple[list[float], dict[str, list[float]], dict[str, list[float]]]


def torchs(kind: str, stages: int, ranks: list[int], schedules: list[str]) -> list[Answer]:
    """Two steps of each of torch's schedules: losses, gradients of the last, buffers."""
    made = program(kind, stages)
    return [_torchs(made, kind, ranks, schedule) for schedule in schedules]


def _torchs(made: fxpart.Program, kind: str, ranks: list[int], schedule: str) -> Answer:
    from torch.distributed import pipelining

    own = made.to_pipeline_stages(ranks=ranks)
    single = len(set(ranks)) == len(ranks)
    run: Any = getattr(pipelining, schedule)(own[0] if single else own[:], **own.options)
    optimizer = torch.optim.SGD([p for _, p in own.named_parameters()], lr=0.1)
    losses = []
    for seed in range(2):
        optimizer.zero_grad()
        parts: list[torch.Tensor] = []
        run.step(**own.feed(batch(kind, seed)), losses=parts)
        own.share_gradients()
        optimizer.step()
        if parts:
            losses.append(float(torch.stack(parts).detach().mean()))
    gradients = {n: flat(p.grad) for n, p in own.named_parameters() if p.grad is not None}
    return losses, gradients, buffers(made.spec, own._modules)


def buffers(spec: Any, modules: dict[int, nn.Module]) -> dict[str, list[float]]:
    return {
        state.name: flat(getattr(module, state.attribute))
        for index, module in modules.items()
        for state in spec.stages[index].state
        if state.kind == "buffer"
    }


def flat(tensor: torch.Tensor) -> list[float]:
    return tensor.detach().double().flatten().tolist()


def fxparts(kind: str, stages: int) -> Answer:
    """The same two steps of fxpart's own trainer, in this process."""
    made = program(kind, stages)
    trainer = made.trainer(lambda p: torch.optim.SGD(p, lr=0.1))
    losses = [float(trainer.step(batch(kind, seed))) for seed in range(2)]
    gradients = {n: flat(g) for n, g in trainer.gradients().items()}
    found = {n: flat(t) for n, t in trainer.state_dict().items() if n not in gradients}
    trainer.close()
    return losses, gradients, found
