"""The promise: a partitioned run has the numbers of one process, for the whole zoo."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from ranks import Pool
from torch import nn
from zoo import ZOO

import fxpart
from fxpart.api import Program
from fxpart.capture.flat_batch import flatten_batch
from fxpart.compat.optimizer_choice import choose
from fxpart.training.trainer_factory import load_trainer
from fxpart.verification.comparison import PartitionedRun
from fxpart.verification.comparison import compare as verdict
from fxpart.verification.single_process import SingleProcessTrainer

pytestmark = pytest.mark.slow

STAGES = (2, 4)
WITH_DROPOUT = ("gpt2", "bert", "distilbert", "t5", "bart")


@cache
def program(name: str, dropout: bool = True) -> Program:
    """The zoo model, captured once; four microbatches."""
    entry = ZOO[name]
    if not entry.available:
        pytest.skip(f"{name} needs {entry.needs}")
    built = entry.build()
    if not dropout:
        without_dropout(built.model)
    return fxpart.compile(
        built.model, "local:4", example_inputs=built.batch, loss=built.loss,
        batch_dims=built.batch_dims, microbatches=built.batch_size,
        constraints={"stages": 1, "mesh": "none"}, batch_coupling=entry.coupling,
    )  # fmt: skip


def without_dropout(model: nn.Module) -> None:
    """Every dropout probability of the model becomes 0."""
    for module in model.modules():
        for attribute in ("p", "dropout", "attention_dropout", "attn_dropout", "dropout_prob"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)


@cache
def partitioned(name: str, stages: int, dropout: bool = True) -> Program:
    """The same model on a number of stages (fewer where it has fewer blocks)."""
    whole = program(name, dropout)
    count = min(stages, whole.plan.model.blocks)
    constraints: dict[str, Any] = {"stages": count, "mesh": "none"}
    rows = whole.plan.batch_size
    return whole.replan("local:4", microbatches=rows, constraints=constraints)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", ZOO)
def test_in_one_process(name: str, stages: int) -> None:
    """Three AdamW steps: loss, gradients, parameters and buffers, bit for bit or as promised."""
    found = partitioned(name, stages).verify(steps=3)
    assert found.passed, found
    assert found.eager_loss is not None and found.eager_gradient is not None
    tolerance = max(ZOO[name].tolerance, 1e-6)
    assert found.eager_loss <= tolerance, found.eager_loss
    assert found.eager_gradient <= tolerance, found.eager_gradient


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_without_dropout(name: str) -> None:
    """The models that have dropout, again without."""
    whole = partitioned(name, 4, dropout=False)
    assert sum(stage.random_ops for stage in whole.spec.stages) == 0
    assert sum(stage.random_ops for stage in partitioned(name, 4).spec.stages) > 0
    found = whole.verify(steps=3)
    assert found.passed, found


def train_exported(folder: str, weights: str, batch: Any, steps: int) -> list[Any]:
    """On a rank: train the exported program, and return losses, gradients and state as bytes."""
    trainer = load_trainer(folder, "adamw", weights=weights)
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for step in range(steps):
        losses.append(trainer.backward(restored(batch)).item())
        gradients |= {f"{step}/{n}": g for n, g in trainer.gradients().items()}
        trainer.update()
    state = trainer.state_dict(first_only=True)
    trainer.close()
    if trainer.rank:
        return [losses]
    return [losses, packed(gradients), packed(state)]


def packed(tensors: dict[str, torch.Tensor]) -> bytes:
    """Tensors as bytes, each a copy of its own."""
    return safetensors.torch.save({n: t.detach().clone().contiguous() for n, t in tensors.items()})


def restored(batch: Any) -> Any:
    """A batch from plain data: lists with their dtype's name become tensors."""
    if isinstance(batch, dict) and set(batch) == {"dtype", "data"}:
        return torch.tensor(batch["data"], dtype=getattr(torch, batch["dtype"]))
    if isinstance(batch, dict):
        return {k: restored(v) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(restored(v) for v in batch)
    return batch


def plain(batch: Any) -> Any:
    """The inverse of :func:`restored`; float32 survives a list of Python floats."""
    if isinstance(batch, torch.Tensor):
        return {"dtype": str(batch.dtype).removeprefix("torch."), "data": batch.tolist()}
    if isinstance(batch, dict):
        return {k: plain(v) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(plain(v) for v in batch)
    return batch


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama", "bert", "t5", "vit", "mixtral", "resnet50", "unet", "recommender", "lstm",
     "transformer", "densenet121"],
)  # fmt: skip
def test_over_gloo(name: str, stages: int, pool: Pool, tmp_path: Path) -> None:
    """Real processes load the exported program alone, and agree with one process."""
    partition = partitioned(name, stages)
    captured = partition.captured
    partition.export(tmp_path / "build")
    weights = {n: captured.state[n] for n in (*captured.parameters, *captured.persistent)}
    (tmp_path / "weights.safetensors").write_bytes(packed(weights))
    assert captured.example is not None
    batch = captured.example()
    answers = pool.run(
        train_exported, str(tmp_path / "build"), str(tmp_path / "weights.safetensors"),
        plain(batch), 3, ranks=len(partition.plan.stages), timeout=120.0,
    )  # fmt: skip
    losses, gradients, state = answers[0]
    assert all(answer[0] == losses for answer in answers), "the loss is the same on every rank"
    compare(partition, batch, losses, safetensors.torch.load(gradients), state)


