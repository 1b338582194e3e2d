"""Data, tensor, pipeline parallelism and ZeRO give the numbers of one process.

Every model of :mod:`sharded_models` in every way: all ranks in this process, and then exported and
run by real processes over gloo. What is compared are loss, gradients and parameters of three AdamW
steps with one process that runs the whole captured graph: :func:`fxpart.verify.compare`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from ranks import Pool
from sharded_models import TENSOR, WAYS
from zoo import ZOO

import fxpart
from fxpart.api import Program
from fxpart.capture.batch import put_together, take_apart
from fxpart.optimizers import choose
from fxpart.running import load_trainer
from fxpart.verify import TOLERANCE, Seen, Verification, compare, verify

STEPS = 3
# BatchNorm over a few pixels: the last bit of a weight changes the third step's gradients wholly,
# in one process too. There float32 can show nothing, so all of it runs in float64.
CHAOTIC = {"resnet50"}
# In float64 nothing but what is zero in exact arithmetic (the bias of attention keys) is noise.
KEY_BIASES = {"bert": 4, "vit": 4}

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Base:
    """A model compiled for one rank, and its batch."""

    program: Program
    batch: Any
    microbatches: int

    def sharded(self, model: str, way: str) -> Program:
        """The same model cut in one of the ways."""
        constraints = dict(WAYS[way])
        if "tp" in str(constraints["mesh"]):
            constraints["annotations"] = json.dumps({"annotations": TENSOR[model]})
        return self.program.replan(
            "local:4", microbatches=self.microbatches, constraints=constraints
        )


@cache
def base(model: str, dtype: torch.dtype | None = None) -> Base:
    """The model, captured once for all ways. dtype: float32 but for the chaotic ones."""
    dtype = dtype or (torch.float64 if model in CHAOTIC else torch.float32)
    if not ZOO[model].available:
        pytest.skip(f"{model} needs {ZOO[model].needs}")
    built = ZOO[model].build()
    parts = take_apart(built.batch)
    batch = put_together(
        parts.tree, [t.to(dtype) if t.is_floating_point() else t for t in parts.tensors]
    )
    microbatches = 2 if ZOO[model].cuttable else 1
    program = fxpart.compile(
        built.model.to(dtype), "local:1", example_inputs=batch, loss=built.loss,
        batch_size=built.batch_size, batch_dims=built.batch_dims, microbatches=microbatches,
    )  # fmt: skip
    return Base(program, batch, microbatches)


def told(found: Verification) -> str:
    """What differs, for the message of a failed test."""
    worst = sorted(
        (d for d in found.differences if not d.noise), key=lambda d: -max(d.gradient, d.parameter)
    )
    rows = [f"{d.name}: gradient {d.gradient:.1e}, value {d.parameter:.1e}" for d in worst[:4]]
    return f"largest {found.largest:.1e}, losses {found.losses}\n" + "\n".join(rows)


def wrong(model: str, found: Verification) -> str:
    """Why a run in float32 is not that of one process; "" where it is."""
    return "" if found.passed and found.steps == STEPS else told(found)


def wrong_at_first(model: str, found: Verification) -> str:
    """The first step's gradients: within 1e-6 strictly, whatever rounding may do later."""
    above = {d.name: d.gradient for d in found.differences if d.gradient > TOLERANCE}
    return "" if len(above) <= KEY_BIASES.get(model, 0) else f"first step: {above}"


@pytest.mark.parametrize("model", TENSOR)
def test_in_this_process(model: str) -> None:
    """All ways, the largest difference at most 1e-6 or what the last bit of the weights makes."""
    faults = {}
    for way in WAYS:
        program = base(model).sharded(model, way)
        found = verify(program, steps=STEPS, batch=base(model).batch)
        assert found.ranks == len(program.plan.prediction.ranks) >= 2
        why = wrong(model, found)
        if not why and way == "data 2 x tensor 2":  # the one in which most is added up
            why = wrong_at_first(model, verify(program, steps=1, batch=base(model).batch))
        if why:
            faults[way] = why
    assert not faults, "\n".join(f"{way}: {why}" for way, why in faults.items())


