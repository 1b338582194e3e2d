"""Training on the device beside plain PyTorch there: losses and final weights.

    python tests/gpu/check.py --only numbers:NAME,...

Prints one JSON line per check: name, differences, tolerance, passed, error.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from training import (
    DEVICE,
    HAS_GPU,
    Job,
    adamw,
    compiled,
    gpt2,
    llama,
    relative,
    state_difference,
    to_device,
    tokens,
    train,
    train_eager,
    zoo,
)  # fmt: skip

FLOAT32, BFLOAT16, FLOAT8 = 1e-4, 3e-2, 0.1  # fused Adam rounds otherwise than the default
Check = Callable[[], dict[str, Any]]


def compared(
    job: Job, *, ranks: int = 1, steps: int = 3, tolerance: float = FLOAT32,
    options: dict[str, Any] | None = None, precision: str | None = None,
    clip_norm: float | None = None, **arguments: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train both ways."""
    optimizer = arguments.pop("stepper", adamw)
    if precision is not None:
        arguments["precision"] = precision
    want, weights = train_eager(
        job, steps, optimizer=optimizer, precision=precision, clip_norm=clip_norm
    )
    program = compiled(job, ranks, **arguments)
    extra = {"clip_norm": clip_norm} if clip_norm is not None else {}
    losses, state, trainer = train(
        program, job.batch, steps, optimizer=optimizer, **extra, **(options or {})
    )
    devices = {str(t.device) for t in _stage_tensors(trainer)}
    plan = program.plan
    return {
        "loss": relative(losses, want),
        "weights": state_difference(state, weights),
        "tolerance": tolerance,
        "devices": sorted(devices),
        "layout": f"{len(plan.stages)} stages, {plan.world} ranks, m={plan.microbatches}",
    }


def _stage_tensors(trainer: Any) -> list[torch.Tensor]:
    modules = [m for own in trainer.parts.mesh_ranks for m in own.modules.values()]
    return [t for m in modules for t in [*m.parameters(), *m.buffers()]]


def small_llama() -> Job:
    model, vocabulary = llama("small")
    return Job(model, tokens(vocabulary, 8, 128))


def small_gpt2(dropout: float = 0.0) -> Job:
    model, vocabulary = gpt2("tiny", dropout)
    return Job(model, tokens(vocabulary, 8, 32))


def perceptron() -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(*[x for _ in range(4) for x in (nn.Linear(64, 64), nn.GELU())])
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(16, 64, generator=generator) for _ in range(2))
    return Job(model, (x, y), nn.functional.mse_loss)


def in_bfloat16(job: Job) -> Job:
    return Job(job.model.to(torch.bfloat16), job.batch, job.loss, job.batch_dims)


def on_device(job: Job) -> Job:
    return Job(job.model.to(DEVICE), to_device(job.batch), job.loss, job.batch_dims)


def checkpointed() -> dict[str, Any]:
    """Save after two steps, load in a second trainer, and continue."""
    job = small_gpt2(0.1)
    program = compiled(job, 2, microbatches=2, constraints={"mesh": "none", "stages": 2})
    first = program.trainer(adamw)
    for _ in range(2):
        first.step(job.batch)
    with tempfile.TemporaryDirectory() as folder:
        first.save_checkpoint(folder)
        want = [float(first.step(job.batch)) for _ in range(2)]
        second = program.trainer(adamw)
        second.load_checkpoint(folder)
        found = [float(second.step(job.batch)) for _ in range(2)]
    same = state_difference(second.state_dict(), first.state_dict())
    return {"loss": relative(found, want), "weights": same, "tolerance": 0.0}


def evaluated() -> dict[str, Any]:
    """Evaluation and prediction between steps."""
    job = perceptron()
    program = compiled(job, 2, microbatches=2, constraints={"mesh": "none", "stages": 2})
    trainer = program.trainer(adamw)
    trainer.step(job.batch)
    loss = float(trainer.eval_step(job.batch))
    x, y = job.batch
    outputs = trainer.predict((x,))
    own = float(nn.functional.mse_loss(outputs.cpu(), y))
    return {"loss": relative([loss], [own]), "weights": 0.0, "tolerance": FLOAT32}


