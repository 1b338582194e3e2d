"""Sharded stage modules written by hand: a small model on two stages, and each mesh rank's program.

The model: an embedding, a wide MLP with a residual, an output matrix tied to the embedding, and the
loss. Axis ``dp`` cuts the batch, ``tp`` the MLP's hidden dim (and the norm of nothing else).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import msgspec
import torch
from hand_stages import Hand, HandStage
from torch import nn
from torch.nn import functional as F

from fxpart import collectives
from fxpart.program.replicas import get_original_stage, replicate_stages
from fxpart.program.spec import (
    InputSpec,
    ProgramSpec,
    ShardingSpec,
    StageSpec,
    StateSharding,
    StateSpec,
    ValueSpec,
)
from fxpart.runtime import InProcess, Trainer
from fxpart.runtime.mesh.mesh_ranks import MeshRank, build_rank_table, get_pipeline_ranks
from fxpart.runtime.state.shard_layout import ShardLayout
from fxpart.runtime.transport.interface import Transport
from fxpart.sharding import Mesh

WORDS, WIDTH, HIDDEN = 7, 6, 10
SHAPES = {
    "embed.weight": (WORDS, WIDTH),
    "up.weight": (HIDDEN, WIDTH),
    "up.bias": (HIDDEN,),
    "down.weight": (WIDTH, HIDDEN),
    "down.bias": (WIDTH,),
    "scale": (),
}
ORDER = tuple(SHAPES)


def weights() -> dict[str, torch.Tensor]:
    """The whole model's parameters."""
    generator = torch.Generator().manual_seed(3)
    return {n: torch.randn(s, generator=generator) * 0.4 for n, s in SHAPES.items()}


def batch(rows: int = 8, length: int = 3, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (rows, length + 1), generator=generator)
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