@pytest.mark.parametrize("way", ["data 2 x tensor 2"])
@pytest.mark.parametrize("model", sorted(TENSOR.keys() - CHAOTIC - {"mixtral"}))
def test_in_float64(model: str, way: str) -> None:
    """Where rounding hides nothing, every difference is far below 1e-6.

    Not for mixtral: torch has no grouped product of float64.
    """
    given = base(model, torch.float64)
    found = verify(given.sharded(model, way), steps=STEPS, batch=given.batch)
    assert found.passed and found.largest <= TOLERANCE, told(found)
    assert sum(d.noise for d in found.differences) <= KEY_BIASES.get(model, 0), told(found)


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


def as_seen(data: bytes) -> Seen:
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
    return Seen([tensors[f"{k}/loss"] for k in range(STEPS)], list(gradients), state)


def written(given: Base, folder: Path) -> tuple[str, str]:
    """The model's weights and the batch as files."""
    state = given.program.captured.state
    weights = folder / "weights.safetensors"
    safetensors.torch.save_file({n: t.detach().clone() for n, t in state.items()}, weights)
    parts = take_apart(given.batch)
    names = [f"t{i}" for i in range(len(parts.tensors))]
    batch = folder / "batch"
    safetensors.torch.save_file(
        {n: t.contiguous().clone() for n, t in zip(names, parts.tensors, strict=True)}, batch
    )
    Path(f"{batch}.json").write_text(json.dumps(put_together(parts.tree, names)))
    return str(weights), str(batch)


@pytest.mark.parametrize("model", TENSOR)
def test_over_gloo(model: str, pool: Pool, tmp_path: Path) -> None:
    """The exported programs on two and four real processes, without the model and the compiler."""
    given = base(model)
    files = written(given, tmp_path)
    faults = {}
    for way in WAYS:
        program = given.sharded(model, way)
        ranks = len(program.plan.prediction.ranks)
        folder = tmp_path / way.replace(" ", "_")
        program.export(folder)
        first, *others = pool.run(train, str(folder), *files, ranks=ranks, timeout=120)
        assert others == [b""] * (ranks - 1)
        seen = as_seen(first)
        found = compare(program, choose(torch.optim.AdamW).make, given.batch, seen)
        if why := wrong(model, found):
            faults[way] = why
    assert not faults, "\n".join(f"{way}: {why}" for way, why in faults.items())


@pytest.mark.parametrize("way", ["data 2 x tensor 2", "pipeline 2 x tensor 2", "zero 3 x 2"])
def test_evaluation_and_checkpoints(way: str) -> None:
    """eval_step gives the loss of the whole model in evaluation mode, after training too."""
    given = base("gpt2")
    sharded = given.sharded("gpt2", way).trainer(torch.optim.AdamW)
    whole = given.program.trainer(torch.optim.AdamW)
    for trainer in (sharded, whole):
        trainer.step(given.batch)
    losses = [float(trainer.eval_step(given.batch)) for trainer in (sharded, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    whole.load_state_dict(sharded.state_dict())
    assert float(whole.eval_step(given.batch)) == pytest.approx(losses[0], rel=1e-6)


def test_a_plan_applied_again_gives_the_same_program() -> None:
    """Also where the solver chose, and for every lane."""
    given = base("recommender")
    first = given.program.replan(
        "local:4", microbatches=2, constraints={"mesh": "dp=2,tp=2", "stages": 1, "zero": 3}
    )
    assert first.plan.sharding is not None and first.plan.sharding.certificate is not None
    plan = fxpart.Plan.loads(first.plan.dumps())
    built = ZOO["recommender"].build()
    again = fxpart.compile(built.model, plan=plan, example_inputs=built.batch, loss=built.loss)
    assert [again.lane(k) for k in range(4)] == [first.lane(k) for k in range(4)]
    assert verify(again).passed
