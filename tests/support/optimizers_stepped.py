"""Every optimizer of torch with some steps done, for the tests of predictions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

Make = Callable[[Any], torch.optim.Optimizer]
SHAPES = ((4, 3), (2, 3), (5, 2))

OPTIMIZERS: dict[str, Make] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "sgd-decay": partial(torch.optim.SGD, lr=0.05, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "dampened": partial(
        torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.1, maximize=True
    ),
    "nesterov": partial(
        torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True
    ),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adam-decay": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "adam-fused": partial(torch.optim.Adam, lr=0.01, fused=True),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True, betas=(0.8, 0.9)),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.2),
    "adamw-maximize": partial(torch.optim.AdamW, lr=0.01, maximize=True, amsgrad=True),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "nadam-decay": partial(torch.optim.NAdam, lr=0.01, weight_decay=0.1),
    "nadam-decoupled": partial(
        torch.optim.NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, maximize=True
    ),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, weight_decay=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "muon": partial(torch.optim.Muon, lr=0.01),
    "lbfgs": partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
    "sparse": partial(torch.optim.SparseAdam, lr=0.01),
}


def parameters(
    dtype: torch.dtype = torch.float32, seed: int = 0, size: float = 1.0
) -> list[nn.Parameter]:
    """A few matrices with numbers up to half the size."""
    made = torch.Generator().manual_seed(seed)
    return [nn.Parameter((torch.rand(s, generator=made, dtype=dtype) - 0.5) * size) for s in SHAPES]


def give_gradients(
    given: list[nn.Parameter], seed: int, *, sparse: bool = False, size: float = 1.0
) -> None:
    """Random gradients; every second row where they are sparse."""
    made = torch.Generator().manual_seed(seed)
    for p in given:
        p.grad = torch.randn(p.shape, generator=made, dtype=p.dtype) * size
        if sparse:
            p.grad[::2] = 0
            p.grad = p.grad.to_sparse(1)


def zero_gradients(given: list[nn.Parameter], *, sparse: bool = False) -> None:
    """Zeros for those that have gradients."""
    for p in given:
        if p.grad is not None:
            p.grad = torch.zeros_like(p)
            p.grad = p.grad.to_sparse(1) if sparse else p.grad


def step(optimizer: torch.optim.Optimizer) -> None:
    """One step, with a closure for the one that needs it."""
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(lambda: torch.zeros(()))
    else:
        optimizer.step()


def bits(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Parameters, state and options, to be compared bit for bit."""
    return [
        copy.deepcopy(flat)
        for group in optimizer.param_groups
        for p in group["params"]
        for flat in (p.data, *_flat(optimizer.state.get(p, {})))
    ] + [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for name, entry in value.items():
            yield name
            yield from _flat(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _flat(entry)
    else:
        yield value


def same_bits(one: list[Any], other: list[Any]) -> bool:
    """Whether two answers of ``bits`` are equal, bit for bit."""
    return len(one) == len(other) and all(
        torch.equal(_dense(a), _dense(b)) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor
