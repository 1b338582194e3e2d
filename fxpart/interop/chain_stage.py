"""Stages of a program as a chain: skip connections are forwarded through each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fxpart.errors import FxpartError, Problem
from fxpart.program.spec import ProgramSpec, StageSpec, ValueSpec, dim_value

# Keyword arguments of a stage's forward beside the user's inputs.
MICROBATCH, FEED = "fxpart_microbatch", "fxpart_feed"


@dataclass(frozen=True)
class ChainMicrobatches:
    """A batch in microbatches, passed through torch's schedules as one object.

    inputs: the user's inputs by name, per microbatch. keys: of random ops, per microbatch.
    """

    inputs: Sequence[Mapping[str, torch.Tensor]]
    keys: Sequence[int]


def boundaries(spec: ProgramSpec) -> tuple[tuple[ValueSpec, ...], ...]:
    """Return the values that each stage but the last passes to the next one.

    They include values for later stages, which every stage in between forwards. A value's
    ``requires_grad`` says whether any later stage sends a gradient back. Raises FXP109 with every
    reason why the program is not a chain.
    """
    problems = _find_problems(spec)
    if problems:
        raise FxpartError(problems)
    last = len(spec.stages) - 1
    boundaries_: list[tuple[ValueSpec, ...]] = []
    for at in range(last):
        crossing: dict[str, ValueSpec] = {}
        flows: dict[str, bool] = {}
        for stage in spec.stages[at + 1 :]:
            for value, source in zip(stage.inputs, stage.sources, strict=True):
                if 0 <= source <= at:
                    crossing.setdefault(value.name, value)
                    flows[value.name] = flows.get(value.name, False) or value.requires_grad
        boundaries_.append(
            tuple(
                ValueSpec(name=n, dtype=v.dtype, shape=v.shape, requires_grad=flows[n])
                for n, v in crossing.items()
            )
        )
    return tuple(boundaries_)


def _find_problems(spec: ProgramSpec) -> list[Problem]:
    problems = []
    fix = "train it with program.trainer(), which runs any graph of stages"
    if spec.sharding is not None:
        why = f"each stage has several ranks (mesh {spec.sharding.mesh}), "
        why += "which torch's stages do not support"
        problems.append(
            Problem("FXP109", "to_pipeline_stages", why, 'use constraints={"mesh": "none"}')
        )
    for before, stage in pairwise(spec.stages):
        if before.index not in stage.sources:
            from_ = sorted({s for s in stage.sources if s >= 0})
            what = f"from stages {from_}" if from_ else "user inputs only"
            why = (
                f"stage {stage.index} has no input from stage {before.index}, only {what}; "
                "torch.distributed.pipelining supports chains only"
            )
            problems.append(Problem("FXP109", "to_pipeline_stages", why, fix))
    if not spec.loss:
        why = "the program has no loss"
        problems.append(Problem("FXP106", "to_pipeline_stages", why, "compile with loss="))
    elif spec.loss not in {value.name for value in spec.stages[-1].outputs}:
        why = "the loss is not computed on the last stage, where torch's schedules expect it"
        problems.append(Problem("FXP109", "to_pipeline_stages", why, fix))
    return problems


def make_meta_tensors(
    values: Sequence[ValueSpec], sizes: Mapping[str, int]
) -> tuple[torch.Tensor, ...]:
    """Return meta tensors of the values' shapes and dtypes, from which torch makes buffers."""
    return tuple(
        torch.empty(
            tuple(dim_value(dim, sizes) for dim in value.shape),
            dtype=getattr(torch, value.dtype),
            device="meta",
        ).requires_grad_(value.requires_grad)
        for value in values
    )


class ChainStage(nn.Module):
    """A stage module as torch.distributed.pipelining calls it.

    ``forward`` takes the values of the boundary before it (none on the first stage) and returns
    those of the boundary after it; the last stage returns the microbatch's loss as a tensor of one
    element.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: ProgramSpec,
        stage: StageSpec,
        crossing: Sequence[Sequence[ValueSpec]],
    ) -> None:
        """Wrap a stage module of fxpart. crossing: from :func:`boundaries`."""
        super().__init__()
        self.module = module
        self.last = stage.index == len(spec.stages) - 1
        self.random = bool(stage.random_ops)
        self._received = [] if stage.index == 0 else [v.name for v in crossing[stage.index - 1]]
        self._inputs = [(v.name, s < 0) for v, s in zip(stage.inputs, stage.sources, strict=True)]
        self._users = [v.name for v, s in zip(stage.inputs, stage.sources, strict=True) if s < 0]
        self._outputs = [value.name for value in stage.outputs]
        self._loss = self._outputs.index(spec.loss) if self.last else -1
        self._sent = [] if self.last else [(v.name, v.requires_grad) for v in crossing[stage.index]]
        self._device: torch.device = module.device  # type: ignore[assignment]

    def forward(self, *carried: torch.Tensor, **given: Any) -> Any:
        """Run the stage. carried: values of the boundary; on the first stage, its user inputs in
        order.

        given: ``fxpart_microbatch`` and ``fxpart_feed`` (see PipelineStages.feed), or the stage's
        user inputs by name.
        """
        feed: ChainMicrobatches | None = given.get(FEED)
        users: Mapping[str, torch.Tensor]
        if feed is None:
            names = self._received or self._users
            key, users = 0, {**given, **dict(zip(self._users, carried, strict=False))}
            assert not self.random, "random ops need a key: step(**stages.feed(batch))"
        else:
            names = self._received
            at = int(given[MICROBATCH])
            key, users = feed.keys[at], feed.inputs[at]
        values = dict(zip(names, carried, strict=True))
        arguments = [
            users[name].to(self._device) if user else values[name] for name, user in self._inputs
        ]
        found = self.module(key, *arguments)
        if self.last:
            # Not a view: torch detaches it in place, and cannot merge losses without a dim.
            return torch.stack([found[self._loss]])
        values.update(zip(self._outputs, found, strict=True))
        return tuple(values[name] if flows else values[name].detach() for name, flows in self._sent)
