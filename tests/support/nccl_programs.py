"""Programs for the tests of transfers under NCCL's ordering rules."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import queued_programs
import torch
from hand_stages import ADAMW, Hand, HandStage
from nccl_rules import EmulatedTransport, Issued
from queued_batches import ROWS, batch
from runtime_programs import Bits, bits
from torch.nn import functional as F

from fxpart.errors import FxpartError
from fxpart.plan.model import Plan
from fxpart.program.replicas import get_original_stage, replicate_stages
from fxpart.program.spec import Dim, InputSpec
from fxpart.runtime import Trainer, connect
from fxpart.runtime.transport.interface import Transport
from fxpart.schedule.spec import SCHEDULES

WIDTH = 4
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Link(HandStage):
    """A layer of the chain; skips: it also reads the first layer's result."""

    def __init__(self, index: int, last: bool, skips: bool, tied: bool) -> None:
        super().__init__()
        self.first = index == 0
        before = ("x",) if self.first else (f"h{index - 1}",)
        skip = ("h0",) if index > 1 and skips else ()
        self.takes = (*before, *skip, "y") if last else (*before, *skip)
        self.gives = ("loss",) if last else (f"h{index}",)
        self.last = last
        self.parameter("w", f"layers.{index}.weight", WIDTH, WIDTH)
        self.shares = tied and (self.first or last)
        if self.shares:
            self.parameter("tied", "tied.weight", WIDTH, WIDTH)

    def forward(self, key: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        target = inputs[-1] if self.last else None
        values = inputs[:-1] if self.last else inputs
        h = torch.tanh(F.linear(values[0], self.w))
        if len(values) > 1:
            h = h + 0.5 * values[1]
        if self.shares:
            h = F.linear(h, self.tied)
        return (h,) if target is None else (((h - target) ** 2).mean(),)


def chain(stages: int, *, skips: bool = True, tied: bool = True) -> Hand:
    """Layers in a chain; each reads the first one's result, and the last shares its matrix."""
    hidden: tuple[str, tuple[Dim, ...], bool] = ("float32", ("b", WIDTH), True)
    values = {f"h{index}": hidden for index in range(stages - 1)}
    return Hand(
        [Link(index, index == stages - 1, skips, tied) for index in range(stages)],
        {**values, "loss": ("float32", (), True)},
        tuple(
            InputSpec(name=name, path=(name,), dtype="float32", shape=("b", WIDTH), batch_dim=0)
            for name in ("x", "y")
        ),
        {"b": ("x", 0)},
    )


def rows(count: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch for :func:`chain`."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(count, WIDTH, generator=generator) for name in ("x", "y")}


def placed(schedule: str, ranks: int) -> tuple[int, ...]:
    """The rank of each stage: two stages a rank where the schedule is for several."""
    spec = SCHEDULES[schedule]
    return spec.assign_ranks(ranks, spec.count_stages_per_rank(2 if spec.is_virtual else 1))


def train(
    transport: Transport, schedule: str, ranks: int, microbatches: int, steps: int = 2
) -> tuple[list[float], Bits]:
    """Train the chain, with an evaluation between the steps; losses and state."""
    seats = placed(schedule, ranks)
    hand, other = chain(len(seats)), chain(len(seats))
    local = [k for k, rank in enumerate(seats) if rank in transport.local]

    def evaluation() -> tuple[Any, dict[int, torch.nn.Module]]:
        spec = other.spec()
        for k in local:
            for attribute in hand.stages[k].names:
                setattr(other.stages[k], attribute, getattr(hand.stages[k], attribute))
        return spec, {k: other.stages[k].eval() for k in local}

    trainer = Trainer(
        hand.spec(), {k: hand.stages[k] for k in local}, ranks=seats, transport=transport,
        microbatches=microbatches, schedule=schedule, optimizer=ADAMW, evaluation=evaluation,
        clip_norm=0.5,
    )  # fmt: skip
    losses = []
    for step in range(steps):
        losses.append(float(trainer.step(rows(2 * microbatches, step))))
        losses.append(float(trainer.eval_step(rows(microbatches, 9))))
    state = bits(trainer.state_dict())
    trainer.close()
    return losses, state


def train_asynchronously(
    transport: Transport, stages: int, mode: str, steps: int = 5
) -> tuple[list[float], Bits]:
    """Train the chain without flushes but one in the middle; losses and state."""
    hand = chain(stages)
    modules = {k: stage for k, stage in enumerate(hand.stages) if k in transport.local}
    trainer = Trainer(
        hand.spec(), modules, ranks=range(stages), transport=transport, microbatches=4,
        optimizer=SGD, weights=mode,
    )  # fmt: skip
    found: list[Any] = []
    for step in range(steps):
        found.append(trainer.step(rows(8, step)))
        if step == 2:
            found += trainer.drain()
    found += trainer.drain()
    state = bits(trainer.state_dict())
    trainer.close()
    return [float(loss) for loss in found if loss is not None], state


def issue(transport: EmulatedTransport, schedule: str, ranks: int) -> list[Issued]:
    """The operations of a rank in its second step."""
    seats = placed(schedule, ranks)
    hand = chain(len(seats), skips=False)
    local = {k: hand.stages[k] for k, rank in enumerate(seats) if rank in transport.local}
    trainer = Trainer(
        hand.spec(), local, ranks=seats, transport=transport, microbatches=6, schedule=schedule,
    )  # fmt: skip
    for step in range(2):
        transport.issued.clear()
        trainer.backward(rows(12, step))
    return list(transport.issued)


def issue_asynchronously(
    transport: EmulatedTransport, stages: int, microbatches: int
) -> list[Issued]:
    """The operations of a rank from an empty pipeline to its flush, headers apart."""
    hand = chain(stages, skips=False, tied=False)
    modules = {k: stage for k, stage in enumerate(hand.stages) if k in transport.local}
    trainer = Trainer(
        hand.spec(), modules, ranks=range(stages), transport=transport, microbatches=2,
        optimizer=SGD, weights="stash",
    )  # fmt: skip
    transport.issued.clear()
    for step in range(microbatches // 2):
        trainer.step(rows(4, step))
    trainer.drain()
    return [each for each in transport.issued if each.dtype != torch.int64]


def train_replicas(
    transport: Transport, counts: Sequence[int], schedule: str
) -> dict[str, list[float]]:
    """Train the chain with so many replicas of each stage, one a rank; losses and state."""
    stages = len(counts)
    spec = replicate_stages(chain(stages).spec(), [range(n) for n in counts])
    modules = {
        k: chain(stages).stages[get_original_stage(spec, k)]
        for k in range(len(spec.stages))
        if k in transport.local
    }
    trainer = Trainer(
        spec, modules, ranks=range(len(spec.stages)), transport=transport, microbatches=6,
        schedule=schedule, optimizer=SGD,
    )  # fmt: skip
    losses = [float(trainer.step(rows(12, step))) for step in range(2)]
    state = {name: tensor.flatten().tolist() for name, tensor in trainer.state_dict().items()}
    return {"losses": losses, **state}


def fails(transport: Transport, schedule: str, ranks: Sequence[int], stage: int) -> str:
    """A stage raises in its second forward; the error that this rank raises."""
    hand = chain(len(ranks))
    local = {k: hand.stages[k] for k, rank in enumerate(ranks) if rank in transport.local}
    trainer = Trainer(
        hand.spec(), local, ranks=ranks, transport=transport, microbatches=4, schedule=schedule,
        optimizer=SGD,
    )  # fmt: skip
    if stage in local:
        calls, inner = [0], local[stage].forward

        def forward(key: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            calls[0] += 1
            if calls[0] == 2:
                raise ValueError("planted")
            return inner(key, *inputs)

        local[stage].forward = forward  # type: ignore[method-assign]
    try:
        trainer.step(rows(8, 0))
    except FxpartError as failure:
        after = float(trainer.step(rows(8, 0)))  # The transport is still usable.
        return f"{failure.problems[0].code} {failure.problems[0].where} {after:.6f}"
    return "no failure"


def train_on_ranks(schedule: str, ranks: int, microbatches: int) -> tuple[list[float], Bits]:
    """:func:`train` on rank processes."""
    return train(connect(ranks), schedule, ranks, microbatches)


def train_asynchronously_on_ranks(stages: int, mode: str) -> tuple[list[float], Bits]:
    """:func:`train_asynchronously` on rank processes."""
    return train_asynchronously(connect(stages), stages, mode)


def train_from_queues(plan: str) -> list[float]:
    """Train replicas that take microbatches from queues, on rank processes; losses."""
    made = queued_programs.trainer(Plan.loads(plan))
    found = [made.step(batch(count, step)) for step, count in enumerate(ROWS)]
    found += made.drain()
    found.append(made.eval_step(batch(10, 9)))
    made.close()
    return [float(loss) for loss in found if loss is not None]
