"""Models, batches and loops of the GPU checks; plain PyTorch is the reference of each."""

from __future__ import annotations

import copy
import inspect
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fxpart

DEVICE = os.environ.get("FXPART_CHECK_DEVICE", "cuda")  # "cpu" tries the checks themselves
HAS_GPU = DEVICE == "cuda"
TYPICAL = 0.01  # root mean square of a weight


def cluster(ranks: int = 1) -> fxpart.Cluster | str:
    """Return a cluster of this machine's kind of device."""
    return f"{ranks}xh100" if HAS_GPU else f"local:{ranks}"


def synchronize() -> None:
    """Wait for the device."""
    if HAS_GPU:
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Job:
    """A model, a global batch (a tuple or a dict) and a loss (None: the model's own)."""

    model: nn.Module
    batch: Any
    loss: Callable[..., Any] | None = None
    batch_dims: Mapping[str, int | None] | None = None


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of most checks."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def to_device(batch: Any, device: str = DEVICE) -> Any:
    """Return the batch with its tensors on a device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def eager_loss(model: nn.Module, job: Job, batch: Any) -> torch.Tensor:
    """Return the loss of the module as the user wrote it."""
    if job.loss is None:
        found = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        return found if isinstance(found, torch.Tensor) else found.loss
    if isinstance(batch, Mapping):
        names = list(inspect.signature(job.loss).parameters)[1:]
        targets = [name for name in names if name in batch] or ["labels"]
        inputs = {k: v for k, v in batch.items() if k not in targets}
        return job.loss(model(**inputs), *(batch[name] for name in targets))
    *inputs, target = batch
    return job.loss(model(*inputs), target)


def train_eager(
    job: Job,
    steps: int,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    precision: str | None = None,
    clip_norm: float | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a copy of the model without fxpart; return the losses and the final state."""
    model = copy.deepcopy(job.model).to(DEVICE)
    stepper, batch, losses = optimizer(model.parameters()), to_device(job.batch), []
    for _ in range(steps):
        stepper.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=precision in ("bf16", "fp8")):
            loss = eager_loss(model, job, batch)
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        stepper.step()
        losses.append(loss.detach())
    return [float(x) for x in losses], dict(model.state_dict())


def compiled(job: Job, ranks: int = 1, **arguments: Any) -> fxpart.Program:
    """Return the program of a job."""
    examples = "example_kwargs" if isinstance(job.batch, Mapping) else "example_inputs"
    return fxpart.compile(
        job.model, cluster(ranks), loss=job.loss, batch_dims=job.batch_dims,
        **{examples: job.batch}, **arguments,
    )  # fmt: skip


def train(
    program: fxpart.Program,
    batch: Any,
    steps: int,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Train with fxpart; return the losses, the final state and the trainer."""
    trainer = program.trainer(optimizer, **options)
    losses = [trainer.step(batch) for _ in range(steps)]
    return [float(x) for x in losses], trainer.state_dict(), trainer


def relative(a: list[float], b: list[float]) -> float:
    """Return the largest relative difference of two rows of numbers."""
    return max(abs(x - y) / max(abs(y), 1e-12) for x, y in zip(a, b, strict=True))


def state_difference(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """Return the largest root mean square difference of a tensor of two states.

    Relative to the root mean square of its elements, or to that of typical weights if this is
    smaller: tensors that are zero but for rounding say nothing.
    """
    worst = 0.0
    for name, value in b.items():
        if name in a and value.is_floating_point() and value.numel():
            x, y = a[name].detach().double().cpu(), value.detach().double().cpu()
            size = max(float(y.norm()), TYPICAL * y.numel() ** 0.5)
            worst = max(worst, float((x - y).norm()) / size)
    return worst


def median_seconds(step: Callable[[], object], steps: int, warm: int = 3) -> float:
    """Return the median time of a step in seconds, each measured until the device is done."""
    for _ in range(warm):
        step()
    synchronize()
    found = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        synchronize()
        found.append(time.perf_counter() - begin)
    return sorted(found)[len(found) // 2]


def llama(
    size: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[nn.Module, int]:
    """Return a Llama with random weights, and its vocabulary."""
    import transformers

    width, inner, layers, heads, groups, vocabulary = {
        "tiny": (64, 128, 2, 4, 2, 128),
        "small": (256, 688, 4, 8, 4, 1024),
        "large": (2048, 5632, 16, 16, 8, 32000),
    }[size]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=groups, vocab_size=vocabulary,
    )  # fmt: skip
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    return model.to(dtype).train(), vocabulary


def gpt2(size: str = "small", dropout: float = 0.0) -> tuple[nn.Module, int]:
    """Return a GPT-2 with random weights, and its vocabulary."""
    import transformers

    width, layers, heads, vocabulary = {"tiny": (64, 2, 4, 128), "small": (768, 12, 12, 50257)}[
        size
    ]
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=width, n_layer=layers, n_head=heads, vocab_size=vocabulary,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train(), vocabulary


def tokens(vocabulary: int, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Return a batch of random tokens that are their own labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def zoo(name: str) -> Job:
    """Return a model of the zoo."""
    from zoo import ZOO

    built = ZOO[name].build()
    without_dropout(built.model)
    return Job(built.model, built.batch, built.loss, built.batch_dims)


def without_dropout(model: nn.Module) -> None:
    """Switch dropout off: plain PyTorch draws other random numbers."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
