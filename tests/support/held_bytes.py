"""What stages really hold for the backward, run one after another on real tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from stage_runs import Stages, assigned
from torch import fx

from fxpart.capture import CapturedModel
from fxpart.cluster.model import Cluster
from fxpart.pricing.partition import price
from fxpart.solver.objective import evaluate
from fxpart.solver.problem import PartitionChoice


@dataclass(frozen=True)
class Held:
    """Bytes of a stage for one microbatch after its forward.

    kept: what autograd saved, what was received and what is to be sent, each storage once, without
    parameters and buffers; the user's inputs with the first stage that saves them. expanded: how
    much more the messages that are sent have than their storages (broadcast masks), since a message
    is a copy.
    """

    kept: int
    expanded: int


def really_held(
    captured: CapturedModel,
    graph: fx.GraphModule,
    starts: Sequence[int],
    inputs: Sequence[torch.Tensor],
) -> list[Held]:
    """Run the stages that start at these blocks and count."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return list(_held(captured, graph, starts, inputs))


def _held(
    captured: CapturedModel,
    graph: fx.GraphModule,
    starts: Sequence[int],
    inputs: Sequence[torch.Tensor],
) -> Iterator[Held]:
    stages = Stages(captured, assigned(graph, starts))
    names = [spec.name for spec in stages.spec.inputs]
    values = dict(zip(names, inputs, strict=True))
    alive: list[object] = []  # an address that is freed could be that of the next tensor
    counted: set[int] = set()
    given = {t.untyped_storage().data_ptr() for t in inputs}
    for spec, module in zip(stages.spec.stages, stages.modules, strict=True):
        arguments, received = [], []
        for value, source in zip(spec.inputs, spec.sources, strict=True):
            tensor = values[value.name]
            if source >= 0:
                tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
                received.append(tensor.requires_grad_(value.requires_grad))
            arguments.append(tensor)
        state = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
        kept = {t.untyped_storage().data_ptr(): t.nbytes for t in received}

        def pack(t: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            storage = t.untyped_storage()
            alive.append(storage)
            kept[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            results = module(0, *arguments)
        alive.extend((results, arguments))
        values |= {v.name: t for v, t in zip(spec.outputs, results, strict=True)}
        expanded = 0
        for result, targets in zip(results, spec.targets, strict=True):
            if targets:
                pack(result)
                expanded += max(0, result.nbytes - result.untyped_storage().nbytes())
        own = {at: size for at, size in kept.items() if at not in state and at not in counted}
        counted |= given & kept.keys()
        yield Held(sum(own.values()), expanded)


def predicted(
    captured: CapturedModel, graph: fx.GraphModule, starts: Sequence[int], rows: int
) -> list[int]:
    """The same as the plan's prediction counts it: kept and messages, without workspace."""
    problem, _ = price(
        graph, captured, Cluster.local(max(len(starts), 1)), batch_size=rows, microbatches=1
    )
    choice = PartitionChoice(variant=0, schedule="1f1b", starts=tuple(starts))
    stages = evaluate(problem, choice).stages
    return [s.memory.activations - s.workspace + s.memory.transfers for s in stages]


def first_rows(
    captured: CapturedModel, inputs: Sequence[torch.Tensor], rows: int
) -> list[torch.Tensor]:
    """The inputs' first rows, in storages of their own."""
    return [
        t if spec.batch_dim is None
        else t.narrow(spec.batch_dim, 0, rows).clone(memory_format=torch.contiguous_format)
        for t, spec in zip(inputs, captured.inputs, strict=True)
    ]  # fmt: skip


def even_starts(blocks: int, stages: int) -> tuple[int, ...]:
    """Starts that cut blocks into about equal parts."""
    return tuple(sorted({i * blocks // stages for i in range(stages)}))


def check_held(
    captured: CapturedModel,
    graph: fx.GraphModule,
    starts: Sequence[int],
    inputs: Sequence[torch.Tensor],
) -> None:
    """Assert that prediction and reality are equal to the byte; expanded messages count whole."""
    rows = next(t.shape[s.batch_dim] for t, s in zip(inputs, captured.inputs, strict=True)
                if s.batch_dim is not None)  # fmt: skip
    real = really_held(captured, graph, starts, inputs)
    found = predicted(captured, graph, starts, rows)
    for stage, (ours, held) in enumerate(zip(found, real, strict=True)):
        over = ours - held.kept
        assert 0 <= over <= held.expanded, f"stage {stage} of {starts}: {ours}, really {held}"
