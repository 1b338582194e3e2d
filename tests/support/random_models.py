"""Random models for hypothesis: branches, skips, ties, several inputs and outputs.

A :class:`RandomModel` is a list of steps; each reads earlier values and makes a new one of shape
[rows, TOKENS, WIDTH]. In an exact model every number is a small multiple of a power of two in
float64, so that sums are equal in whatever order they are taken, and runs can be compared bit for
bit even where a gradient is a sum over stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

TOKENS, WIDTH, VOCABULARY = 2, 4, 7

EXACT = (
    "linear",
    "tied",
    "add",
    "sub",
    "relu",
    "buffer",
    "swap",
    "unbind",
    "flat",
    "cat",
    "detach",
    "embed",
    "mask",
    "frozen",
    "offset",
    "table",
)
FLOATING = (*EXACT, "mul", "tanh", "dropout", "norm", "batch_norm", "softmax", "attend", "no_grad")


@dataclass(frozen=True)
class Step:
    """One operation; ``first`` and ``second`` index earlier values, ``number`` picks a variant."""

    kind: str
    first: int
    second: int
    number: int = 0


@dataclass(frozen=True)
class RandomModel:
    """A model as data; values 0 and 1 are the inputs. outputs: values returned besides the loss."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    exact: bool
    seed: int

    def build(self) -> nn.Module:
        """The module in training mode, the same each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return Net(self).train()

    def batch(self, rows: int = 4) -> dict[str, torch.Tensor]:
        """Keyword arguments for forward; ``mask`` has no batch dim."""
        generator = torch.Generator().manual_seed(self.seed + 1)

        def numbers(*shape: int) -> torch.Tensor:
            if self.exact:
                return torch.randint(-2, 3, shape, generator=generator).double()
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        return {
            "left": numbers(rows, TOKENS, WIDTH),
            "right": numbers(rows, TOKENS, WIDTH),
            "ids": torch.randint(0, VOCABULARY, (rows, TOKENS), generator=generator),
            "mask": torch.tensor([True, False, True, True]),
        }


class Net(nn.Module):
    """Runs the steps of a :class:`RandomModel`; every weight is named after its step."""

    def __init__(self, plan: RandomModel) -> None:
        super().__init__()
        self.plan = plan
        self.layers = nn.ModuleDict()
        self.shared = self._linear()
        for index, step in enumerate(plan.steps):
            layer = self._layer(step)
            if layer is not None:
                self.layers[f"step{index}"] = layer
        self.register_buffer("scale", torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64))
        self.register_buffer("moving", torch.ones(WIDTH, dtype=torch.float64), persistent=False)

    def _linear(self) -> nn.Linear:
        layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        if self.plan.exact:
            for weight in layer.parameters():
                weight.data = torch.randint(-1, 2, weight.shape).double()
        return layer

    def _layer(self, step: Step) -> nn.Module | None:
        match step.kind:
            case "linear":
                return self._linear()
            case "tied":
                layer = self._linear()
                layer.weight = self.shared.weight
                return layer
            case "frozen":
                return self._linear().requires_grad_(False)
            case "embed":
                layer = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
                layer.weight.data = torch.randint(-1, 2, layer.weight.shape).double()
                return layer
            case "norm":
                return nn.LayerNorm(WIDTH, dtype=torch.float64)
            case "batch_norm":
                return nn.BatchNorm1d(WIDTH, dtype=torch.float64)
            case "dropout":
                return nn.Dropout(0.25)
        return None

    def forward(
        self, left: torch.Tensor, right: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        values = [left, right]
        signs = (torch.arange(ids.shape[1], device=ids.device) + ids) % 3 - 1  # read by any step
        for index, step in enumerate(self.plan.steps):
            layer = self.layers[f"step{index}"] if f"step{index}" in self.layers else None
            values.append(self._step(step, layer, values, ids, mask, signs))
        last = values[-1]
        total = self.shared(last) * self.scale
        loss = total.sum() if self.plan.exact else total.square().mean()
        return {"loss": loss, **{f"value{i}": values[i] for i in self.plan.outputs}}

    def _step(
        self,
        step: Step,
        layer: Any,
        values: list[torch.Tensor],
        ids: torch.Tensor,
        mask: torch.Tensor,
        signs: torch.Tensor,
    ) -> torch.Tensor:
        x, y = values[step.first], values[step.second]
        rows, tokens, width = x.shape
        match step.kind:
            case "linear" | "tied" | "frozen" | "norm" | "dropout":
                return layer(x)
            case "batch_norm":
                return layer(x.reshape(rows * tokens, width)).view(rows, tokens, width)
            case "embed":
                return layer(ids) + x
            case "add":
                return x + y
            case "sub":
                return x - y
            case "mul":
                return x * y
            case "relu":
                return torch.relu(x)
            case "tanh":
                return torch.tanh(x)
            case "buffer":
                return x * self.scale + self.moving
            case "swap":
                front, back = x.chunk(2, dim=-1)
                return torch.cat([back, front], dim=-1)
            case "unbind":
                first, second = x.unbind(1)
                return torch.stack([second, first + y[:, 0]], dim=1)
            case "flat":
                return (x.reshape(rows * tokens, width) + y.reshape(-1, width)).view(
                    rows, tokens, width
                )
            case "cat":
                both = torch.cat([x, y], dim=1)
                return both[:, step.number % 2 :: 2][:, :tokens].reshape(rows, tokens, width)
            case "detach":
                return x.detach() + y
            case "no_grad":
                with torch.no_grad():
                    mean = x.mean(dim=-1, keepdim=True)
                return y - mean
            case "mask":
                return x.masked_fill(~mask, float(step.number % 3))
            case "offset":
                return x + torch.arange(tokens, device=x.device)[None, :, None] * 0.5
            case "table" if step.number % 2:
                return x * signs[:, :, None]
            case "table":
                return x.masked_fill((signs > 0)[:, :, None], 1.0)
            case "softmax":
                return torch.softmax(x + y, dim=-1)
            case "attend":
                return nn.functional.scaled_dot_product_attention(x, y, y, dropout_p=0.25)
        raise AssertionError(step.kind)


@st.composite
def random_models(draw: Any, exact: bool = False, longest: int = 10) -> RandomModel:
    """Models of 1 to ``longest`` steps; later steps read any earlier values, so skips are long."""
    kinds = EXACT if exact else FLOATING
    count = draw(st.integers(1, longest))
    steps = tuple(
        Step(
            kind=draw(st.sampled_from(kinds)),
            # mostly the newest value, so that little is dead
            first=draw(st.one_of(st.just(i + 1), st.integers(0, i + 1))),
            second=draw(st.integers(0, i + 1)),
            number=draw(st.integers(0, 5)),
        )
        for i in range(count)
    )
    outputs = draw(st.lists(st.integers(2, count + 1), max_size=2, unique=True))
    return RandomModel(steps, tuple(sorted(outputs)), exact, draw(st.integers(0, 1000)))


@st.composite
def random_starts(
    draw: Any, blocks: int, closed: Iterable[int], longest: int = 4
) -> tuple[int, ...]:
    """First block of each stage: a valid split into 1 to ``longest`` stages.

    closed: blocks after which no cut is allowed (``graph.meta["fxpart_no_cut"]``).
    """
    open_starts = [b + 1 for b in range(blocks - 1) if b not in set(closed)]
    if not open_starts:
        return (0,)
    chosen = draw(
        st.lists(st.sampled_from(open_starts), unique=True, max_size=min(longest, blocks) - 1)
    )
    return (0, *sorted(chosen))
