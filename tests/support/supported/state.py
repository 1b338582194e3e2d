"""State that forward keeps: buffers, attributes, containers, Python numbers."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import torch
from torch import nn

from supported.behavior import Script, behavior

AREA = "State that forward keeps"


def batches(count: int = 4, rows: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Regression batches of 4 features."""
    return [(torch.randn(rows, 4), torch.randn(rows, 1)) for _ in range(count)]


def around(layer: nn.Module) -> nn.Module:
    """The layer in the middle of a small regression model."""
    return nn.Sequential(nn.Linear(4, 8), layer, nn.ReLU(), nn.Linear(8, 1))


def script(layer: nn.Module) -> Script:
    """Train the layer inside a small regression model."""
    return Script(around(layer), batches(), nn.functional.mse_loss)


class Layer(nn.Module):
    """A layer with one registered buffer and a place for others."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("peak", torch.zeros(8))


# Each step writes what a whole batch would, however it is divided.
EVERY = ("one rank", "microbatches", "pipeline", "replicas")


@behavior(AREA, "a buffer written in place, once or repeatedly", *EVERY)
def in_place() -> Script:
    class Peak(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.peak.mul_(0.9).add_(0.1)
                self.peak.clamp_(max=0.5)
            return x + self.peak

    return script(Peak())


@behavior(AREA, "a buffer that forward assigns anew", *EVERY)
def buffer_assigned() -> Script:
    class Decay(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.peak = self.peak * 0.9 + 0.25
            return x * (1 + self.peak)

    return script(Decay())


@behavior(
    AREA, "a tensor attribute, no buffer, that forward assigns anew", "one rank", refused="FXP113",
    reason="a plain attribute is not in the state that stages own and checkpoints save",
)  # fmt: skip
def attribute_assigned() -> Script:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.level = torch.zeros(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.level = self.level + 0.5
            return x + self.level

    return script(Last())


@behavior(
    AREA, "a tensor in a dict of the module that forward replaces", "one rank", refused="FXP113",
    reason="the captured program would read the first value forever",
)  # fmt: skip
def dict_entry_replaced() -> Script:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = {"bias": torch.zeros(8)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache["bias"] = self.cache["bias"] + 0.5
            return x + self.cache["bias"]

    return script(Cache())


@behavior(
    AREA, "a deque of earlier activations that forward extends", "one rank", refused="FXP113",
    reason="containers that grow are Python state",
)  # fmt: skip
def deque_grows() -> Script:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.past: deque[torch.Tensor] = deque(maxlen=4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.past.append(x.detach().mean(0))
            return x + torch.stack(list(self.past)).mean(0)

    return script(Memory())


@behavior(
    AREA, "a tensor that the first forward creates", "one rank", refused="FXP113",
    reason="the captured program would create it in every step",
)  # fmt: skip
def lazily_created() -> Script:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.scale is None:
                self.scale = x.detach().abs().mean()
            return x / (self.scale + 1)

    return script(Lazy())


@behavior(
    AREA, "a warm-up flag that forward clears", "one rank", refused="FXP113",
    reason="the branch that was taken while capturing would be taken forever",
)  # fmt: skip
def flag_cleared() -> Script:
    class Warm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fresh = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fresh:
                self.fresh = False
                return x * 0.1
            return x

    return script(Warm())


@behavior(
    AREA, "a Python number of another object that forward counts up", "one rank", refused="FXP113",
    reason="the number is a constant of the captured program",
)  # fmt: skip
def counter_elsewhere() -> Script:
    class Clock:
        ticks = 0

    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clock = Clock()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.clock.ticks += 1
            return x / self.clock.ticks

    return script(Annealed())


@behavior(
    AREA, "Python's random numbers in forward", "one rank", refused="FXP113",
    reason="one draw would be a constant of the captured program; use torch's random functions",
)  # fmt: skip
def python_random() -> Script:
    class Jitter(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * random.uniform(0.5, 1.5)

    return script(Jitter())


@behavior(
    AREA, "NumPy's random numbers in forward", "one rank", refused="FXP113",
    reason="one draw would be a constant of the captured program; use torch's random functions",
)  # fmt: skip
def numpy_random() -> Script:
    class Jitter(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(np.random.rand())

    return script(Jitter())


@behavior(
    AREA, "a counter inside the loss", "one rank", refused="FXP113",
    reason="the number is a constant of the captured program",
)  # fmt: skip
def counter_in_loss() -> Script:
    seen = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(None)
        return nn.functional.mse_loss(output, target) / len(seen)

    return Script(around(nn.Tanh()), batches(), loss)


@behavior(AREA, "an integer buffer that counts calls", *EVERY)
def counter_buffer() -> Script:
    class Count(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x / self.calls.float()

    return script(Count())


@behavior(AREA, "buffers that count rows, and classes with torch.bincount(minlength=n)", *EVERY)
def counted_rows() -> Script:
    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 1)
            self.register_buffer("rows", torch.zeros((), dtype=torch.long))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))
            self.register_buffer("seen", torch.zeros(9, dtype=torch.long))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            counts = torch.bincount(ids.flatten(), minlength=9)
            self.rows += ids.shape[0]
            self.place[0] = (self.place[0] + ids.shape[0]) % 12
            self.seen += counts
            x = (self.words(ids) / counts[ids].unsqueeze(-1)).sum(1)
            return self.head(torch.tanh(x)) / (1 + self.place)

    rows = [(torch.randint(9, (8, 5)), torch.randn(8, 1)) for _ in range(4)]
    return Script(Seen(), rows, nn.functional.mse_loss)


@behavior(
    AREA, "a queue of earlier activations in a buffer",
    "one rank", "replicas", microbatches="FXP114", pipeline="FXP114",
    reason="a microbatch has a part of the activations",
)  # fmt: skip
def queue() -> Script:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.randn(12, 8))
            self.register_buffer("at", torch.zeros(1, dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            near = x @ self.keys.clone().T
            with torch.no_grad():
                self.keys[(self.at + torch.arange(x.shape[0])) % 12] = x.detach()
                self.at[0] = (self.at[0] + x.shape[0]) % 12
            return x + near.mean(1, keepdim=True)

    return script(Queue())
