"""Asynchronous training: what stale weights do to the loss, and how prediction repairs it.

``python examples/asynchronous.py`` runs all ranks in one process; ``torchrun --nproc-per-node 4
examples/asynchronous.py`` each in its own. ``notebooks/asynchronous.ipynb`` is the same script.
"""

# %% [markdown]
# # Asynchronous pipelines
#
# A synchronous pipeline waits for the last backward of each batch before it updates. An
# asynchronous one starts the next batch at once, so that an early stage computes with weights that
# miss some updates. This notebook emulates how much that costs, then trains with real ranks.

# %%
from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

import fxpart
from fxpart.emulator import Emulator

WIDTH, STAGES, ROWS = 16, 4, 32
sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)

# %% [markdown]
# ## A model and its data
#
# Residual layers learn which of four products of the inputs is the largest. The data is drawn from
# a fixed seed.


# %%
class Residual(nn.Module):
    """A layer with a norm and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with the layer's change; both [rows, width]."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def make_model() -> nn.Module:
    """Return the model with random weights from a fixed seed."""
    torch.manual_seed(0)
    layers = [Residual() for _ in range(8)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 4))


def make_batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs and the number of the largest product."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(ROWS, WIDTH, generator=draw)
        yield x, (x[:, :4] * x[:, 4:8]).argmax(1)


def workload() -> fxpart.Workload:
    """Return the target of ``fxpart emulate examples/asynchronous.py:workload``."""
    return fxpart.Workload(
        make_model(), next(make_batches(1)), nn.functional.cross_entropy,
        data=partial(make_batches, 50),
    )  # fmt: skip


# %% [markdown]
# ## Emulate
#
# The emulator trains the stages in one process, each with the weights that it would have in a real
# pipeline. `sync` flushes after each batch, `stash` computes with the weights that are there, and
# `spectrain` predicts those that are missing.


# %%
def emulate(steps: int) -> dict[str, tuple[float, ...]]:
    """Return the losses of each weight mode."""
    emulator = Emulator(
        make_model(), stages=STAGES, loss=nn.functional.cross_entropy,
        example_inputs=next(make_batches(1)),
    )  # fmt: skip
    found = {}
    for weights in ("sync", "stash", "spectrain"):
        run = emulator.run(make_batches(steps), weights, sgd, steps)
        found[weights] = run.losses
        print(f"{weights:10} loss {run.final():.4f}, staleness {run.staleness}")
    return found


# %% [markdown]
# ## Train
#
# The same with ranks. `submit` and `step` return before the batch has passed all stages; the loss
# of a batch is known some calls later, and `drain` flushes the pipeline.


# %%
def train(steps: int, weights: str = "spectrain") -> list[float]:
    """Train an asynchronous pipeline; return all losses in order."""
    torch.set_num_threads(1)  # The ranks share the cores.
    program = fxpart.compile(
        make_model(), f"local:{STAGES}", example_inputs=next(make_batches(1)),
        loss=nn.functional.cross_entropy, mode="async", weights=weights, microbatches=1,
        constraints={"stages": STAGES, "mesh": "none"},
    )  # fmt: skip
    trainer = program.trainer(sgd)
    losses = [trainer.step(batch) for batch in make_batches(steps)]
    known = [float(loss) for loss in (*losses, *trainer.drain()) if loss is not None]
    if trainer.rank == 0:
        print(program)
        print(f"first loss {known[0]:.4f}, last loss {known[-1]:.4f}")
    trainer.close()
    return known


# %%
# In a notebook: losses = emulate(200); real = train(200)
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    count = parser.parse_args().steps
    emulate(count)
    train(count)

# %% [markdown]
# The emulated losses of `spectrain` are those of the ranks. `fxpart emulate` does the same for a
# model of your own, and `fxpart explain asynchronous_training` describes all weight modes.
