"""A UNet that finds disks in noise, as a pipeline whose skip connections cross the stages.

``python examples/unet.py`` runs three stages in one process; ``torchrun --nproc-per-node 3
examples/unet.py`` each in its own. The planner sends each skip connection to the stage that reads
it. The loop is that of plain PyTorch: ``trainer.step`` takes the place of forward, backward and
update. ``notebooks/unet.ipynb`` is the same script.
"""

# %% [markdown]
# # A UNet as a pipeline
#
# A UNet finds disks in noise. Its skip connections cross the pipeline stages: the planner sends
# each one to the stage that reads it. The model is plain PyTorch.

# %%
from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import fxpart

SIZE, BATCH = 32, 16


# %%
class Convolutions(nn.Sequential):
    """Two convolutions with norms that do not couple the rows of a batch."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU(),
            nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Three levels down, three up; each level up also reads the same level of the way down."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(map(Convolutions, [1, *widths[:-1]], widths))
        self.bottom = Convolutions(widths[-1], 8 * width)
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(2 * each, each, 2, stride=2) for each in reversed(widths)
        )
        self.up = nn.ModuleList(Convolutions(2 * each, each) for each in reversed(widths))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of the pixels; images: [rows, 1, height, width]."""
        x, skips = images, []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, level, skip in zip(self.grow, self.up, reversed(skips), strict=True):
            x = level(torch.cat([skip, grow(x)], dim=1))
        return self.head(x)


# %% [markdown]
# ## Data and a metric
#
# Images of disks in noise, and the share of pixels that were found.


# %%
def make_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy images of disks, and their masks."""
    draw = torch.Generator().manual_seed(number)
    centers = torch.randint(8, SIZE - 8, (BATCH, 2, 1, 1), generator=draw)
    radii = torch.randint(3, 8, (BATCH, 1, 1), generator=draw)
    grid = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij"))
    masks = ((grid - centers).square().sum(1) <= radii.square()).float()[:, None]
    return masks + 0.7 * torch.randn(BATCH, 1, SIZE, SIZE, generator=draw), masks


def overlap(logits: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> float:
    """Return the intersection of the found and the true pixels over their union."""
    found, true = logits > 0, batch[-1] > 0
    return float((found & true).sum() / (found | true).sum())


# %% [markdown]
# ## Plan and train
#
# `compile` captures the model, chooses the stages and generates a program for each rank. The loop
# stays; `trainer.step` takes the place of forward, backward and update.


# %%
def main(steps: int) -> tuple[list[float], dict[str, float]]:
    """Train; return the losses, and loss and overlap of new images."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # The ranks share the cores.
    program = fxpart.compile(
        UNet(), "local:3", example_inputs=make_batch(0),
        loss=F.binary_cross_entropy_with_logits, microbatches=4,
        constraints={"mesh": "none", "stages": 3},
    )  # fmt: skip
    print(program)
    trainer = program.trainer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    losses = []
    for step in range(steps):
        losses.append(float(trainer.step(make_batch(step))))
        if (step + 1) % 20 == 0 and trainer.rank == 0:
            print(f"step {step + 1:3}  loss {losses[-1]:.4f}")
    new = [make_batch(number) for number in range(10_000, 10_004)]
    found = trainer.evaluate(new, {"overlap": overlap})
    if trainer.rank == 0:
        print(f"new images: loss {found['loss']:.4f}, overlap {found['overlap']:.3f}")
    return losses, found


# %%
# In a notebook: losses, found = main(80)
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    main(parser.parse_args().steps)
