"""Stage modules written by hand, their program, and the same modules run whole in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxpart.program.spec import (
    ConstantSpec,
    Dim,
    InputSpec,
    ProgramSpec,
    StageSpec,
    StateSpec,
    ValueSpec,
)
from fxpart.rng import microbatch_key, seeded

VOCABULARY, WIDTH = 11, 8


class HandStage(nn.Module):
    """A stage with its parameters as direct attributes.

    takes, gives: names of inputs and outputs. names: attribute -> original name.
    """

    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, str] = {}

    def parameter(self, attribute: str, name: str, *shape: int) -> None:
        value = torch.empty(*shape)
        self.names[attribute] = name
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        value.normal_(0, 0.3, generator=generator)
        self.register_parameter(attribute, nn.Parameter(value))

    def buffer(self, attribute: str, name: str, value: torch.Tensor) -> None:
        self.names[attribute] = name
        self.register_buffer(attribute, value)


class Embed(HandStage):
    takes = ("ids",)
    gives = ("e",)

    def __init__(self) -> None:
        super().__init__()
        self.parameter("w", "embed.weight", VOCABULARY, WIDTH)

    def forward(self, key: int, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (F.embedding(ids, self.w),)


class Mix(HandStage):
    """Uses a mask without a batch dim, and dropout."""

    takes = ("e", "mask")
    gives = ("m",)

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.dropout = dropout
        self.parameter("w", "mix.weight", WIDTH, WIDTH)
        self.parameter("b", "mix.bias", WIDTH)

    def forward(self, key: int, e: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = F.linear(torch.matmul(mask, e), self.w, self.b)
        if self.dropout and self.training:
            x = seeded(key, 0, torch.ops.aten.dropout.default, x, self.dropout, True)
        return (torch.tanh(x),)


class Norm(HandStage):
    """Batch statistics in buffers, and a skip from the first stage."""

    takes = ("e", "m")
    gives = ("n",)

    def __init__(self) -> None:
        super().__init__()
        self.parameter("w", "norm.weight", WIDTH)
        self.parameter("b", "norm.bias", WIDTH)
        self.buffer("mean", "norm.running_mean", torch.zeros(WIDTH))
        self.buffer("var", "norm.running_var", torch.ones(WIDTH))

    def forward(self, key: int, e: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = (m + e).flatten(0, 1)
        x = F.batch_norm(x, self.mean, self.var, self.w, self.b, self.training)
        return (x.view_as(m),)


class Head(HandStage):
    """The embedding again as output matrix (a tie), and the loss."""

    takes = ("n", "labels")
    gives = ("loss", "logits")

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.parameter("w", "embed.weight" if tied else "head.weight", VOCABULARY, WIDTH)

    def forward(self, key: int, n: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = F.linear(n, self.w)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Joined(HandStage):
    """Several hand-written stages as one: for the same model on fewer ranks."""

    def __init__(self, parts: Sequence[HandStage]) -> None:
        super().__init__()
        self.names = {}
        made = {name for part in parts for name in part.gives}
        self.takes = tuple(dict.fromkeys(n for p in parts for n in p.takes if n not in made))
        self.gives = tuple(name for part in parts for name in part.gives)
        self.parts = parts
        for part in parts:
            for attribute, name in part.names.items():
                own = name.replace(".", "_")
                tensor = getattr(part, attribute)
                if own in self.names:
                    setattr(part, attribute, getattr(self, own))
                elif isinstance(tensor, nn.Parameter):
                    self.register_parameter(own, tensor)
                else:
                    self.register_buffer(own, tensor)
                self.names[own] = name

    def forward(self, key: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = dict(zip(self.takes, inputs, strict=True))
        for part in self.parts:
            part.training = self.training
            made = part(key, *(values[name] for name in part.takes))
            values.update(zip(part.gives, made, strict=True))
        return tuple(values[name] for name in self.gives)


@dataclass
class Hand:
    """Stages and what the program needs to know about their values."""

    stages: list[HandStage]
    values: dict[str, tuple[str, tuple[Dim, ...], bool]]
    inputs: tuple[InputSpec, ...]
    symbols: dict[str, tuple[str, int]]
    constants: tuple[ConstantSpec, ...] = ()
    order: tuple[str, ...] = ()
    frozen: frozenset[str] = field(default_factory=frozenset)

    def spec(self) -> ProgramSpec:
        """The program, wired by names."""
        makers = {name: i for i, stage in enumerate(self.stages) for name in stage.gives}
        holders: dict[str, list[int]] = {}
        for index, stage in enumerate(self.stages):
            for name in stage.names.values():
                holders.setdefault(name, []).append(index)
        return ProgramSpec(
            inputs=self.inputs,
            constants=self.constants,
            symbols=self.symbols,
            stages=tuple(self._stage(i, makers, holders) for i in range(len(self.stages))),
            loss="loss",
            outputs=tuple(n for n in ("logits",) if n in makers),
            ties={name: tuple(at) for name, at in holders.items() if len(at) > 1},
            aliases={"head.tied": "embed.weight"} if "embed.weight" in holders else {},
            seed=7,
            parameters=self.order,
        )

    def _value(self, name: str) -> ValueSpec:
        given = {i.name: (i.dtype, i.shape, False) for i in self.inputs}
        dtype, shape, gradient = {**given, **self.values}[name]
        return ValueSpec(name=name, dtype=dtype, shape=shape, requires_grad=gradient)

    def _stage(
        self, index: int, makers: dict[str, int], holders: dict[str, list[int]]
    ) -> StageSpec:
        stage = self.stages[index]
        wanted = [
            name
            for name in stage.gives
            if name in ("loss", "logits") or any(name in s.takes for s in self.stages)
        ]
        stage.gives = stage.gives if isinstance(stage, Joined) else tuple(wanted)
        state = []
        for attribute, name in stage.names.items():
            tensor = getattr(stage, attribute)
            is_parameter = isinstance(tensor, nn.Parameter)
            state.append(
                StateSpec(
                    attribute=attribute,
                    name=name,
                    kind="parameter" if is_parameter else "buffer",
                    dtype="float32",
                    shape=tuple(tensor.shape),
                    requires_grad=is_parameter and tensor.requires_grad,
                    owner=holders[name][0],
                    written=not is_parameter,
                )
            )
        return StageSpec(
            index=index,
            inputs=tuple(self._value(name) for name in stage.takes),
            sources=tuple(makers.get(name, -1) for name in stage.takes),
            outputs=tuple(self._value(name) for name in stage.gives),
            targets=tuple(
                tuple(i for i, other in enumerate(self.stages) if name in other.takes)
                for name in stage.gives
            ),
            state=tuple(state),
        )


def language(
    cut: Sequence[int] = (1, 1, 1, 1),
    *,
    dropout: float = 0.2,
    tied: bool = True,
    frozen: bool = False,
) -> Hand:
    """A small tied language model on ``len(cut)`` stages; cut: how many parts each stage has.

    frozen: the embedding is not trained (then it is not tied either).
    """
    parts: list[HandStage] = [Embed(), Mix(dropout), Norm(), Head(tied and not frozen)]
    if frozen:
        parts[0].w.requires_grad_(False)
    stages: list[HandStage] = []
    for size in cut:
        mine, parts = parts[:size], parts[size:]
        stages.append(mine[0] if size == 1 else Joined(mine))
    hidden: tuple[str, tuple[Dim, ...], bool] = ("float32", ("b", "s", WIDTH), True)
    return Hand(
        stages,
        {
            "e": (hidden[0], hidden[1], not frozen),
            "m": hidden,
            "n": hidden,
            "loss": ("float32", (), True),
            "logits": ("float32", ("b", "s", VOCABULARY), True),
        },
        (
            InputSpec(name="ids", path=("ids",), dtype="int64", shape=("b", "s"), batch_dim=0),
            InputSpec(
                name="labels", path=("labels",), dtype="int64", shape=("b", "s"), batch_dim=0
            ),
            InputSpec(name="mask", path=("mask",), dtype="float32", shape=("s", "s")),
        ),
        {"b": ("ids", 0), "s": ("ids", 1)},
        constants=(ConstantSpec(path=("scale",), value=None),),
        order=("norm.weight", "embed.weight", "mix.weight", "mix.bias", "norm.bias"),
    )


def batch(rows: int = 8, length: int = 5, seed: int = 0) -> dict[str, Any]:
    """A batch for :func:`language`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, length + 1), generator=generator)
    mask = torch.tril(torch.ones(length, length))
    mask = mask / mask.sum(1, keepdim=True)
    return {
        "ids": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "mask": mask,
        "scale": None,
    }


class Whole:
    """The oracle: the same stages chained in one process, ties being one parameter."""

    def __init__(
        self, hand: Hand, optimizer: Callable[..., Any], clip: float | None = None
    ) -> None:
        self.spec = hand.spec()
        self.stages = hand.stages
        shared: dict[str, nn.Parameter] = {}
        for stage in self.stages:
            for attribute, name in stage.names.items():
                tensor = getattr(stage, attribute)
                if isinstance(tensor, nn.Parameter):
                    setattr(stage, attribute, shared.setdefault(name, tensor))
        order = self.spec.parameters or tuple(shared)
        self.named = {name: shared[name] for name in order if name in shared}
        self.named.update(shared)
        self.optimizer = optimizer([p for p in self.named.values() if p.requires_grad])
        self.clip = clip
        self.norm: torch.Tensor | None = None
        self.calls = 0
        self.rows: list[int] = []  # of each batch since the last update

    def backward(self, given: dict[str, Any], microbatches: int) -> torch.Tensor:
        """Forward and backward, microbatch by microbatch; batches weigh by rows."""
        rows = given["ids"].shape[0]
        self.rows.append(rows)
        count = min(microbatches, rows)
        cut = {n: torch.tensor_split(given[n], count) for n in ("ids", "labels")}
        total = None
        for index in range(count):
            piece = {n: parts[index] for n, parts in cut.items()}
            weight = piece["ids"].shape[0] / rows
            loss = self.run(piece | {"mask": given["mask"]}, index)["loss"]
            share = weight * (rows / self.rows[0])
            torch.autograd.backward([loss], [torch.full_like(loss, share)])
            part = loss.detach() * weight
            total = part if total is None else total + part
        self.calls += 1
        return total

    def run(self, values: dict[str, Any], index: int) -> dict[str, Any]:
        """One microbatch through all stages."""
        key = microbatch_key(self.spec.seed, self.calls, index)
        for stage in self.stages:
            outputs = stage(key, *(values[name] for name in stage.takes))
            values.update(zip(stage.gives, outputs, strict=True))
        return values

    def update(self) -> None:
        if len(self.rows) > 1:
            for parameter in self.named.values():
                if parameter.grad is not None:
                    gradient = parameter.grad
                    values = gradient.coalesce()._values() if gradient.is_sparse else gradient
                    values.div_(sum(self.rows) / self.rows[0])
        self.rows.clear()
        if self.clip is not None:
            parameters = list(self.named.values())
            self.norm = torch.nn.utils.clip_grad_norm_(parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, given: dict[str, Any], microbatches: int) -> torch.Tensor:
        loss = self.backward(given, microbatches)
        self.update()
        return loss

    def state(self) -> dict[str, torch.Tensor]:
        found = {name: p.detach() for name, p in self.named.items()}
        for stage in self.stages:
            for attribute, name in stage.names.items():
                found[name] = getattr(stage, attribute).detach()
        return found


