"""What rank processes run for the tests of weights in and out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxpart

WIDTH, LAYERS = 2560, 8  # 26 MB each, 210 MB


def gpt2() -> Any:
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=50, bos_token_id=1,
        eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(5)
    return transformers.GPT2LMHeadModel(config).train()


def ids(seed: int) -> torch.Tensor:
    return torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(seed))


def train_and_save(folder: str, shard_bytes: int) -> list[str]:
    """Two steps on the ranks that there are, then a checkpoint; the names of its files."""
    batch = {"input_ids": ids(0), "labels": ids(0)}
    program = fxpart.compile(
        gpt2(), "local:2", example_kwargs=batch, microbatches=2,
        constraints={"mesh": "none", "stages": 2},
    )  # fmt: skip
    trainer = program.trainer(lambda p: torch.optim.SGD(p, lr=0.5))
    for seed in range(2):
        trainer.step({"input_ids": ids(seed), "labels": ids(seed)})
    files = trainer.save_pretrained(folder, shard_bytes=shard_bytes)
    return [file.name for file in files]


class Wide(nn.Module):
    """Layers that are large beside all that a process has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return {"loss": x.square().mean()}


def load(folder: str, mesh: str) -> tuple[int, int, float]:
    """Bytes by which this rank's memory rose at most, bytes of its parameters, a checksum."""
    with torch.device("meta"):
        model = Wide()
    constraints: dict[str, Any] = {"mesh": mesh}
    if mesh == "none":
        constraints["stages"] = 2
    program = fxpart.compile(
        model, "local:2", example_kwargs={"x": torch.zeros(4, WIDTH)}, microbatches=2,
        constraints=constraints,
    )  # fmt: skip
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    trainer = program.trainer(weights=folder)
    rise = memory("VmHWM") - before
    own = [
        t
        for mesh_rank in trainer.parts.mesh_ranks
        for m in mesh_rank.modules.values()
        for t in m.parameters()
    ]
    total = sum(float(t.detach().sum()) for t in own)
    trainer.close()
    return rise, sum(t.nbytes for t in own), total


def memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def wrong(folder: str) -> str:
    """What this rank says of a checkpoint that lacks a tensor of one stage."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    program = fxpart.compile(
        model, "local:2", example_inputs=(torch.zeros(4, 4), torch.zeros(4, 4)),
        loss=nn.functional.mse_loss, constraints={"mesh": "none", "stages": 2},
    )  # fmt: skip
    try:
        program.trainer(weights=folder)
    except fxpart.FxpartError as caught:
        return str(caught)
    return ""
