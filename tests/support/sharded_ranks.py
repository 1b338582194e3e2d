"""Exported programs trained by real processes over gloo: what goes there, and what comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from sharded_runs import STEPS, Base

from fxpart.capture.flat_batch import flatten_batch, unflatten_batch
from fxpart.training.trainer_factory import load_trainer
from fxpart.verification.comparison import PartitionedRun


def train(folder: str, weights: str, batch: str) -> bytes:
    """On every rank: three steps of an exported program; what rank 0 has seen, else nothing."""
    torch.manual_seed(0)
    tensors = safetensors.torch.load_file(batch)
    paths = json.loads(Path(f"{batch}.json").read_text())
    given = put_together_like(paths, tensors)
    trainer = load_trainer(folder, torch.optim.AdamW, weights=weights, timeout=60.0)
    seen: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        seen[f"{step}/loss"] = trainer.backward(given)
        seen |= {f"{step}/gradient/{n}": g for n, g in trainer.gradients().items()}
        trainer.update()
    seen |= {f"state/{n}": t for n, t in trainer.state_dict().items()}
    trainer.close()
    if trainer.rank:
        return b""
    return safetensors.torch.save({n: t.detach().clone().contiguous() for n, t in seen.items()})


def put_together_like(paths: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A batch of nested dicts and lists with tensors in place of their names."""
    if isinstance(paths, dict):
        return {key: put_together_like(inner, tensors) for key, inner in paths.items()}
    if isinstance(paths, list):
        return tuple(put_together_like(inner, tensors) for inner in paths)
    return tensors[paths] if isinstance(paths, str) else paths


def as_seen(data: bytes) -> PartitionedRun:
    """What rank 0 has sent."""
    tensors = safetensors.torch.load(data)
    gradients: list[dict[str, torch.Tensor]] = [{} for _ in range(STEPS)]
    state = {}
    for key, tensor in tensors.items():
        head, _, rest = key.partition("/")
        if head == "state":
            state[rest] = tensor
        elif rest.startswith("gradient/"):
            gradients[int(head)][rest.removeprefix("gradient/")] = tensor
    return PartitionedRun([tensors[f"{k}/loss"] for k in range(STEPS)], list(gradients), state)


def written(given: Base, folder: Path) -> tuple[str, str]:
    """The model's weights and the batch as files."""
    state = given.program.captured.state
    weights = folder / "weights.safetensors"
    safetensors.torch.save_file({n: t.detach().clone() for n, t in state.items()}, weights)
    parts = flatten_batch(given.batch)
    names = [f"t{i}" for i in range(len(parts.tensors))]
    batch = folder / "batch"
    safetensors.torch.save_file(
        {n: t.contiguous().clone() for n, t in zip(names, parts.tensors, strict=True)}, batch
    )
    Path(f"{batch}.json").write_text(json.dumps(unflatten_batch(parts.tree, names)))
    return str(weights), str(batch)