ADAMW = partial(torch.optim.AdamW, lr=0.01)


class Branch(HandStage):
    """One of two branches side by side that share a matrix."""

    takes = ("e",)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.gives = (name,)
        self.parameter("w", "shared.weight", WIDTH, WIDTH)
        self.parameter("b", f"{name}.bias", WIDTH)

    def forward(self, key: int, e: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.tanh(F.linear(e, self.w, self.b)),)


class Meet(HandStage):
    takes = ("left", "right", "labels")
    gives = ("loss",)

    def __init__(self) -> None:
        super().__init__()
        self.parameter("w", "meet.weight", VOCABULARY, WIDTH)

    def forward(
        self, key: int, left: torch.Tensor, right: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        logits = F.linear(left * right, self.w)
        return (F.cross_entropy(logits.flatten(0, 1), labels.flatten()),)


def branches() -> Hand:
    """Embedding, two branches with one shared matrix, and the loss: four stages, no chain."""
    hidden: tuple[str, tuple[Dim, ...], bool] = ("float32", ("b", "s", WIDTH), True)
    chain = language()
    return Hand(
        [Embed(), Branch("left"), Branch("right"), Meet()],
        {"e": hidden, "left": hidden, "right": hidden, "loss": ("float32", (), True)},
        chain.inputs,
        chain.symbols,
        chain.constants,
        ("embed.weight", "shared.weight", "left.bias", "right.bias", "meet.weight"),
    )
