"""Asynchronous 1F1B by its definition: every version of every stage's weights is kept.

No hooks, no stages that run at the same time and nothing of fxpart: the microbatches are taken one
after the other. That can be done because a microbatch reads only versions that the minibatches
before its own have made: the forward on stage k those after u_f updates, the backward those after
u_b, with t = 1, 2, ... and a microbatches to an update

    u_f = floor(max(0, t - (K - k)) / a)        u_b = floor((t - 1) / a)

from section 1 of the notes on weight versions. Which of them a mode reads is its table there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from hand_optimizers import Hand, State, Version

Weights = dict[str, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]

# What is left of an update's movement when the staleness has passed (PipeMare's D).
DECAY = math.exp(-2)


class HandModel(Protocol):
    """A model with separate weights for forward and backward."""

    def forward(
        self, weights: Weights, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, Any]: ...

    def backward(self, weights: Weights, tape: Any, share: float) -> Weights: ...


def updates_in_forward(stage: int, stages: int, a: int, t: int) -> int:
    """u_f of the t-th microbatch, t from 1."""
    return max(0, t - (stages - stage)) // a


def updates_in_backward(a: int, t: int) -> int:
    """u_b of the t-th microbatch, t from 1."""
    return (t - 1) // a


@dataclass(frozen=True)
class Reads:
    """What one microbatch reads: version and look-ahead of the forward; how the backward reads.

    after: "same" as the forward, weights "now" (looking ``back`` updates ahead), or "corrected".
    """

    version: int
    ahead: int
    after: str = "same"
    back: int = 0
    gap: int = 0


def reads(mode: str, stage: int, stages: int, a: int, t: int) -> Reads:
    """The row of the table for the t-th microbatch, t from 1."""
    u_f, u_b = updates_in_forward(stage, stages, a, t), updates_in_backward(a, t)
    gap = u_b - u_f
    most = u_b - updates_in_forward(0, stages, a, t)
    first = (t - 1) // a * a + 1  # the first microbatch of its minibatch
    began = updates_in_forward(stage, stages, a, first)
    match mode:
        case "flush":
            return Reads(u_b, 0)
        case "lookahead":
            later = t + stages * a  # a microbatch like it once the pipeline is full
            full = updates_in_backward(a, later)
            behind = full - updates_in_forward(stage, stages, a, later)
            deepest = full - updates_in_forward(0, stages, a, later)
            return Reads(u_b, behind + (deepest - behind) // 2)
        case "stash" | "nadam-stash":
            return Reads(u_f, 0)
        case "vertical":
            return Reads(updates_in_forward(0, stages, a, t), 0)
        case "2bw" | "2bw-ef":
            return Reads(max(0, u_b - 1), 0)
        case "naive":
            return Reads(u_f, 0, "now")
        case "spectrain":
            half = (most - gap) // 2
            return Reads(u_f, gap + half, "now", half)
        case "spectrain-v2":
            return Reads(u_f, gap)
        case "pipeoptim":
            return Reads(u_f, gap, "now")
        case "xpipe":
            return Reads(began, updates_in_backward(a, first) - began)
        case "pipemare":
            return Reads(u_f, 0, "corrected", gap=gap)
    raise AssertionError(mode)


@dataclass
class Stage:
    """One stage's parameters and all the versions that they have had, version u at place u."""

    names: tuple[str, ...]
    versions: list[Version]


