"""Captured and prepared zoo models, made once for each test process."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from fxpart.passes import PREPARE, all_passes
from torch import fx
from zoo import ZOO

from fxpart.capture import CapturedModel, capture
from fxpart.compiler import PassManager


@cache
def captured(name: str) -> CapturedModel:
    """The zoo model captured on its own example batch."""
    built = ZOO[name].build()
    return capture(
        built.model,
        built.batch,
        loss=built.loss,
        batch_size=built.batch_size,
        batch_dims=built.batch_dims,
    )


@cache
def prepared(name: str) -> fx.GraphModule:
    """The model's graph at level ANNOTATED; not to be changed."""
    return PassManager(all_passes()).run(PREPARE, captured(name).graph)


def inputs(name: str) -> list[torch.Tensor]:
    """The example batch's tensors in the order of the graph's inputs."""
    batch = ZOO[name].build().batch
    return [_at(batch, spec.path) for spec in captured(name).inputs]


def _at(batch: Any, path: tuple[str | int, ...]) -> torch.Tensor:
    """A leaf of a batch object."""
    for step in path:
        batch = batch[step] if not hasattr(batch, str(step)) else getattr(batch, str(step))
    return batch  # type: ignore[no-any-return]
