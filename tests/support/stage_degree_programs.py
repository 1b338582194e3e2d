"""Models of the zoo on stages of different tensor degrees, and the same steps in one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from equality_programs import build, double
from torch import nn

import fxpart
from fxpart import Cluster, Device, Link
from fxpart.api import Program
from fxpart.compat.optimizer_choice import choose

# So small models would be replicated by the planner's choice.
_PROJECTIONS = {"q": "0", "k": "0", "v": "0", "o": "1", "wi": "0", "wo": "1"}
SHARDED = {
    "gpt2": {"*.c_fc.weight": "1", "*.mlp.c_proj.weight": "0"},
    "llama": {
        **{f"*.{name}_proj.weight": "0" for name in ("q", "k", "v", "gate", "up")},
        "*.o_proj.weight": "1", "*.down_proj.weight": "1",
    },
    "t5": {f"*.{name}.weight": dim for name, dim in _PROJECTIONS.items()},
    "unet": {
        "down.*.0.weight": "0", "down.*.3.weight": "1",
        "merge.*.0.weight": "0", "merge.*.3.weight": "1",
    },
    "dropouts": {},
    "shared_mlp": {"hidden.weight": "0"},
}  # fmt: skip


def compiled(name: str, tp: str, microbatches: int = 2, **constraints: Any) -> Program:
    """The model in float64 on as many ranks; "1" is one rank."""
    built = build(name)
    built = replace(built, model=built.model.double(), batch=double(built.batch))
    degrees = [int(degree) for degree in tp.split("|")]
    lines = [f'"{key}" = "tp:S({dim})"' for key, dim in SHARDED[name].items()]
    given: dict[str, Any] = {"mesh": "none", "stages": 1}
    if len(degrees) > 1:
        given = {"mesh": "auto", "tp": tp, "annotations": "\n".join(["[annotations]", *lines])}
    return fxpart.compile(
        built.model, f"local:{sum(degrees)}", example_inputs=built.batch, loss=built.loss,
        batch_dims=built.batch_dims, microbatches=microbatches, constraints=given | constraints,
        cost_model="roofline", check="off",
    )  # fmt: skip


class Layers(nn.Module):
    """Linear layers; the last is small."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (32, 128, 128, 128, 128, 128, 8)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def one_fast_two_slow(memory: int = 4000 << 10) -> Cluster:
    """Three devices of one host, one of which is four times as fast as the others."""
    return Cluster(
        name="one fast, two slow",
        devices=tuple(
            Device(
                name=f"h/cpu:{n}", kind="cpu", model=f"c{rate}", host="h", memory=memory,
                flops={"float32": rate * 1e9, "float64": rate * 1e9}, bandwidth=rate * 2e10,
                launch=1e-7, source="formula",
            )
            for n, rate in enumerate((4, 1, 1))
        ),
        links=(Link(source="*", target="*", latency=1e-6, bandwidth=1e10, kind="net"),),
    )  # fmt: skip


def layers(cluster: Cluster | str, **constraints: Any) -> Program:
    """The layers in float64; without constraints, as the planner shares them."""
    torch.manual_seed(0)
    batch = torch.randn(8, 32).double(), torch.randn(8, 8).double()
    return fxpart.compile(
        Layers().double(), cluster, example_inputs=batch, loss=nn.MSELoss(),
        constraints=constraints, cost_model="roofline", check="off",
    )  # fmt: skip


def numbers(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Plain data of tensors."""
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def steps(program: Program, folder: str = "", load: str = "") -> dict[str, Any]:
    """Two steps with clipping: losses, norms, gradients, an evaluation, and the state.

    folder: where a checkpoint is saved in between. load: one to continue from instead.
    """
    trainer = program.trainer(choose("adamw").make, need_loss=False, clip_norm=0.05)
    assert program.captured.example is not None
    batch, found = program.captured.example(), {"losses": [], "norms": []}
    if load:
        trainer.load_checkpoint(load)
    for step in range(2 - trainer.updates):
        loss = trainer.step(batch)
        assert loss is not None and trainer.last_grad_norm is not None
        found["losses"].append(loss.item())
        found["norms"].append(trainer.last_grad_norm.item())
        if folder and not step:
            trainer.save_checkpoint(Path(folder))
    found["evaluation"] = [trainer.eval_step(batch).item()]
    found["gradients"] = numbers(trainer.gradients())
    found["state"] = numbers(trainer.state_dict())
    trainer.close()
    return found


def train(name: str, tp: str, folder: str = "", load: str = "") -> dict[str, Any]:
    """Compile and train, on every rank."""
    return steps(compiled(name, tp), folder, load)


def difference(found: Any, wanted: Any) -> float:
    """The largest relative difference of two results in float64."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), (found.keys(), wanted.keys())
        return max((difference(found[key], wanted[key]) for key in wanted), default=0.0)
    one, other = (torch.tensor(each, dtype=torch.float64) for each in (found, wanted))
    scale = float(other.abs().max()) if other.numel() else 0.0
    return float((one - other).abs().max()) / (scale or 1.0) if other.numel() else 0.0
