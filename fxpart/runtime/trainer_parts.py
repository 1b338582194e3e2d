"""What the pipeline, the optimizers and the other calls of a trainer share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from fxpart.diagnostics.flight_recorder import FlightRecorder
from fxpart.diagnostics.rank_event import LEFT
from fxpart.errors import error
from fxpart.program.spec import ProgramSpec
from fxpart.rng import RepeatedKey, microbatch_key
from fxpart.runtime.batch.batch_agreement import BatchSource
from fxpart.runtime.batch.batch_reader import MicrobatchSplit
from fxpart.runtime.batch.loss_divisors import LossDivisors
from fxpart.runtime.batch.mesh_rank_batch import GlobalBatchReader
from fxpart.runtime.engine import PipelineEngine, resolve_schedule
from fxpart.runtime.executor.cuda_graphs import graph_stages
from fxpart.runtime.executor.local_executors import LocalExecutors
from fxpart.runtime.executor.torch_compile import (
    StageCompiler,
    compile_stages,
    get_compile_backend,
)
from fxpart.runtime.gradients.reducer import GradientAccumulation
from fxpart.runtime.host.cpu_affinity import pin_rank
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
from fxpart.runtime.state.dtensor_state import DTensorState
from fxpart.runtime.state.model_state import ModelState
from fxpart.runtime.trainer_options import TrainerOptions, check_program
from fxpart.runtime.transport.agreement import agree
from fxpart.runtime.transport.interface import Transport
from fxpart.runtime.transport.rank_request import RankRequest
from fxpart.schedule.action import ActionKind

T = TypeVar("T")


class TrainerParts:
    """The program of a trainer in this process: its ranks, modules, state and engine.

    options: the given options. ranks: the rank of each stage and mesh rank. mesh_ranks: those of
    this process, with their modules. devices: by local rank. calls: of ``step`` so far. events:
    recent activities of this process, in memory until a file is assigned. pace: computation times
    of all ranks, to detect slow ones. request: requests of all processes. meshes: communicators of
    the mesh ranks; None without a mesh. local: runs what the mesh ranks do. compiler: of the
    stages; None if not enabled. pinned: the cores of this process, or why it is not pinned. state,
    sharded_state: parameters and buffers by name. unused: state that no stage needs. shards: the
    parts of parameters that the optimizers update. divisors: buffers whose sums divide losses.
    accumulation: the batches since the last update. source: reader of training batches. engine:
    runs batches through the stages.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        modules: Mapping[int, nn.Module],
        *,
        ranks: Sequence[int | Sequence[int]],
        transport: Transport,
        optimizer: Any,
        options: Mapping[str, Any],
        devices: Mapping[int, torch.device] | None = None,
        unused: Mapping[str, torch.Tensor] | None = None,
        mesh_ranks: Sequence[MeshRank] | None = None,
    ) -> None:
        """Build the parts; every rank must do so at the same time.

        Arguments: see :class:`~fxpart.runtime.trainer_base.TrainerBase`. Raises FXP501 on every
        rank if they differ between ranks.
        """
        self.spec = spec
        self.calls = 0
        mesh = get_stage_mesh(spec)
        self.ranks = build_rank_table(ranks, mesh.size, [stage.ranks for stage in spec.stages])
        self.transport = transport
        self.events = FlightRecorder(transport.local[0])
        self.pace = StragglerDetector(self.ranks, warns=0 in transport.local)
        self.request = RankRequest(alone=self.is_alone)
        self.unused = dict(unused or {})
        self.mesh_ranks = tuple([MeshRank(0, spec, modules)] if mesh_ranks is None else mesh_ranks)
        self.devices = dict(devices or get_devices(self.mesh_ranks, self.ranks, transport.local))
        agree(transport, "the programs", partial(self._set_options, options, optimizer))
        schedule, microbatches = self.options.schedule, max(self.options.microbatches, 1)
        firsts = get_pipeline_ranks(self.ranks, 0)
        placed = resolve_schedule(schedule, spec, firsts, microbatches, transport.ranks)
        check_program(spec, self.ranks, self.options)
        if optimizer is None and self.is_asynchronous:
            raise error(
                "FXP109", where=self.options.describe_kind(), why="no optimizer was given",
                fix="use program.trainer(optimizer=torch.optim.AdamW)",
            )  # fmt: skip
        self.meshes = self._connect_meshes()
        own = [mesh_rank.index for mesh_rank in self.mesh_ranks]
        self.local = LocalExecutors(own, transport, self.meshes)
        splits = any(a.kind is ActionKind.W for row in placed.ranks for a in row)
        self.compiler = self._compile()
        self._record_graphs(splits)
        self.pinned = pin_rank(self.options.pin, transport)
        self.state = ModelState(self.mesh_ranks, self.ranks, transport, self.devices)
        self.sharded_state = DTensorState(self.state, self.meshes)
        # Without flushes, gradients of embedding tables that several stages share are dense: they
        # are sent with every microbatch, before the number of their rows is known. With queues they
        # are intercepted after each backward.
        sparse = self.options.kind != "asynchronous"
        self.shards = OptimizerShards(self.state, self.meshes, shared_rows=sparse)
        self.divisors = LossDivisors(spec, self.state, self.unused)
        self.accumulation = GradientAccumulation()
        self.source = self.make_source(self.mesh_ranks)
        self.engine = PipelineEngine(self, self.mesh_ranks, schedule, self.shards.hooks)

    @property
    def is_alone(self) -> bool:
        """Whether this process runs all ranks."""
        return len(self.transport.local) == self.transport.ranks

    @property
    def is_asynchronous(self) -> bool:
        """Whether stages update on their own."""
        return self.options.kind != "synchronous"

    @property
    def seed(self) -> int:
        """The seed of random ops."""
        return self.spec.seed if self.options.seed is None else self.options.seed

    @property
    def first_device(self) -> torch.device:
        """The device of this process's first rank."""
        return self.devices[self.transport.local[0]]

    @property
    def id_state(self) -> dict[str, torch.Tensor]:
        """The state of managed ids by name, equal on every rank."""
        return {
            f"{own.table}.managed_ids.{name}": tensor
            for own in self.options.managed_ids
            for name, tensor in own.state_dict().items()
        }

    def run_on_mesh_ranks(self, do: Callable[[MeshRank], T]) -> dict[int, T]:
        """Run ``do`` for all mesh ranks of this process concurrently."""
        return self.local.run_all(
            {mesh_rank.index: partial(do, mesh_rank) for mesh_rank in self.mesh_ranks}
        )

    def keys(self, cut: MicrobatchSplit) -> list[int]:
        """Return the key of the random ops of each microbatch."""
        keys = [microbatch_key(self.seed, self.calls, i) for i in range(len(cut.rows))]
        if not cut.repeated or not any(stage.random_ops for stage in self.spec.stages):
            return keys
        axes = self.source.feed.row_axes
        return [
            key if count == 1 else RepeatedKey.of(key, count, axes)
            for key, count in zip(keys, cut.repeats, strict=True)
        ]

    def make_source(self, mesh_ranks: Sequence[MeshRank]) -> BatchSource:
        """Return a reader of the batches of a program."""
        reader = GlobalBatchReader(mesh_ranks, self.divisors.values)
        return BatchSource(reader, self.options.microbatches)

    def note_written(self) -> None:
        """Note that parameters were written by others than the optimizers."""
        if self.shards.host is not None:
            self.shards.host.note_written()

    def replace_ranks(self, ranks: Ranks) -> None:
        """Use these ranks from now on."""
        self.ranks = ranks
        self.state = ModelState(self.mesh_ranks, ranks, self.transport, self.devices)
        self.sharded_state = DTensorState(self.state, None)

    def close(self) -> None:
        """Release the transport's resources."""
        self.events.put(LEFT, "end")
        for part in (self.local, self.meshes, self.transport):
            if part is not None:
                part.close()
        self.pinned.restore()

    # -- internals --------------------------------------------------------------------------------

    def _set_options(self, given: Mapping[str, Any], optimizer: Any) -> tuple[None, str]:
        """Set the options, and return what must be equal on every rank."""
        self.options = TrainerOptions.of(given)
        kind = getattr(optimizer, "func", getattr(optimizer, "instance", optimizer))
        name = getattr(kind, "__qualname__", None) or type(kind).__name__
        ids = [own.digest_state() for own in self.options.managed_ids]
        return None, (
            f"ranks {self.ranks} seed {self.seed} {self.options.describe()} optimizer {name} {ids} "
            f"program {encode_common_spec(self.spec)}"
        )

    def _connect_meshes(self) -> MeshCommunicators | None:
        """Return the communicators of this process's mesh ranks; None without a mesh."""
        sharding, own = self.spec.sharding, self.first_device
        if sharding is None:
            return None
        return MeshCommunicators(
            get_stage_mesh(self.spec), self.mesh_ranks, self.ranks, self.transport,
            find_reduction_axes(sharding), own, self.options.blocks_ahead(own),
        )  # fmt: skip

    def _compile(self) -> StageCompiler | None:
        """Compile the stages if requested; on all ranks or none."""
        wanted = self.options.compile_stages
        if not get_compile_backend(wanted):
            return None
        again, devices = self.options.recomputes(len(self.spec.stages)), [*self.devices.values()]
        return agree(
            self.transport, "compiled stages",
            lambda: (compile_stages(wanted, self.mesh_ranks, devices, recompute=again), ""),
        )  # fmt: skip

    def _record_graphs(self, splits: bool) -> None:
        """Run the stages by CUDA graphs if requested; on all ranks or none."""
        if not self.options.cuda_graphs:
            return
        recompute = self.options.recomputes(len(self.spec.stages))
        agree(
            self.transport, "CUDA graphs",
            lambda: (
                graph_stages(
                    self.mesh_ranks, list(self.devices.values()), recompute=recompute,
                    splits=splits, compiles=self.compiler is not None,
                ),
                "",
            ),
        )  # fmt: skip
