"""Stages of a program for torch.distributed.pipelining, its schedules and torchtitan.

    stages = program.to_pipeline_stages()
    schedule = Schedule1F1B(stages[0], **stages.options)
    losses = []
    schedule.step(**stages.feed(batch), losses=losses)
    stages.share_gradients()   # of weights tied across stages
    optimizer.step()

Limits of torch's runtime: skip connections are forwarded stage by stage, the caller reduces the
gradients of tied weights, and all microbatches have the same number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fxpart.accelerator import CUDA, find_accelerator
from fxpart.codegen.materialization import constants_of, materialize
from fxpart.codegen.mesh_programs.microbatch_graph import divide_graph
from fxpart.codegen.mesh_programs.row_dependence import couplings, resolve_microbatches
from fxpart.codegen.stage_loader import load_stage
from fxpart.errors import error
from fxpart.interop.chain_stage import (
    FEED,
    MICROBATCH,
    ChainMicrobatches,
    ChainStage,
    boundaries,
    make_meta_tensors,
)
from fxpart.plan.schedule import stage_of
from fxpart.program.spec import ProgramSpec
from fxpart.rng import microbatch_key
from fxpart.runtime.batch.batch_reader import BatchReader, MicrobatchSplit
from fxpart.runtime.host.gpus import local_device
from fxpart.runtime.transport.process_group import connect

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

    from fxpart.api import Program


class PipelineStages(Sequence[Any]):
    """This rank's PipelineStage objects in stage order, and options of their schedule.

    options: keyword arguments of any schedule class: n_microbatches, loss_fn, scale_grads.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        modules: Mapping[int, nn.Module],
        *,
        ranks: Sequence[int],
        microbatches: int,
        batch: Any,
        device: torch.device,
        group: Any = None,
    ) -> None:
        """Create the stages. modules: this rank's stage modules. ranks: group rank of each stage.

        batch: a global batch; later ones must have the same shapes. Raises FXP109 if the program is
        not a chain, FXP105 if the batch does not fit or is not divisible into equal microbatches.
        """
        from torch.distributed.pipelining import PipelineStage

        crossing = boundaries(spec)
        self.spec = spec
        self.microbatches = microbatches
        self.options = {"n_microbatches": microbatches, "loss_fn": take_loss, "scale_grads": True}
        self._reader = BatchReader(spec)
        self._calls = 0
        self._group = group
        self._ranks = tuple(ranks)
        self._modules = dict(sorted(modules.items()))
        self._shapes: Any = None
        sizes = self._read(batch).sizes[0]
        self._used = {
            value.name
            for index in self._modules
            for value, source in zip(
                spec.stages[index].inputs, spec.stages[index].sources, strict=True
            )
            if source < 0
        }
        self._stages: list[PipelineStage] = []
        for index, module in self._modules.items():
            last = index == len(spec.stages) - 1
            # With both given, torch does not run stages to infer shapes, which would update running
            # statistics of batch norms, and look up embedding rows that do not exist.
            taken = () if index == 0 else make_meta_tensors(crossing[index - 1], sizes)
            given = (
                (torch.empty(1, device="meta"),)
                if last
                else make_meta_tensors(crossing[index], sizes)
            )
            stage = PipelineStage(
                ChainStage(module, spec, spec.stages[index], crossing),
                index,
                len(spec.stages),
                device,
                input_args=taken,
                output_args=given,
                group=group,
            )
            stage.stage_index_to_group_rank = dict(enumerate(self._ranks))
            self._stages.append(stage)

    def __len__(self) -> int:
        """Return the number of stages on this rank."""
        return len(self._stages)

    def __getitem__(self, index: Any) -> Any:
        """Return a stage, or a list of stages."""
        return self._stages[index]

    def feed(self, batch: Any) -> dict[str, Any]:
        """Return the keyword arguments of ``schedule.step`` for a global batch; every rank must
        call it.

        Random ops get the keys of fxpart's own step of the same number. FXP105 for a batch that
        does not fit.
        """
        cut = self._read(batch)
        seed = self.spec.seed
        keys = [microbatch_key(seed, self._calls, i) for i in range(self.microbatches)]
        self._calls += 1
        used = [{n: t for n, t in piece.items() if n in self._used} for piece in cut.inputs]
        numbers = torch.arange(self.microbatches)
        return {MICROBATCH: numbers, FEED: ChainMicrobatches(used, keys), "target": numbers}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters with their names in the model."""
        for index, module in self._modules.items():
            for state in self.spec.stages[index].state:
                tensor = getattr(module, state.attribute)
                if isinstance(tensor, nn.Parameter):
                    yield state.name, tensor

    def share_gradients(self) -> None:
        """Reduce the gradients of tied weights; every rank calls it after a step.

        Otherwise tied weights would diverge. The sum is passed from the last stage to the first and
        back.
        """
        held = {
            (index, state.name): getattr(module, state.attribute)
            for index, module in self._modules.items()
            for state in self.spec.stages[index].state
        }
        for name, stages in self.spec.ties.items():
            steps = list(pairwise(sorted(stages, reverse=True)))
            back = [(target, source) for source, target in reversed(steps)]
            for source, target in (*steps, *back):
                given, receiver = held.get((source, name)), held.get((target, name))
                if any(t is not None and not t.requires_grad for t in (given, receiver)):
                    continue  # frozen
                received = self._pass_gradient(given, receiver, source, target)
                if receiver is not None and received is not None:
                    own = _gradient(receiver)
                    receiver.grad = own.add_(received) if source > target else own.copy_(received)

    def _pass_gradient(
        self, given: torch.Tensor | None, receiver: torch.Tensor | None, source: int, target: int
    ) -> torch.Tensor | None:
        """Pass the gradient from one stage to another; return it if the target is on this rank."""
        if given is not None and receiver is not None:
            return _gradient(given)
        if given is not None:
            dist.send(_gradient(given), group=self._group, group_dst=self._ranks[target])
        if receiver is not None:
            received = torch.empty_like(receiver, requires_grad=False)
            dist.recv(received, group=self._group, group_src=self._ranks[source])
            return received
        return None

    def _read(self, batch: Any) -> MicrobatchSplit:
        cut = self._reader.read(batch, self.microbatches)
        shapes = [{n: (t.shape, t.dtype) for n, t in piece.items()} for piece in cut.inputs]
        expected_shapes = self._shapes or shapes[0]
        if len(cut.rows) != self.microbatches or any(piece != expected_shapes for piece in shapes):
            expected = ", ".join(
                f"{name} {list(shape)}" for name, (shape, _) in expected_shapes.items()
            )
            raise error(
                "FXP105",
                where=f"a batch of {sum(cut.rows)} rows",
                why=f"torch's stages need {self.microbatches} microbatches of one shape: "
                f"{expected}",
                fix="use batches of one size, a multiple of the microbatches (drop_last=True)",
            )
        self._shapes = expected_shapes
        return cut


def take_loss(output: torch.Tensor, target: Any) -> torch.Tensor:
    """Return the output as the ``loss_fn`` of a schedule: the last stage has computed the loss."""
    return output.reshape(())


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def pipeline_stages(
    program: Program,
    *,
    device: Any = None,
    ranks: Sequence[int] | None = None,
    microbatches: int | None = None,
    batch: Any = None,
    weights: Any = None,
    group: Any = None,
) -> PipelineStages:
    """Implement :meth:`fxpart.api.Program.to_pipeline_stages`."""
    plan, spec = program.plan, program.spec
    boundaries(spec)
    check_division(program, microbatches)
    plans = (plan.stages[stage].ranks[0] for stage in stage_of(plan))
    stage_ranks = tuple(plans if ranks is None else ranks)
    world = len(set(stage_ranks))
    if len(stage_ranks) != len(spec.stages) or set(stage_ranks) != set(range(world)):
        raise error(
            "FXP109", where=f"ranks={stage_ranks}",
            why=f"it must have one rank for each of {len(spec.stages)} stages, numbered from 0",
            fix="use ranks=(0, 1, 0, 1) for four stages on two ranks",
        )  # fmt: skip
    gpus = {plan.device(rank).kind for rank in range(plan.world)} == {"gpu"}
    kind = (find_accelerator() or CUDA) if gpus else "cpu"
    stage_device = local_device(kind) if device is None else torch.device(device)
    own_rank = _get_group_rank(world, stage_device, group)
    example = program.captured.example
    assert example is not None, "a captured model has its example"
    state = program.captured.state
    modules = {}
    for index in (index for index, rank in enumerate(stage_ranks) if rank == own_rank):
        modules[index] = load_stage(program.sources[index], spec.stages[index], stage_device)
        materialize(
            modules[index], spec, state if weights is None else weights,
            constants=constants_of(spec, state), strict=weights is not None,
        )  # fmt: skip
    return PipelineStages(
        spec, modules, ranks=stage_ranks, microbatches=microbatches or plan.microbatches,
        batch=example() if batch is None else batch, device=stage_device, group=group,
    )  # fmt: skip


def check_division(program: Program, microbatches: int | None) -> None:
    """Raise FXP114 if several microbatches would change the objective of the program."""
    plan, captured = program.plan, program.captured
    if program.spec.step_state and (microbatches or plan.microbatches) > 1:
        raise error(
            "FXP114", where=", ".join(program.spec.step_state),
            why="forward passes update this state per step; torch's schedules would update it "
            "per microbatch", fix="use program.trainer(), or microbatches=1",
        )  # fmt: skip
    if microbatches is None or microbatches == 1 or plan.microbatches > 1:
        return
    resolve_microbatches(
        couplings(program.prepared, captured), program.request.constraints, microbatches
    )
    if divide_graph(program.graph, captured, microbatches) is not program.graph:
        raise error(
            "FXP114", where=f"microbatches={microbatches}",
            why="the loss is normalized over the whole batch, but the program was compiled "
            "for one microbatch",
            fix=f"use compile(..., microbatches={microbatches})",
        )  # fmt: skip


def _get_group_rank(world: int, device: torch.device, group: Any) -> int:
    """Return this process's rank in the group, by default the default group, created if
    necessary.
    """
    if group is None:
        connect(world, device=device.type)
        if not dist.is_initialized():
            raise error(
                "FXP502", where="1 process", why=f"torch's stages need {world} processes",
                fix=f"use torchrun --nproc-per-node {world} ...",
            )  # fmt: skip
    return dist.get_rank(group)
