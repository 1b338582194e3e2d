"""Construction of a trainer's parts, compared between the ranks before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import nn

from fxpart.diagnostics.flight_recorder import FlightRecorder
from fxpart.diagnostics.rank_event import LEFT
from fxpart.errors import FxpartError, error
from fxpart.plan.offload import offloads_activations
from fxpart.plan.throughput import RowFigures
from fxpart.program.spec import ProgramSpec
from fxpart.rng import RepeatedKey, microbatch_key
from fxpart.runtime.batch.batch_agreement import BatchAgreement, BatchSource, check_repetition
from fxpart.runtime.batch.batch_reader import MicrobatchSplit
from fxpart.runtime.batch.batch_requirements import BatchRequirements
from fxpart.runtime.batch.loss_divisors import LossDivisors
from fxpart.runtime.batch.mesh_rank_batch import GlobalBatchReader
from fxpart.runtime.batch.outputs import Outputs
from fxpart.runtime.engine import PipelineEngine, resolve_schedule
from fxpart.runtime.executor.cuda_graphs import graph_stages
from fxpart.runtime.executor.instruction import BackwardHooks
from fxpart.runtime.executor.local_executors import LocalExecutors
from fxpart.runtime.executor.torch_compile import (
    StageCompilation,
    StageCompiler,
    compile_stages,
    get_compile_backend,
)
from fxpart.runtime.host.cpu_affinity import CpuAffinity, pin_rank
from fxpart.runtime.mesh.communicators import MeshCommunicators, find_reduction_axes
from fxpart.runtime.mesh.mesh_ranks import (
    MeshRank,
    Ranks,
    build_rank_table,
    encode_common_spec,
    get_devices,
    get_pipeline_ranks,
    get_stage_mesh,
)
from fxpart.runtime.monitor.straggler_detector import StragglerDetector
from fxpart.runtime.optimizer.optimizer_shards import OptimizerShards
from fxpart.runtime.optimizer.parameter_groups import Groups
from fxpart.runtime.optimizer_owner import OptimizerOwner
from fxpart.runtime.pipeline import Pipeline
from fxpart.runtime.state.dtensor_state import DTensorState
from fxpart.runtime.state.model_state import ModelState
from fxpart.runtime.torch_modes import TorchModes, describe_process_modes
from fxpart.runtime.trainer_options import TrainerOptions, check_program
from fxpart.runtime.transport.agreement import agree
from fxpart.runtime.transport.interface import Transport
from fxpart.runtime.transport.rank_request import RankRequest
from fxpart.schedule.action import ActionKind, Schedule

T = TypeVar("T")
Prediction = Callable[[bool], tuple[Sequence[MeshRank], Outputs]]
Evaluation = Callable[[], tuple[ProgramSpec, Mapping[int, nn.Module]] | Sequence[MeshRank]]


class TrainerBase(OptimizerOwner):
    """The parts of a trainer.

    options: the given options. events: recent activities of this process, in memory until a file is
    assigned. pace: computation times of all ranks, to detect slow ones. ambient: torch modes under
    which the program was compiled. request: requests of all processes. pipeline: runs the
    minibatches. row_figures: returns what a row of a batch costs by the plan. activation_stages:
    returns the mesh ranks and outputs of ``activation_statistics``.
    """

    pipeline: Pipeline
    row_figures: Callable[[], RowFigures] | None = None
    activation_stages: Callable[[], tuple[Sequence[MeshRank], Outputs]] | None = None

    def __init__(
        self,
        spec: ProgramSpec,
        modules: Mapping[int, nn.Module],
        *,
        ranks: Sequence[int | Sequence[int]],
        transport: Transport,
        optimizer: Any = None,
        groups: Groups | None = None,
        evaluation: Evaluation | None = None,
        prediction: Prediction | None = None,
        devices: Mapping[int, torch.device] | None = None,
        unused: Mapping[str, torch.Tensor] | None = None,
        mesh_ranks: Sequence[MeshRank] | None = None,
        **options: Any,
    ) -> None:
        """Build the trainer's parts.

        modules: the stage modules of this process, by stage; ignored if ``mesh_ranks`` is given.
        mesh_ranks: this process's mesh ranks of a sharded program, whose ``spec`` is that of any
        mesh rank. ranks: the rank of each stage, or of each stage and mesh rank; an int denotes
        consecutive ranks.

        optimizer: see :func:`~fxpart.runtime.optimizer.factory.make_optimizer`; None to compute
        only gradients. groups: parameter groups by name, see
        :func:`~fxpart.runtime.optimizer.parameter_groups.assign_groups`. evaluation: returns the
        program and modules (or mesh ranks) of ``eval_step`` at its first call; they share the state
        of ``modules``. prediction: returns the mesh ranks and outputs of ``predict``; its argument
        is whether to compute the loss, too. devices: per local rank, by default those of its
        parameters. unused: state that no stage needs, for ``state_dict``. options: the fields of
        :class:`~fxpart.runtime.trainer_options.TrainerOptions`.

        Raises FXP501 on every rank if the arguments differ between ranks.
        """
        self.spec = spec
        self.calls = 0
        self.ambient = TorchModes()
        self._ranks = build_rank_table(
            ranks, get_stage_mesh(spec).size, [stage.ranks for stage in spec.stages]
        )
        self._transport = transport
        self.events = FlightRecorder(transport.local[0])
        self.pace = StragglerDetector(self._ranks, warns=0 in transport.local)
        self.request = RankRequest(alone=len(transport.local) == transport.ranks)
        self._evaluation = evaluation
        self._prediction = prediction
        self._unused = dict(unused or {})
        self._mesh_ranks = tuple([MeshRank(0, spec, modules)] if mesh_ranks is None else mesh_ranks)
        self._devices = dict(devices or get_devices(self._mesh_ranks, self._ranks, transport.local))
        agree(transport, "the programs", partial(self._set_options, options, optimizer))
        schedule, microbatches = self.options.schedule, max(self.microbatches, 1)
        firsts = get_pipeline_ranks(self._ranks, 0)
        placed = resolve_schedule(schedule, spec, firsts, microbatches, transport.ranks)
        check_program(spec, self._ranks, self.options)
        if optimizer is None and self.is_asynchronous:
            raise error(
                "FXP109", where=self.options.describe_kind(), why="no optimizer was given",
                fix="use program.trainer(optimizer=torch.optim.AdamW)",
            )  # fmt: skip
        self._meshes = self._connect_meshes()
        own = [mesh_rank.index for mesh_rank in self._mesh_ranks]
        self._local = LocalExecutors(own, transport, self._meshes)
        splits = any(a.kind is ActionKind.W for row in placed.ranks for a in row)
        self._compiler = self._compile()
        self._record_graphs(splits)
        self._pinned = pin_rank(self.options.pin, transport)
        self._state = ModelState(self._mesh_ranks, self._ranks, transport, self._devices)
        self._sharded_state = DTensorState(self._state, self._meshes)
        self._shards = OptimizerShards(self._state, self._meshes, shared_rows=self._shares_rows)
        self.divisors = LossDivisors(spec, self._state, self._unused)
        self._feed = GlobalBatchReader(self._mesh_ranks, self.divisors.values)
        self._source = BatchSource(self._feed, self.microbatches)
        self._engine = self._make_engine(self._mesh_ranks, schedule, hooks=self._shards.hooks)
        self._eval: tuple[BatchSource, PipelineEngine] | None = None
        self._predictors: dict[bool | str, tuple[BatchSource, PipelineEngine, Outputs]] = {}
        self._stale = False  # Gradients are those of the last update, reduced.
        self._prepare_optimizers(optimizer, groups)

    def _set_options(self, given: Mapping[str, Any], optimizer: Any) -> tuple[None, str]:
        """Set the options, and return what must be equal on every rank."""
        self.options = TrainerOptions.of(given)
        return None, self._describe(optimizer)

    @property
    def _shares_rows(self) -> bool:
        """Whether sparse gradients of embedding tables that several stages share stay sparse.

        Not without flushes: they are sent with every microbatch, before the number of their rows is
        known. With queues they are intercepted after each backward.
        """
        return self.kind != "asynchronous"

    @property
    def repeats(self) -> bool:
        """Whether repeated training is bitwise identical, if the device's operations are.

        Queues assign microbatches differently every time.
        """
        return self.kind != "queue"

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a batch."""
        return self.options.microbatches

    @property
    def seed(self) -> int:
        """The seed of random ops."""
        return self.spec.seed if self.options.seed is None else self.options.seed

    @property
    def rank(self) -> int:
        """This process's rank; 0 if one process runs all ranks."""
        return self._transport.local[0]

    @property
    def transport(self) -> Transport:
        """The transport between the ranks."""
        return self._transport

    @cached_property
    def needs(self) -> BatchRequirements:
        """Requirements of each batch in this process: names, rows, and a DataLoader's sampler."""
        return BatchRequirements.of(self._mesh_ranks, self._feed.needed, self.microbatches)

    @property
    def compiled(self) -> StageCompilation | None:
        """The result of torch.compile on this process's stages so far; None if not enabled."""
        return None if self._compiler is None else self._compiler.found()

    @property
    def pinned(self) -> CpuAffinity:
        """The cores of this process, or why it is not pinned."""
        return self._pinned

    def close(self) -> None:
        """Release the transport's resources; the trainer cannot be used afterwards."""
        self.events.put(LEFT, "end")
        if self.optimizer is not None:
            self.optimizer.closed = True
        for part in (self._local, self._meshes, self._transport):
            if part is not None:
                part.close()
        self._pinned.restore()
        self.closed = True

    @property
    def local_device(self) -> torch.device:
        """The device of this process's first rank."""
        return self._devices[self._transport.local[0]]

    # -- internals --------------------------------------------------------------------------------

    def _connect_meshes(self) -> MeshCommunicators | None:
        """Return the communicators of this process's mesh ranks; None without a mesh."""
        sharding = self.spec.sharding
        if sharding is None:
            return None
        own = self._devices[self._transport.local[0]]
        return MeshCommunicators(
            get_stage_mesh(self.spec), self._mesh_ranks, self._ranks, self._transport,
            find_reduction_axes(sharding), own, self.options.blocks_ahead(own),
        )  # fmt: skip

    def _compile(self) -> StageCompiler | None:
        """Compile the stages if requested; on all ranks or none."""
        wanted = self.options.compile_stages
        if not get_compile_backend(wanted):
            return None
        again, devices = self.options.recomputes(len(self.spec.stages)), [*self._devices.values()]
        return agree(
            self._transport, "compiled stages",
            lambda: (compile_stages(wanted, self._mesh_ranks, devices, recompute=again), ""),
        )  # fmt: skip

    def _record_graphs(self, splits: bool) -> None:
        """Run the stages by CUDA graphs if requested; on all ranks or none."""
        if not self.options.cuda_graphs:
            return
        recompute = self.options.recomputes(len(self.spec.stages))
        agree(
            self._transport, "CUDA graphs",
            lambda: (
                graph_stages(
                    self._mesh_ranks, list(self._devices.values()), recompute=recompute,
                    splits=splits, compiles=self._compiler is not None,
                ),
                "",
            ),
        )  # fmt: skip

    def _keys(self, cut: MicrobatchSplit) -> list[int]:
        keys = [microbatch_key(self.seed, self.calls, i) for i in range(len(cut.rows))]
        if not cut.repeated or not any(stage.random_ops for stage in self.spec.stages):
            return keys
        axes = self._feed.row_axes
        return [
            key if count == 1 else RepeatedKey.of(key, count, axes)
            for key, count in zip(keys, cut.repeats, strict=True)
        ]

    def _run_on_mesh_ranks(self, do: Callable[[MeshRank], T]) -> dict[int, T]:
        """Run ``do`` for all mesh ranks of this process concurrently."""
        return self._local.run_all(
            {mesh_rank.index: partial(do, mesh_rank) for mesh_rank in self._mesh_ranks}
        )

    def _replace_ranks(self, ranks: Ranks, lost: Collection[int]) -> None:
        """Use these ranks from now on. lost: stages whose process has ended."""
        self._ranks = ranks
        self._state = ModelState(self._mesh_ranks, ranks, self._transport, self._devices)
        self._sharded_state = DTensorState(self._state, None)
        self.optimizers = {k: each for k, each in self.optimizers.items() if k[0] not in lost}
        self._eval, self._predictors = None, {}

    def _make_engine(
        self,
        mesh_ranks: Sequence[MeshRank],
        schedule: str | Schedule,
        hooks: Callable[[int], BackwardHooks | None] | None = None,
    ) -> PipelineEngine:
        return PipelineEngine(
            mesh_ranks,
            self._ranks,
            self._transport,
            self._devices,
            schedule=schedule,
            local=self._local,
            hooks=hooks,
            recompute=self.options.recomputes(len(self.spec.stages)),
            offload=offloads_activations(self.options.offload),
            events=self.events,
        )

    def _read(
        self,
        source: BatchSource,
        batch: Any,
        mode: str,
        local: bool = False,
        *,
        weighed: bool = False,
    ) -> BatchAgreement:
        self._local.check_whole()
        pending = self._accumulation.batches
        mode = f"{mode} call {self.calls}" + (f" after {pending}" if pending else "")
        if len(self._transport.local) < self._transport.ranks:
            mode += describe_process_modes()
        refusal = None
        try:
            mode += self._apply_user_changes()
        except FxpartError as cause:
            refusal = cause
        read = BatchAgreement(
            self._transport, source, batch, mode,
            local=local, request=self.request, refusal=refusal, weighed=weighed,
        )  # fmt: skip
        if self.optimizer is not None:
            self.optimizer.changed = ""
        return read

    def _check_training_rows(self, read: BatchAgreement) -> None:
        """Raise FXP114 if rows of a training batch must be repeated but must not be."""
        check_repetition(self._transport, self._source, read)

    def _evaluator(self) -> tuple[BatchSource, PipelineEngine]:
        if self._eval is None:
            if self._evaluation is None:
                raise _no_evaluation("eval_step")
            made = self._evaluation()
            self._eval = self._forward_only(
                [MeshRank(0, *made)] if isinstance(made, tuple) else made
            )
        return self._eval

    def _predictor(self, loss: bool) -> tuple[BatchSource, PipelineEngine, Outputs]:
        if loss not in self._predictors:
            if self._prediction is None:
                raise _no_evaluation("predict")
            mesh_ranks, outputs = self._prediction(loss)
            self._predictors[loss] = (*self._forward_only(mesh_ranks), outputs)
        return self._predictors[loss]

    def _activation_predictor(self) -> tuple[BatchSource, PipelineEngine, Outputs]:
        if "activations" not in self._predictors:
            if self.activation_stages is None:
                raise _no_evaluation("activation_statistics")
            mesh_ranks, outputs = self.activation_stages()
            self._predictors["activations"] = (*self._forward_only(mesh_ranks), outputs)
        return self._predictors["activations"]

    def _forward_only(self, mesh_ranks: Sequence[MeshRank]) -> tuple[BatchSource, PipelineEngine]:
        if self._meshes is not None:
            for mesh_rank in mesh_ranks:
                self._meshes.attach(mesh_rank.index, mesh_rank.modules)
        source = BatchSource(GlobalBatchReader(mesh_ranks, self.divisors.values), self.microbatches)
        return source, self._make_engine(mesh_ranks, "forward")

    def _describe(self, optimizer: Any) -> str:
        kind = getattr(optimizer, "func", getattr(optimizer, "instance", optimizer))
        name = getattr(kind, "__qualname__", None) or type(kind).__name__
        return (
            f"ranks {self._ranks} seed {self.seed} {self.options.describe()} optimizer {name} "
            f"program {encode_common_spec(self.spec)}"
        )


def _no_evaluation(call: str) -> FxpartError:
    return error(
        "FXP109", where=call, why="the trainer has no evaluation program",
        fix="use a trainer of the model itself; one of an exported program cannot evaluate",
    )  # fmt: skip
