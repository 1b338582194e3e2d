"""From a compiled program to a trainer: transport, stage modules with their weights, evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fxpart.codegen.materialization import constants_of, materialize, unused_state
from fxpart.codegen.program_archive import load_exported
from fxpart.codegen.stage_loader import load_stage
from fxpart.diagnostics.progress import log_phase
from fxpart.errors import FxpartError, Problem, error
from fxpart.plan.model import Plan
from fxpart.plan.prediction import busy_by_rank
from fxpart.plan.schedule import as_given, recomputed, stage_of
from fxpart.program.shard_layout import make_state_slicer
from fxpart.program.spec import ProgramSpec
from fxpart.runtime import InProcess, ProcessGroupTransport, Trainer, connect, heartbeat
from fxpart.runtime.asynchronous import AsyncTrainer
from fxpart.runtime.asynchronous.mode_selection import select_weight_mode
from fxpart.runtime.entry_point import announce_call
from fxpart.runtime.mesh.mesh_ranks import MeshRank, Ranks, build_rank_table, get_stage_mesh
from fxpart.runtime.optimizer.user_optimizer import UserOptimizer
from fxpart.runtime.queues.fault_tolerant_transport import FaultTolerantTransport
from fxpart.runtime.queues.options import QueueOptions, is_queue_routed
from fxpart.runtime.queues.trainer import QueueTrainer
from fxpart.runtime.state.module_constants import ModuleConstants
from fxpart.runtime.state.module_watch import ModuleWatch
from fxpart.runtime.state.weight_consistency import check_same_weights
from fxpart.runtime.torch_modes import TorchModes, TrainerCallKind, disable_torch_modes
from fxpart.runtime.transport.agreement import agree
from fxpart.runtime.transport.interface import Transport
from fxpart.runtime.transport.process_group import local_device
from fxpart.schedule.spec import DEFAULT_SCHEDULE
from fxpart.schedule.weight_modes import WeightMode

if TYPE_CHECKING:
    from fxpart.api import Program


def make_trainer(
    program: Program,
    optimizer: Any,
    *,
    weights: Any,
    weight_mode: str | WeightMode | None,
    timeout: float | None,
    strict: bool = True,
    **options: Any,
) -> Trainer | AsyncTrainer | QueueTrainer:
    """The trainer of :meth:`fxpart.api.Program.trainer`; options: the trainer's own.

    weights: where they come from. weight_mode: in place of the plan's.
    """
    kind = "cuda" if _is_of_gpus(program.plan) else "cpu"
    captured = program.captured
    ambient = TorchModes(captured.default_dtype, captured.precision, kind, captured.mode_change)
    with (
        log_phase("make the trainer"),
        announce_call("program.trainer"),
        disable_torch_modes(ambient, TrainerCallKind.MAKE, "program.trainer"),
    ):
        made = _make_trainer(
            program, optimizer, weights=weights, weight_mode=weight_mode, timeout=timeout,
            strict=strict, **options,
        )  # fmt: skip
    made.ambient = ambient
    return made


def _make_trainer(
    program: Program,
    optimizer: Any,
    *,
    weights: Any,
    weight_mode: str | WeightMode | None,
    timeout: float | None,
    strict: bool,
    **options: Any,
) -> Trainer | AsyncTrainer | QueueTrainer:
    """As :func:`make_trainer`, without modes of torch around it."""
    # Capture and passes, which an exported program trains without.
    from fxpart.training.evaluation import evaluation, prediction

    plan, spec = program.plan, program.spec
    queue = is_queue_routed(plan, weight_mode, options)
    options["stream"] = None if queue else select_weight_mode(plan, weight_mode, options)
    given = _given_now(program, optimizer)
    places = _LocalPlacement.of(plan, spec, timeout)
    state = program.captured.state
    constants = constants_of(spec, state)
    lanes = places.load(program.lane)

    def fill() -> tuple[dict[str, torch.Tensor], str]:
        for lane, module in [(own, m) for own in lanes for m in own.modules.values()]:
            materialize(
                module, lane.spec, state if weights is None else weights, constants=constants,
                strict=weights is not None and strict,
                part=make_state_slicer(lane.spec, lane.index),
            )  # fmt: skip
        return _unused(program, weights), ""

    unused = agree(places.transport, "the weights", fill)
    if weights is None:
        used = [t.name for own in lanes for k in own.modules for t in own.spec.stages[k].state]
        check_same_weights(places.transport, state, used)
    copies = ModuleConstants.of(lanes, state)
    made = places.trainer(
        lanes,
        queue=queue,
        optimizer=given,
        evaluation=lambda: evaluation(program, lanes, copies),
        prediction=lambda loss: prediction(program, lanes, loss, copies),
        unused=unused,
        **options,
    )
    made.model_config = program.captured.config
    captured = program.captured
    made.divisors.watch(captured.state)
    slots = {name: slot for name, slot in captured.slots.items() if name not in captured.guarded}
    made.watch = ModuleWatch(slots, captured.parameters, values=weights is None)
    if (guard := program.captured.guard) is not None:
        # Without flushes, minibatches of before and after a change are on their way together.
        update = copies.update if type(made) is Trainer else None
        made.guard = lambda: guard(update)
    return _of_plan(made, plan)


def _given_now(program: Program, optimizer: Any) -> Any:
    """Take the module's tensors as they are now, and return the optimizer over them."""
    from fxpart.capture.live_state import live_parameters, refresh_state

    refresh_state(program.captured)
    _check_frozen(program)
    given = program.optimizer if optimizer is None else optimizer
    if isinstance(given, torch.optim.Optimizer):
        return UserOptimizer(given, live_parameters(program.captured))
    return given


