"""Random cases of planning: a small model, a cluster and constraints, each from a seed.

Models are chains of uneven layers, residual and transformer blocks, embeddings with tied heads,
networks with long skips, and parallel branches. Clusters have 1 to 8 devices of one or two kinds on
1 to 3 hosts of any sizes, with links between all, by host, or by device and direction.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import msgspec
import torch
from torch import Tensor, nn

import fxpart
from fxpart import Cluster, Device, Link, Plan, Program
from fxpart.costs import CostModel

VOCABULARY = 24
TOKENS = 3
FAMILIES = ("chain", "residual", "transformer", "tied", "skips", "branches")
Constraints = dict[str, int | float | str | bool]


@dataclass(frozen=True)
class NetworkShape:
    """A model as data. widths: of the layers of a chain, else the first is the model's width."""

    family: str
    widths: tuple[int, ...]
    depth: int
    rows: int

    def build(self) -> nn.Module:
        """Return the module, the same each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Network(self)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            if self.family in ("transformer", "tied"):
                ids = torch.randint(0, VOCABULARY, (2, self.rows, TOKENS))
                return ids[0], ids[1]
            targets = torch.randint(0, VOCABULARY, (self.rows,))
            return torch.randn(self.rows, self.widths[0]), targets


class Attention(nn.Module):
    """Self-attention with heads of 4 channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = (
            part.view(rows, tokens, width // 4, 4).transpose(1, 2)
            for part in self.project(x).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return out


class Layer(nn.Module):
    """A residual block, with attention in transformers."""

    def __init__(self, width: int, inner: int, attends: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width) if attends else None
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.attention is not None:
            x = x + self.attention(x)
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Network(nn.Module):
    """The model of a :class:`NetworkShape`; its output are logits."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.family = shape.family
        width, others = shape.widths[0], shape.widths[1:]
        tokens = shape.family in ("transformer", "tied")
        self.embedding = nn.Embedding(VOCABULARY, width) if tokens else None
        if shape.family == "chain":
            pairs = zip(shape.widths, others, strict=False)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairs)
            width = shape.widths[-1]
        elif shape.family in ("skips", "branches"):
            self.layers = nn.ModuleList(
                nn.Sequential(
                    nn.Linear(width, others[i % len(others)]),
                    nn.Tanh(),
                    nn.Linear(others[i % len(others)], width),
                )
                for i in range(shape.depth)
            )
        else:
            self.layers = nn.ModuleList(
                Layer(width, others[i % len(others)], tokens) for i in range(shape.depth)
            )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if shape.family == "tied" and self.embedding is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        if self.family == "skips":
            kept = []
            half = (len(self.layers) + 1) // 2
            for layer in self.layers[:half]:
                kept.append(x)
                x = layer(x)
            for layer in self.layers[half:]:
                x = layer(x) + kept.pop()
        elif self.family == "branches":
            x = torch.stack([layer(x) for layer in self.layers]).sum(0)
        else:
            for layer in self.layers:
                x = layer(x)
        out: Tensor = self.head(x)
        return out


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy over all rows and tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class PlanningCase:
    """A model, a cluster and constraints. seed: reproduces it."""

    seed: int
    shape: NetworkShape
    cluster: Cluster
    constraints: Constraints = field(default_factory=dict)

    def plan(self, cluster: Cluster | None = None, **constraints: int | float | str | bool) -> Plan:
        """Return the best plan. cluster: instead of the case's. constraints: added to them."""
        return self.compile(cluster, **constraints).plan

    def compile(
        self,
        cluster: Cluster | None = None,
        *,
        cost_model: str | CostModel = "auto",
        **constraints: int | float | str | bool,
    ) -> Program:
        """Return the program of the best plan."""
        return captured(self.shape).replan(
            cluster or self.cluster,
            constraints={**self.constraints, **constraints},
            cost_model=cost_model,
        )

    def with_constraints(self, **constraints: int | float | str | bool) -> PlanningCase:
        """Return the case with these constraints alone."""
        return replace(self, constraints=dict(constraints))


@lru_cache(maxsize=64)
def captured(shape: NetworkShape) -> Program:
    """Return the program of a model on one device, captured once."""
    x, y = shape.batch()
    one = Cluster(name="one", devices=(_device("d0", "h0", 1e10, 1e9, 1 << 40),))
    return fxpart.compile(
        shape.build(), one, example_inputs=(x, y), loss=mean_loss, check="off", seed=0
    )


def draw_case(seed: int, constrained: bool = True) -> PlanningCase:
    """Return the case of a seed. constrained: also with constraints, in every second case."""
    rng = random.Random(f"planning {seed}")
    shape = draw_shape(rng)
    cluster = draw_cluster(rng, count_state_bytes(shape))
    given = draw_constraints(rng, len(cluster.devices)) if rng.random() < 0.5 else {}
    return PlanningCase(seed, shape, cluster, given if constrained else {})


def draw_shape(rng: random.Random) -> NetworkShape:
    """Return a model of 2 to 7 layers."""
    family = rng.choice(FAMILIES)
    width = rng.choice((8, 12, 24))
    if family == "chain":
        widths = (width, *(rng.choice((6, 8, 12, 24, 48, 96)) for _ in range(rng.randint(2, 6))))
        return NetworkShape(family, widths, len(widths) - 1, rng.choice((4, 6, 8, 12)))
    inner = tuple(rng.choice((1, 2, 3, 4, 8)) * width for _ in range(rng.randint(1, 3)))
    return NetworkShape(family, (width, *inner), rng.randint(2, 5), rng.choice((4, 6, 8, 12)))


@lru_cache(maxsize=1024)
def count_state_bytes(shape: NetworkShape) -> int:
    """Return the bytes of parameters, gradients and the state of AdamW."""
    return sum(16 * p.numel() for p in shape.build().parameters())


def draw_cluster(rng: random.Random, state: int) -> Cluster:
    """Return a cluster whose devices have enough memory, or little, for so many bytes."""
    count = rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8))
    hosts = rng.randint(1, min(3, count))
    homes = sorted(rng.choices(range(hosts), k=count))
    memory = int(state * rng.choice((0.4, 0.7, 1.0, 1.6, 3, 50, 50, 50))) + 4096
    rate = rng.choice((1, 10, 100)) * 1e8
    kinds = [(1.0, 1.0)]
    if count > 1 and rng.random() < 0.4:
        kinds.append((rng.choice((0.3, 0.5, 2.0, 5.0)), rng.choice((0.5, 1.0, 1.5))))
    types = sorted(rng.randrange(len(kinds)) for _ in range(count))
    if rng.random() < 0.3:
        rng.shuffle(types)
    devices = tuple(
        _device(
            f"d{i}", f"h{home}", rate * kinds[t][0], rate / 4 * kinds[t][0],
            int(memory * kinds[t][1]), f"kind{t}",
        )
        for i, (home, t) in enumerate(zip(homes, types, strict=True))
    )  # fmt: skip
    return Cluster(name="drawn", devices=devices, links=_draw_links(rng, devices, rate))