class First(HandStage):
    """Embedding and the MLP: the up projection cut by rows, the down projection by columns."""

    takes = ("ids",)
    gives = ("h",)
    mesh: Any = None

    def __init__(self, axes: Sequence[str], zero3: bool, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.axes, self.zero3 = axes, zero3
        self.names = {}
        for attribute, name in (
            ("e", "embed.weight"), ("u", "up.weight"), ("ub", "up.bias"),
            ("d", "down.weight"), ("db", "down.bias"),
        ):  # fmt: skip
            self.names[attribute] = name
            self.register_parameter(attribute, nn.Parameter(state[name].clone()))

    def forward(self, key: int, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mesh, u, d = self.mesh, self.u, self.d
        if self.zero3:
            # Gathered in the reverse order of the cuts: tp is the major axis then.
            rows = HIDDEN // mesh.size("tp") if "tp" in self.axes else HIDDEN
            u = collectives.all_gather(mesh, u, "dp", 0, rows, 1, "P")
            d = collectives.all_gather(mesh, d, "dp", 0, WIDTH, 1, "P")
        e = F.embedding(ids, self.e)
        x = e
        if "tp" in self.axes:
            x = collectives.enter(mesh, x, "tp")
        x = F.linear(torch.tanh(F.linear(x, u, self.ub)), d)
        if "tp" in self.axes:
            x = collectives.all_reduce(mesh, x, "tp")
        return (e + x + self.db,)


class Last(HandStage):
    """The embedding again, a number, and the mean loss over all rows of all mesh ranks."""

    takes = ("h", "labels")
    gives = ("loss",)
    mesh: Any = None

    def __init__(self, axes: Sequence[str], state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.axes = axes
        self.names = {"e": "embed.weight", "s": "scale"}
        self.register_parameter("e", nn.Parameter(state["embed.weight"].clone()))
        self.register_parameter("s", nn.Parameter(state["scale"].clone()))

    def forward(self, key: int, h: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = F.linear(h, self.e) * (1 + self.s)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        parts = self.mesh.size("dp") if "dp" in self.axes else 1
        mean = total / (labels.numel() * parts)
        return (collectives.all_reduce(self.mesh, mean, "dp") if parts > 1 else mean,)


def sharding(mesh: str, zero: int = 0, zero3: bool = False) -> ShardingSpec:
    """Where everything lies."""
    axes = Mesh.parse(mesh).names
    data = ("dp",) if "dp" in axes else ()
    cut = {
        "up.weight": "tp:S(0)", "up.bias": "tp:S(0)", "down.weight": "tp:S(1)",
    } if "tp" in axes else {}  # fmt: skip
    if zero3:
        cut |= {
            name: ",".join(filter(None, (cut.get(name), "dp:S(0)")))
            for name in ("up.weight", "down.weight")
        }
    return ShardingSpec(
        mesh=mesh,
        inputs=tuple(
            InputSpec(name=n, path=(n,), dtype="int64", shape=("b", "s"), batch_dim=0)
            for n in ("ids", "labels")
        ),
        placements={n: "dp:S(0)" for n in ("ids", "labels") if data},
        state={
            name: StateSharding(
                shape=shape,
                placements=cut.get(name, ""),
                partial=() if "dp" in cut.get(name, "") else data,
            )
            for name, shape in SHAPES.items()
        },
        zero=zero,
        zero_axis="dp" if zero else "",
    )


def mesh_rank(
    index: int, given: ShardingSpec, stages: Sequence[int], counts: Sequence[int] = (1, 1)
) -> MeshRank:
    """One mesh rank's program and the modules of the stages that are here.

    counts: of the replicas of the two stages.
    """
    mesh, whole = Mesh.parse(given.mesh), weights()
    local = {n: ShardLayout.of(given, n, ()).part(t, index) for n, t in whole.items()}
    zero3 = "dp:S" in given.state["up.weight"].placements
    made: list[HandStage] = [First(mesh.names, zero3, local), Last(mesh.names, local)]
    hidden = ValueSpec(name="h", dtype="float32", shape=("b", "s", WIDTH), requires_grad=True)
    loss = ValueSpec(name="loss", dtype="float32", shape=(), requires_grad=True)
    user = {n: ValueSpec(name=n, dtype="int64", shape=("b", "s")) for n in ("ids", "labels")}
    state = [
        tuple(
            StateSpec(
                attribute=a, name=n, kind="parameter", dtype="float32",
                shape=tuple(getattr(stage, a).shape), requires_grad=True,
                owner=1 if n == "scale" else 0,
            )
            for a, n in stage.names.items()
        )
        for stage in made
    ]  # fmt: skip
    spec = ProgramSpec(
        inputs=given.inputs,
        constants=(),
        symbols={"b": ("ids", 0), "s": ("ids", 1)},
        stages=(
            StageSpec(
                index=0, inputs=(user["ids"],), sources=(-1,), outputs=(hidden,),
                targets=((1,),), state=state[0],
            ),
            StageSpec(
                index=1, inputs=(hidden, user["labels"]), sources=(0, -1), outputs=(loss,),
                targets=((),), state=state[1],
            ),
        ),
        loss="loss",
        repeat=("rows", "rows"),
        outputs=(),
        ties={"embed.weight": (0, 1)},
        seed=7,
        parameters=ORDER,
        sharding=given,
    )  # fmt: skip
    spec = replicate_stages(spec, [range(count) for count in counts])
    modules = {s: deepcopy(made[get_original_stage(spec, s)]) for s in stages}
    return MeshRank(index, spec, modules)


def trainer(
    transport: Transport,
    mesh: str,
    *,
    zero: int = 0,
    zero3: bool = False,
    ranks: Sequence[Sequence[int]] | None = None,
    counts: Sequence[int] = (1, 1),
    **options: Any,
) -> Trainer:
    """A trainer of this process's mesh ranks. ranks: by stage and mesh rank, by default in order.

    counts: of the replicas of the two stages.
    """
    given = sharding(mesh, zero, zero3)
    size = Mesh.parse(mesh).size
    every = range(0, size * sum(counts), size)
    table = build_rank_table(every if ranks is None else ranks, size)
    here = [
        (index, [s for s, r in enumerate(get_pipeline_ranks(table, index)) if r in transport.local])
        for index in range(size)
    ]
    mesh_ranks = [mesh_rank(index, given, stages, counts) for index, stages in here if stages]
    return Trainer(
        mesh_ranks[0].spec,
        {},
        ranks=table,
        transport=transport,
        mesh_ranks=mesh_ranks,
        **{"microbatches": 2, "optimizer": torch.optim.AdamW, **options},
    )


def data_parallel(
    make: Callable[[], Hand], size: int, zero: int, seats: Sequence[int] = (), **options: Any
) -> Trainer:
    """Any program of ``hand_stages`` on mesh ranks that share its rows, all in this process.

    seats: of each stage, the place in a pipeline; by default one after another.
    """
    mesh_ranks = []
    for index in range(size):
        hand = make()
        spec = hand.spec()
        held = {s.name: s.shape for stage in spec.stages for s in stage.state}
        given = ShardingSpec(
            mesh=f"dp={size}",
            inputs=spec.inputs,
            placements={i.name: "dp:S(0)" for i in spec.inputs if i.batch_dim == 0},
            state={n: StateSharding(shape=s, partial=("dp",)) for n, s in held.items()},
            zero=zero,
            zero_axis="dp" if zero else "",
        )
        last = hand.stages[-1]
        last.forward = partial(_averaged, last, last.forward)  # type: ignore[method-assign]
        modules = dict(enumerate(hand.stages))
        mesh_ranks.append(MeshRank(index, msgspec.structs.replace(spec, sharding=given), modules))
    ranks = [size * seat for seat in seats or range(len(mesh_ranks[0].modules))]
    transport = InProcess(size * len(set(ranks)))
    given_options = {"microbatches": 4, "optimizer": torch.optim.AdamW, **options}
    return Trainer(
        mesh_ranks[0].spec,
        {},
        ranks=ranks,
        transport=transport,
        mesh_ranks=mesh_ranks,
        **given_options,
    )


def _averaged(
    stage: Any, forward: Callable[..., tuple[torch.Tensor, ...]], *inputs: Any
) -> tuple[torch.Tensor, ...]:
    """The loss as the mean over the mesh ranks, each of which has as many rows."""
    loss, *rest = forward(*inputs)
    return (collectives.all_reduce(stage.mesh, loss / stage.mesh.size("dp"), "dp"), *rest)


class Whole:
    """The oracle: the model in one process, its gradients by autograd alone."""

    def __init__(self, optimizer: Any = torch.optim.AdamW, clip: float | None = None) -> None:
        self.p = {n: nn.Parameter(t) for n, t in weights().items()}
        self.optimizer, self.clip = optimizer(list(self.p.values())), clip
        self.norm: torch.Tensor | None = None
        self.rows: list[int] = []  # of each batch since the last update

    def loss(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        p = self.p
        e = F.embedding(given["ids"], p["embed.weight"])
        x = torch.tanh(F.linear(e, p["up.weight"], p["up.bias"]))
        h = e + F.linear(x, p["down.weight"]) + p["down.bias"]
        logits = F.linear(h, p["embed.weight"]) * (1 + p["scale"])
        return F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten())

    def backward(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of the batch; microbatches and batches weigh by rows."""
        self.rows.append(len(given["ids"]))
        loss = self.loss(given)
        (loss * (self.rows[-1] / self.rows[0])).backward()
        return loss.detach()

    def update(self) -> None:
        if len(self.rows) > 1:
            for tensor in self.p.values():
                if tensor.grad is not None:
                    tensor.grad.div_(sum(self.rows) / self.rows[0])
        self.rows.clear()
        if self.clip is not None:
            self.norm = torch.nn.utils.clip_grad_norm_(list(self.p.values()), self.clip)
        self.optimizer.step()
        self.gradients = {n: t.grad.clone() for n, t in self.p.items() if t.grad is not None}
        self.optimizer.zero_grad()

    def step(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = self.backward(given)
        self.update()
        return loss

    def state(self) -> dict[str, torch.Tensor]:
        return {n: t.detach() for n, t in self.p.items()}