def _check_frozen(program: Program) -> None:
    """FXP109 for every parameter that was frozen, or set free, since the program was compiled."""
    stages = program.spec.stages
    compiled = {s.name: s.requires_grad for g in stages for s in g.state if s.kind == "parameter"}
    problems = [
        Problem(
            "FXP109",
            f"parameter {name}",
            f"requires_grad was {trained} when the program was compiled, and is {not trained} now",
            "compile again: what flows back between the stages depends on it",
        )
        for name, trained in compiled.items()
        if program.captured.state[name].requires_grad != trained
    ]
    if problems:
        raise FxpartError(problems)


@dataclass(frozen=True)
class _LocalPlacement:
    """Where a plan's stages and lanes run, as far as they run in this process.

    ranks: of each stage and lane. kind: "cpu" or "cuda".
    """

    plan: Plan
    ranks: Ranks
    size: int
    kind: str
    transport: ProcessGroupTransport | InProcess

    @classmethod
    def of(cls, plan: Plan, spec: ProgramSpec, timeout: float | None) -> _LocalPlacement:
        """Connects the ranks."""
        size = get_stage_mesh(spec).size
        ranks = build_rank_table([plan.stages[stage].ranks for stage in stage_of(plan)], size)
        kind = "cuda" if _wants_gpu(plan) else "cpu"
        step = plan.prediction.step_seconds
        transport = connect(plan.world, device=kind, timeout=timeout, predicted=step)
        made = cls(plan, ranks, size, kind, transport)
        if kind == "cuda" and len(transport.local) == 1:
            torch.cuda.set_device(made.device_of(transport.local[0]))
        return made

    @property
    def lanes(self) -> list[int]:
        """The lanes of this process."""
        return [lane for lane in range(self.size) if self.stages(lane)]

    def stages(self, lane: int) -> list[int]:
        """The stages of a lane that run in this process."""
        return [s for s, row in enumerate(self.ranks) if row[lane] in self.transport.local]

    def device(self, stage: int, lane: int) -> torch.device:
        """The device of the rank of a stage's lane."""
        return self.device_of(self.ranks[stage][lane])

    def device_of(self, rank: int) -> torch.device:
        """The device of a local rank: where the plan leaves devices out, the one that it names."""
        own = gpu_of(self.plan, rank) if self.kind == "cuda" and self.plan.devices else -1
        if 0 <= own < torch.cuda.device_count():
            return torch.device("cuda", own)
        return _device(self.kind, rank, self.transport.local)

    def load(self, programs: Callable[[int], tuple[ProgramSpec, Sequence[str]]]) -> list[MeshRank]:
        """The lanes of this process with their stage modules, empty; programs: of each lane."""
        lanes = []
        for lane in self.lanes:
            own, sources = programs(lane)
            modules = {
                stage: load_stage(sources[stage], own.stages[stage], self.device(stage, lane))
                for stage in self.stages(lane)
            }
            lanes.append(MeshRank(lane, own, modules))
        return lanes

    def trainer(
        self,
        lanes: Sequence[MeshRank],
        *,
        stream: WeightMode | None,
        queue: bool = False,
        **options: Any,
    ) -> Trainer | AsyncTrainer | QueueTrainer:
        """The trainer of this process's lanes by the plan.

        stream: the mode of one not drained. queue: whether copies take microbatches from queues.
        """
        first = lanes[0]
        if stream is not None:
            options["weights"] = stream
        kind: type[Trainer] | type[AsyncTrainer] | type[QueueTrainer] = Trainer
        if queue:
            kind = QueueTrainer
        elif stream is not None:
            kind = AsyncTrainer
        transport: Transport = self.transport
        if queue and isinstance(self.transport, ProcessGroupTransport):
            transport = FaultTolerantTransport(self.transport, QueueOptions.of(options).patience)
        made = kind(
            first.spec,
            first.modules,
            ranks=self.ranks,
            transport=transport,
            microbatches=self.plan.microbatches,
            schedule=as_given(self.plan) if stream is None else DEFAULT_SCHEDULE,
            recompute=options.pop("recompute", None) or recomputed(self.plan),
            devices={rank: self.device_of(rank) for rank in self.transport.local},
            lanes=lanes,
            **options,
        )
        heartbeat.report_last_event(made.events.last)
        if not first.spec.replicas:  # copies share the microbatches of their stage
            plan = self.plan
            made.pace.expect(busy_by_rank(plan.prediction.ranks, plan.microbatches))
        return made