def _device(
    name: str, host: str, flops: float, bandwidth: float, memory: int, model: str = "made"
) -> Device:
    return Device(
        name=name, kind="gpu", model=model, host=host, memory=memory, flops={"float32": flops},
        bandwidth=bandwidth,
    )  # fmt: skip


def _draw_links(rng: random.Random, devices: tuple[Device, ...], rate: float) -> tuple[Link, ...]:
    """Return equal links, links by host, or links of each device and direction."""

    def link(source: str, target: str, kind: str = "", **fields: bool) -> Link:
        speed = rate * rng.choice((0.003, 0.03, 0.3, 3.0)) / (3.0 if kind else 1.0)
        return Link(
            source=source, target=target, latency=rng.choice((0.0, 1e-7, 1e-6, 1e-5)),
            bandwidth=speed, kind=kind, **fields,
        )  # fmt: skip

    kind = rng.choice(("equal", "hosts", "hosts", "directed"))
    if kind == "equal":
        return (link("*", "*"),)
    if kind == "directed" and 1 < len(devices) <= 5:
        return tuple(
            link(a.name, b.name, "net" if a.host != b.host else "")
            for a in devices
            for b in devices
            if a.name != b.name
        )
    hosts = sorted({device.host for device in devices})
    inside = tuple(link(host, host) for host in hosts)
    if rng.random() < 0.5:
        shared = {"shared": True} if rng.random() < 0.3 else {}
        return (*inside, link("*", "*", "net", **shared))
    return (*inside, *(link(a, b, "net") for a in hosts for b in hosts if a != b))


def draw_constraints(rng: random.Random, devices: int) -> Constraints:
    """Return constraints of one kind."""
    choices: list[Callable[[], Constraints]] = [
        lambda: {"mode": "async"},
        lambda: {"mode": "auto"},
        lambda: {"mode": "queue"},
        lambda: {"stages": rng.randint(1, min(3, devices))},
        lambda: {"mesh": "none"},
        lambda: {"mesh": rng.choice(("tp=2", "dp=2"))} if devices > 1 else {},
        lambda: {"zero": rng.randint(0, 3)},
        lambda: {"schedule": rng.choice(("gpipe", "1f1b,gpipe", "zb-h1", "interleaved,1f1b"))},
        lambda: {"microbatches": rng.choice((1, 2, 4))},
        lambda: {"copies": rng.choice(("none", "always"))},
        lambda: {"forbid": rng.choice(("zero", "tp=2", "dp=2", "pp=1"))},
    ]
    return rng.choice(choices)()


def with_devices(cluster: Cluster, devices: tuple[Device, ...]) -> Cluster:
    """Return the cluster with other devices and the same links."""
    return msgspec.structs.replace(cluster, devices=devices)