def dropout_same_draws() -> dict[str, Any]:
    """One rank and two stages draw the same numbers."""
    job = small_gpt2(0.1)
    one, _, _ = train(compiled(job, microbatches=2, seed=3), job.batch, 3)
    two, _, _ = train(
        compiled(job, 2, microbatches=2, seed=3, constraints={"mesh": "none", "stages": 2}),
        job.batch, 3,
    )  # fmt: skip
    return {"loss": relative(two, one), "weights": 0.0, "tolerance": FLOAT32}


def asynchronous() -> dict[str, Any]:
    """An asynchronous pipeline learns: its loss falls, and all of it is finite."""
    job = perceptron()
    program = compiled(job, 2, microbatches=2, mode="async", constraints=STAGES2)
    trainer = program.trainer(adamw)
    losses = [float(x) for x in (trainer.step(job.batch) for _ in range(20)) if x is not None]
    trainer.settle()
    falls = losses[-1] < losses[0]
    return {"loss": 0.0 if falls else 1.0, "weights": 0.0, "tolerance": 0.5, "losses": losses[::6]}


def verified() -> dict[str, Any]:
    """Program.verify on the device."""
    job = small_llama()
    program = compiled(job, 2, microbatches=2, constraints={"mesh": "none", "stages": 2})
    found = program.verify()
    return {"loss": found.eager_loss, "weights": found.eager_gradient, "tolerance": FLOAT32,
            "passed": found.passed, "equal": found.equal}  # fmt: skip


STAGES2 = {"mesh": "none", "stages": 2}
STAGES4 = {"mesh": "none", "stages": 4}
ZOO = (
    "mlp", "shared_mlp", "recommender", "transformer", "lstm", "graph_net", "side_mask", "frozen",
    "in_place", "many_ways", "resnet50", "unet", "gpt2", "llama", "mixtral", "mamba", "bert", "t5",
    "vit", "clip",
)  # fmt: skip


def zoo_check(name: str) -> dict[str, Any]:
    # Adam turns rounding into a full step where a gradient is zero but for rounding.
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    return compared(zoo(name), microbatches=1, tolerance=2e-4, stepper=sgd)


def layout(make: Callable[[], Job], ranks: int, constraints: dict[str, Any], microbatches: int = 4,
           **more: Any) -> dict[str, Any]:  # fmt: skip
    return compared(make(), ranks=ranks, microbatches=microbatches, constraints=constraints, **more)