def gpu_of(plan: Plan, rank: int) -> int:
    """The number of the rank's device among those of its host, in the plan's cluster."""
    own = plan.device(rank)
    there = [d.name for d in plan.cluster.devices if d.host == own.host]
    return there.index(own.name)


def load_trainer(
    directory: str | Path,
    optimizer: Any,
    *,
    weights: Any,
    timeout: float | None = None,
    **options: Any,
) -> Trainer | AsyncTrainer | QueueTrainer:
    """A trainer of an exported program: no model, no capture and no solver are needed.

    directory: what Program.export wrote; every digest is checked before anything is imported
    (FXP505). weights: a safetensors file or folder with original names, a dict of tensors, or a
    function (name, meta tensor) -> tensor. The rest is as for Program.trainer; there is no
    eval_step, which needs the model.
    """
    exported = load_exported(directory, stages=())
    plan, spec = Plan.loads(exported.plan, str(directory)), exported.spec
    places = _LocalPlacement.of(plan, spec, timeout)
    lanes = places.load(exported.lane)

    def fill() -> tuple[None, str]:
        for lane, module in [(own, m) for own in lanes for m in own.modules.values()]:
            materialize(
                module, lane.spec, weights, constants=exported.constants,
                part=make_state_slicer(lane.spec, lane.index),
            )  # fmt: skip
        return None, ""

    agree(places.transport, "the weights", fill)
    if isinstance(optimizer, torch.optim.Optimizer):
        raise error(
            "FXP115",
            where=f"optimizer {type(optimizer).__name__}",
            why="an exported program has no module, whose parameters the instance could have",
            fix="give its class, functools.partial(torch.optim.AdamW, lr=...), or a function",
        )
    options["queue"] = is_queue_routed(plan, None, options)
    options["stream"] = None if options["queue"] else select_weight_mode(plan, None, options)
    made = _of_plan(places.trainer(lanes, optimizer=optimizer, **options), plan)
    made.ambient = TorchModes(precision=plan.precision, device=places.kind)
    return made


def _of_plan(
    made: Trainer | AsyncTrainer | QueueTrainer, plan: Plan
) -> Trainer | AsyncTrainer | QueueTrainer:
    """The trainer, which knows what a checkpoint says of its plan."""
    made.divisors.renew()
    made.plan_text, made.fingerprint = plan.dumps(), plan.model.fingerprint
    return made


def _wants_gpu(plan: Plan) -> bool:
    """Whether the plan's ranks are GPUs; FXP602 where it is so and this machine has none."""
    if not _is_of_gpus(plan):
        return False
    if not torch.cuda.is_available():
        raise error(
            "FXP602",
            where=f"a plan for {plan.cluster.name}",
            why="its ranks are GPUs and torch sees none here",
            fix='compile for this machine (cluster="local:4"), or start the program there',
        )
    return True


def _is_of_gpus(plan: Plan) -> bool:
    return any(plan.device(rank).kind == "gpu" for rank in range(plan.world))


def _device(kind: str, rank: int, local: tuple[int, ...]) -> torch.device:
    """The rank's device: under torchrun by LOCAL_RANK, in one process by turns over all GPUs."""
    if kind == "cpu" or len(local) == 1:
        return local_device(kind)
    return torch.device("cuda", rank % torch.cuda.device_count())


def _unused(program: Program, weights: Any) -> dict[str, torch.Tensor]:
    """State of the model that no stage needs, so that a state dict is complete."""
    captured = program.captured
    held = {s.name for stage in program.spec.stages for s in stage.state}
    names = [*captured.parameters, *sorted(captured.persistent)]
    unused = {n: captured.state[n].detach() for n in names if n not in held}
    if weights is not None:
        return unused_state(weights, program.spec, unused)
    return {n: t.clone() for n, t in unused.items() if t.device.type != "meta"}