def compare(
    partition: Program, batch: Any, losses: list[float], gradients: dict[str, Any], state: bytes
) -> None:
    """All of it against one process, by the same rules as ``fxpart verify``."""
    steps: list[dict[str, torch.Tensor]] = [{} for _ in losses]
    for key, gradient in gradients.items():
        step, _, name = key.partition("/")
        steps[int(step)][name] = gradient
    seen = PartitionedRun(
        [torch.tensor(x) for x in losses], list(steps), safetensors.torch.load(state)
    )
    found = verdict(partition, choose("adamw").make, batch, seen)
    assert found.passed, found


@pytest.mark.parametrize("name", ["gpt2", "resnet50"])
def test_clipping_is_that_of_one_process(name: str) -> None:
    """The global norm, ties counted once, and the clipped step: torch's own, bit for bit."""
    partition = partitioned(name, 4)
    captured = partition.captured
    assert captured.example is not None
    batch = captured.example()
    one = SingleProcessTrainer(
        captured,
        partition.graph,
        choose("sgd").make,
        microbatches=partition.plan.microbatches,
        seed=partition.plan.seed,
    )
    trainer = partition.trainer("sgd", clip_norm=0.01)
    for _ in range(2):
        trainer.step(batch)
        one.backward(list(flatten_batch(batch).tensors))
        parameters = [one.state[n] for n in captured.parameters if one.state[n].grad is not None]
        wanted = torch.nn.utils.clip_grad_norm_(parameters, 0.01)
        assert trainer.last_grad_norm is not None
        assert torch.equal(trainer.last_grad_norm, wanted)
        assert wanted > 0.01, "nothing was clipped"
        one.update()
    state = trainer.state_dict()
    assert all(torch.equal(state[n], one.state[n]) for n in captured.parameters)


def test_differences_are_found() -> None:
    """The comparison can fail: a scaled gradient, a changed weight, another loss."""
    partition = partitioned("mlp", 2)
    captured = partition.captured
    assert captured.example is not None
    batch = captured.example()
    trainer = partition.trainer()
    loss = trainer.backward(batch)
    right = trainer.gradients()
    trainer.update()
    state = trainer.state_dict()

    def passes(
        loss: torch.Tensor, gradients: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
    ) -> bool:
        seen = PartitionedRun([loss], [gradients], state)
        return verdict(partition, choose("adamw").make, batch, seen).passed

    name = captured.parameters[0]
    nudged = {**state, name: torch.nextafter(state[name], state[name] + 1)}
    assert passes(loss, right, state)
    assert not passes(torch.nextafter(loss, loss + 1), right, state)
    assert not passes(loss, {n: g * 1.001 for n, g in right.items()}, state)
    assert not passes(loss, {n: g for n, g in right.items() if n != name}, state)
    assert not passes(loss, right, nudged)
