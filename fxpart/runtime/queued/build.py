"""What a trainer from queues is made of: an optimizer and a worker for each copy of a process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxpart.runtime.groups import own
from fxpart.runtime.optimizer import make_optimizer
from fxpart.runtime.queued.gradients import Parameters, Tied
from fxpart.runtime.queued.layout import Layout
from fxpart.runtime.queued.weights import QueueWeights
from fxpart.runtime.queued.worker import Clip, Worker
from fxpart.runtime.rows import check_gradients
from fxpart.runtime.stage import StageTable

if TYPE_CHECKING:
    from fxpart.runtime.queued.trainer import QueueTrainer
    from fxpart.runtime.state import Place
    from fxpart.runtime.stream.optimizers import Optimizers


def make_worker(trainer: QueueTrainer, stage: int, layout: Layout) -> Worker:
    """The worker of a copy, with its weights and its part of the mail."""
    module = trainer._lanes[0].modules[stage]
    optimizer, options, queue = trainer.optimizers[stage, 0], trainer.options, trainer.queue
    mail, spec = trainer._mail, trainer.spec
    bound = trainer.dealt[layout.group(stage)]
    table = StageTable.of(
        spec, spec.stages[stage], module, layout.found(stage), False,
        options.recomputes(len(spec.stages)).get(stage, "none"),
    )  # fmt: skip
    weights = QueueWeights(module, optimizer, queue.mode, bound if table.trains else 0)
    if table.keeping.recompute is not None:
        weights.recompute(table.keeping.recompute)
    return Worker(
        stage, layout, table, weights,
        held_of(trainer, stage, layout),
        bound=bound,
        clip=Clip(options.clip_norm, options.clip_value),
        device=trainer._devices[trainer._ranks[stage][0]],
        post=lambda target, said, tensors: mail.post(stage, target, said, tensors),
        tell=lambda event: mail.tell(stage, event),
        events=trainer.events,
    )  # fmt: skip


def held_of(trainer: QueueTrainer, stage: int, layout: Layout) -> Parameters:
    """The trainable parameters of a copy, and which of them other groups hold too."""
    mine = parameters_of(trainer, stage)
    places = {name: place for place, (name, _) in enumerate(mine)}
    ties = {
        name: Tied(places[name], layout.owns(stage, name))
        for names in layout.ties(stage).values()
        for name in names
    }
    return Parameters([p for _, p in mine], trainer._held.rows, ties)


def make_optimizers(trainer: QueueTrainer, given: Any) -> Optimizers:
    """One for each copy of this process, with the trainer's groups."""
    made: dict[Place, torch.optim.Optimizer] = {}
    for stage in trainer._lanes[0].modules:
        mine = parameters_of(trainer, stage)
        optimizer = make_optimizer(
            given, [p for _, p in mine], own(trainer._groups, mine), [name for name, _ in mine]
        )
        check_gradients(optimizer, trainer._state, trainer._held.rows)
        made[stage, 0] = optimizer
    return made


def parameters_of(trainer: QueueTrainer, stage: int) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters of a copy, in the model's order."""
    return [
        (name, tensor)
        for name, entry in trainer._state.entries.items()
        if entry.trainable and isinstance(tensor := entry.copies.get((stage, 0)), nn.Parameter)
    ]