CHECKS: dict[str, Check] = {
    "one rank": lambda: compared(small_llama(), microbatches=1),
    "one rank, 4 microbatches": lambda: compared(small_llama(), microbatches=4),
    "bfloat16 weights": lambda: compared(
        in_bfloat16(small_llama()), microbatches=1, tolerance=BFLOAT16
    ),
    "autocast": lambda: compared(
        small_llama(), microbatches=1, precision="bf16", tolerance=BFLOAT16
    ),
    "clipped": lambda: compared(small_llama(), microbatches=2, clip_norm=0.1),
    "clipped on two stages": lambda: layout(small_llama, 2, STAGES2, clip_norm=0.1),
    "model and batch on the device": lambda: compared(on_device(small_llama()), microbatches=1),
    "model and batch on the device, two stages": lambda: compared(
        on_device(small_llama()), ranks=2, microbatches=2, constraints=STAGES2
    ),
    "sgd with momentum": lambda: compared(
        perceptron(), microbatches=1, stepper=partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    ),
    "fused adamw": lambda: compared(
        perceptron(), microbatches=1, stepper=partial(torch.optim.AdamW, lr=1e-3, fused=True)
    ),
    "adafactor": lambda: compared(
        perceptron(), microbatches=1, stepper=partial(torch.optim.Adafactor, lr=1e-2)
    ),
    "two stages": lambda: layout(small_llama, 2, STAGES2),
    "four stages": lambda: layout(small_llama, 4, STAGES4),
    "gpipe": lambda: layout(small_llama, 2, {**STAGES2, "schedule": "gpipe"}),
    "zb-h1": lambda: layout(small_llama, 2, {**STAGES2, "schedule": "zb-h1"}),
    "interleaved": lambda: layout(
        small_llama, 2, {"mesh": "none", "ranks": 2, "schedule": "interleaved"}
    ),
    "recompute": lambda: layout(small_llama, 2, STAGES2, options={"recompute": "full"}),
    "tensor parallel": lambda: layout(small_llama, 2, {"mesh": "tp=2"}, tolerance=1e-3),
    "data parallel": lambda: layout(small_llama, 2, {"mesh": "dp=2"}, 1, tolerance=1e-3),
    "zero 1": lambda: layout(small_llama, 2, {"mesh": "dp=2", "zero": 1}, 1, tolerance=1e-3),
    "zero 3": lambda: layout(small_llama, 2, {"mesh": "dp=2", "zero": 3}, 1, tolerance=1e-3),
    "zero 3, clipped": lambda: layout(
        small_llama, 2, {"mesh": "dp=2", "zero": 3}, 1, tolerance=1e-3, clip_norm=0.1
    ),
    "data and tensor parallel stages": lambda: layout(
        small_llama, 8, {"mesh": "dp=2,tp=2", "stages": 2}, 2, tolerance=1e-3
    ),
    "compiled stages": lambda: compared(
        small_llama(), microbatches=1, tolerance=1e-3, options={"compile_stages": True}
    ),
    "compiled stages, two": lambda: layout(
        small_llama, 2, STAGES2, tolerance=1e-3, options={"compile_stages": True}
    ),
    "zero 3, gathered at use": lambda: layout(
        small_llama, 2, {"mesh": "dp=2", "zero": 3}, 1, tolerance=1e-3, options={"gather_ahead": 0}
    ),
    **({
        "cuda graphs": lambda: compared(
            small_llama(), microbatches=4, options={"cuda_graphs": True}, clip_norm=0.1
        ),
        "cuda graphs, two stages": lambda: layout(
            small_llama, 2, STAGES2, options={"cuda_graphs": True}
        ),
        "cuda graphs, autocast": lambda: compared(
            small_llama(), microbatches=2, precision="bf16", tolerance=BFLOAT16,
            options={"cuda_graphs": True},
        ),
        "fp8": lambda: compared(small_llama(), microbatches=2, precision="fp8", tolerance=FLOAT8),
    } if HAS_GPU else {}),
    "asynchronous": asynchronous,
    "queues": lambda: layout(small_llama, 3, {}, mode="queue", tolerance=1e-3),
    "checkpoint": checkpointed,
    "evaluation": evaluated,
    "dropout": dropout_same_draws,
    "verify": verified,
    **{f"zoo {name}": partial(zoo_check, name) for name in ZOO},
}  # fmt: skip


def run(name: str) -> dict[str, Any]:
    """Run one check."""
    begin = time.perf_counter()
    try:
        found = CHECKS[name]()
        worst = max(found["loss"], found["weights"])
        found.setdefault("passed", worst <= found["tolerance"])
    except Exception as problem:
        last = traceback.extract_tb(problem.__traceback__)[-4:]
        found = {
            "passed": False,
            "error": f"{type(problem).__name__}: {str(problem)[:600]}",
            "trace": [f"{Path(x.filename).name}:{x.lineno} {x.name}" for x in last],
        }
    return {"name": name, **found, "seconds": round(time.perf_counter() - begin, 1)}


if __name__ == "__main__":
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    if sys.argv[1:] == ["--list"]:
        print(*CHECKS, sep="\n")
    for each in [a for a in sys.argv[1:] if a != "--list"]:
        print("ROW " + json.dumps(run(each)), flush=True)