@dataclass
class Reference:
    """A stream of minibatches through a pipeline that never drains.

    stage_of: the stage of each parameter. total: updates in all, for PipeMare's learning rates.
    """

    model: HandModel
    stage_of: Mapping[str, int]
    stages: int
    a: int
    mode: str
    optimizer: Hand
    total: int | None = None

    def train(
        self, weights: Weights, batches: Sequence[Batch]
    ) -> tuple[list[torch.Tensor], Weights]:
        """The loss of each minibatch, and the weights after all updates."""
        self.kept = [
            Stage(names, [Version({n: weights[n].detach().clone() for n in names})])
            for stage in range(self.stages)
            for names in [tuple(n for n in weights if self.stage_of[n] == stage)]
        ]
        losses = [self._minibatch(number, *batch) for number, batch in enumerate(batches)]
        return losses, {n: w for s in self.kept for n, w in s.versions[-1].weights.items()}

    def _minibatch(self, number: int, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        sums: Weights = {}
        total: torch.Tensor | None = None
        pieces = zip(inputs.tensor_split(self.a), targets.tensor_split(self.a), strict=True)
        for j, piece in enumerate(pieces):
            share = len(piece[0]) / len(inputs)
            loss, gradients = self._microbatch(number * self.a + j + 1, *piece, share)
            for name, gradient in gradients.items():
                sums[name] = sums[name] + gradient if name in sums else gradient
            total = loss * share if total is None else total + loss * share
        for k, stage in enumerate(self.kept):
            stage.versions.append(self._updated(k, stage, sums))
        assert total is not None
        return total

    def _microbatch(
        self, t: int, inputs: torch.Tensor, targets: torch.Tensor, share: float
    ) -> tuple[torch.Tensor, Weights]:
        forward: Weights = {}
        for k, stage in enumerate(self.kept):
            row = reads(self.mode, k, self.stages, self.a, t)
            forward |= self._ahead(stage, row.version, row.ahead)
        loss, tape = self.model.forward(forward, inputs, targets)
        backward: Weights = {}
        for k, stage in enumerate(self.kept):
            row = reads(self.mode, k, self.stages, self.a, t)
            now = updates_in_backward(self.a, t)
            assert now == len(stage.versions) - 1, "backwards read what has just been made"
            if row.after == "same":
                backward |= {name: forward[name] for name in stage.names}
            elif row.after == "now":
                backward |= self._ahead(stage, now, row.back)
            else:
                backward |= corrected(stage.versions[now], row.gap)
        return loss, self.model.backward(backward, tape, share)

    def _ahead(self, stage: Stage, version: int, s: int) -> Weights:
        """Weights predicted s updates after a version, with the optimizer's state of then."""
        kept = stage.versions[version]
        rates = [self.optimizer.rate(version + j) for j in range(s)]
        return {
            name: self.optimizer.predict(weight, kept.states.get(name, {}), rates, version)
            for name, weight in kept.weights.items()
        }

    def _updated(self, k: int, stage: Stage, gradients: Weights) -> Version:
        """The next version: the optimizer's step, and PipeMare's average of the movement."""
        kept, number = stage.versions[-1], len(stage.versions) - 1
        rate = self.optimizer.rate(number)
        if self.mode == "pipemare":
            rate = discounted(rate, self._steady_gap(k), number, self.total)
        weights: Weights = {}
        states: dict[str, State] = {}
        for name in stage.names:
            weights[name], states[name] = self.optimizer.update(
                kept.weights[name], gradients[name], kept.states.get(name, {}), rate
            )
        made = Version(weights, states)
        if self.mode == "pipemare":
            made = replace(made, moved=moved(kept, made, self._steady_gap(k)))
        if self.mode == "2bw-ef":
            made = fed_back(kept, made, late=self.stages > 1 and number > 0)
        return made

    def _steady_gap(self, k: int) -> int:
        """The largest staleness of the stage's microbatches once the pipeline is full."""
        full = range(self.stages * self.a + 1, (self.stages + 1) * self.a + 1)
        return max(
            updates_in_backward(self.a, t) - updates_in_forward(k, self.stages, self.a, t)
            for t in full
        )


def discounted(rate: float, gap: int, step: int, total: int | None) -> float:
    """PipeMare's T1: the rate over a power of the staleness that fades from 1 to 0."""
    power = 1.0 if total is None else 1.0 - min(step / total, 1.0)
    return rate / float(max(gap, 1) ** power)


def moved(before: Version, after: Version, gap: int) -> Weights:
    """PipeMare's T2: the mean movement of an update, gamma d + (1 - gamma) (W' - W).

    gamma = D^(1 / gap). W is taken away before W' is added, as where only one of them is kept: that
    rounds otherwise than their difference.
    """
    if not gap:
        return {}
    gamma = DECAY ** (1 / gap)
    found: Weights = {}
    for name, weight in after.weights.items():
        past = before.moved.get(name, torch.zeros_like(weight)) * gamma
        found[name] = past.add(before.weights[name], alpha=gamma - 1).add(weight, alpha=1 - gamma)
    return found


def fed_back(before: Version, after: Version, *, late: bool) -> Version:
    """W' - (u' - u) where a late update u' has one before it, u; and u' for the next."""
    moved = {name: weight - after.weights[name] for name, weight in before.weights.items()}
    weights = {
        name: w.add(before.moved[name] - moved[name]) if late and before.moved else w
        for name, w in after.weights.items()
    }
    return replace(after, weights=weights, moved=moved)


def corrected(kept: Version, gap: int) -> Weights:
    """The weights that the forward is thought to have had: those of now, less what moved since.

    Before the first update nothing has moved.
    """
    if not gap:
        return dict(kept.weights)
    return {
        name: w.add(kept.moved[name], alpha=-gap) if kept.moved else w
        for name, w in kept.weights.items()
    }
