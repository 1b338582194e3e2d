"""Optimizer updates and predictions, written out by their formulas: an oracle without fxpart.

A tensor's update is a function of what it was: nothing is changed in place, so that every version
can be kept. The order of operations is that of torch.optim on CPUs, and a test asks for its bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

State = dict[str, torch.Tensor | float]
Rate = Callable[[int], float]  # the learning rate of update 0, 1, ...


def tensor_of(state: State, name: str) -> torch.Tensor:
    """A tensor of an optimizer's state."""
    found = state[name]
    assert isinstance(found, torch.Tensor)
    return found


def number_of(state: State, name: str) -> float:
    """A number of an optimizer's state."""
    found = state[name]
    assert isinstance(found, float)
    return found


@dataclass(frozen=True)
class HandSgd:
    """v <- m v + (g + d W), the first v being g + d W; W <- W - lr v."""

    rate: Rate
    momentum: float = 0.9
    decay: float = 0.0

    def update(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: State, rate: float
    ) -> tuple[torch.Tensor, State]:
        """The weight and state after one update."""
        if self.decay:
            gradient = gradient.add(weight, alpha=self.decay)
        if "v" in state:
            velocity = (tensor_of(state, "v") * self.momentum).add(gradient, alpha=1)
        else:
            velocity = gradient.clone()
        return weight.add(velocity, alpha=-rate), {"v": velocity}

    def predict(
        self, weight: torch.Tensor, state: State, rates: list[float], step: int
    ) -> torch.Tensor:
        """Rule 1: W - s lr v, with the rates of the s updates to come."""
        if not rates or "v" not in state:
            return weight
        return weight.add(tensor_of(state, "v"), alpha=-sum(rates))


@dataclass(frozen=True)
class HandAdamW:
    """Decoupled decay, then Adam with bias correction."""

    rate: Rate
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    decay: float = 0.01

    def update(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: State, rate: float
    ) -> tuple[torch.Tensor, State]:
        """The weight and state after one update."""
        zero = torch.zeros_like(weight)
        m = torch.lerp(tensor_of({"m": zero, **state}, "m"), gradient, 1 - self.beta1)
        v = tensor_of({"v": zero, **state}, "v") * self.beta2
        v = v.addcmul(gradient, gradient, value=1 - self.beta2)
        step = number_of({"step": 0.0, **state}, "step") + 1
        shorter = weight * (1 - rate * self.decay)
        root = (v.sqrt() / math.sqrt(1 - self.beta2**step)).add(self.epsilon)
        moved = shorter.addcdiv(m, root, value=-(rate / (1 - self.beta1**step)))
        return moved, {"m": m, "v": v, "step": step}

    def predict(
        self, weight: torch.Tensor, state: State, rates: list[float], step: int
    ) -> torch.Tensor:
        """Rule 2: W - s lr m' / (sqrt(v') + epsilon), and the decay that comes with it."""
        if not rates or "m" not in state:
            return weight
        done = number_of(state, "step")
        root = (tensor_of(state, "v").sqrt() / math.sqrt(1 - self.beta2**done)).add(self.epsilon)
        whole = sum(rates) / (1 - self.beta1**done)
        shorter = weight * (1 - sum(rate * self.decay for rate in rates))
        return shorter.addcdiv(tensor_of(state, "m"), root, value=-whole)


@dataclass(frozen=True)
class HandNAdam:
    """Adam with Nesterov's momentum (Dozat 2016), its momentum rising as torch has it."""

    rate: Rate
    beta1: float = 0.99
    beta2: float = 0.999
    epsilon: float = 1e-8
    rise: float = 4e-3

    def update(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: State, rate: float
    ) -> tuple[torch.Tensor, State]:
        """The weight and state after one update."""
        zero = torch.zeros_like(weight)
        step = number_of({"step": 0.0, **state}, "step") + 1
        mu = self.beta1 * (1 - 0.5 * 0.96 ** (step * self.rise))
        after = self.beta1 * (1 - 0.5 * 0.96 ** ((step + 1) * self.rise))
        # torch keeps this product as a float32 tensor.
        before = tensor_of({"product": torch.ones(()), **state}, "product")
        product = before * mu
        m = torch.lerp(tensor_of({"m": zero, **state}, "m"), gradient, 1 - self.beta1)
        v = tensor_of({"v": zero, **state}, "v") * self.beta2
        v = v.addcmul(gradient, gradient, value=1 - self.beta2)
        root = v.div(1 - self.beta2**step).sqrt().add(self.epsilon)
        moved = weight.addcdiv(gradient, root, value=-rate * (1 - mu) / (1 - product.item()))
        moved = moved.addcdiv(m, root, value=-rate * after / (1 - product.item() * after))
        return moved, {"m": m, "v": v, "step": step, "product": product}

    def predict(
        self, weight: torch.Tensor, state: State, rates: list[float], step: int
    ) -> torch.Tensor:
        """No method looks ahead with it."""
        assert not rates, "no preset predicts with NAdam"
        return weight


Hand = HandSgd | HandAdamW | HandNAdam


@dataclass(frozen=True)
class Version:
    """A stage's weights after so many updates, with the optimizer's state.

    moved: PipeMare's delta, or the last update. All by the parameter's name.
    """

    weights: dict[str, torch.Tensor]
    states: dict[str, State] = field(default_factory=dict)
    moved: dict[str, torch.Tensor] = field(default_factory=dict)
