"""The compiled program, and how a prepared model is planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from torch import fx

from fxpart.annotations import dump_annotations
from fxpart.capture import CapturedModel
from fxpart.checkpoint.signature import KeySource
from fxpart.cluster.model import Cluster
from fxpart.codegen.generated_program import (
    GeneratedProgram,
    StagedGraph,
    apply_plan,
    fields_of,
    write_program,
)
from fxpart.codegen.mesh_programs.rank_programs import MeshRankPrograms
from fxpart.codegen.mesh_programs.row_dependence import (
    couplings,
    resolve_microbatches,
    with_equivalence,
)
from fxpart.compiler.float8_linear import check_float8_devices
from fxpart.diagnostics.progress import log_phase
from fxpart.errors import error
from fxpart.passes.objective import ADDED_KEY, RowDependence
from fxpart.plan.model import Plan
from fxpart.plan.schedule import plan_schedule
from fxpart.plan.summary import summarize, summarize_as_html
from fxpart.planner.constraint_check import check_plan
from fxpart.planner.constraints import (
    check_trainable,
    find_exclusion,
    match_capture_precision,
)
from fxpart.planner.degrees import build_joint_problem
from fxpart.planner.execution_mode import ASYNC
from fxpart.planner.mesh_proposals import SMALL_GRAPH
from fxpart.planner.mode_selection import request_of, select_mode
from fxpart.planner.plan_agreement import agree_on_plan
from fxpart.planner.prepared_model import (
    PreparedModel,
    describe_request,
    with_model_profile,
    with_optimizer_parts,
)
from fxpart.planner.request import PlanRequest, find_cluster, make_request
from fxpart.planner.sharding_decision import ShardingCache, parse_annotation_constraint
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.torch_modes import guard_compile
from fxpart.schedule.action import Schedule
from fxpart.solver.progress import planning_progress

if TYPE_CHECKING:
    from fxpart.costs import CostModel
    from fxpart.interop.torch_pipeline import PipelineStages
    from fxpart.runtime import Trainer
    from fxpart.schedule.weight_modes import WeightMode
    from fxpart.solver.joint.problem import JointProblem
    from fxpart.solver.progress import Progress
    from fxpart.verification.verification_result import Verification


@dataclass(frozen=True, repr=False)
class Program:
    """A compiled model: the plan, and a stage module for each rank.

    captured: the captured model. prepared: its graph with blocks. whole: that with stages, before
    sharding. spec: the stages as data. sources: the source of each stage module; for
    a stage of several ranks, that of the first mesh rank. request: the planning request.
    mesh_rank_programs: the programs of all mesh ranks, None if each stage has one rank.
    annotations: the user's sharding annotations. problem: the costed problem, if the planner
    searched degrees.
    """

    plan: Plan
    spec: ProgramSpec
    sources: tuple[str, ...]
    captured: CapturedModel
    prepared: fx.GraphModule
    whole: StagedGraph
    request: PlanRequest
    mesh_rank_programs: MeshRankPrograms | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
    problem: JointProblem | None = None
    _shardings: ShardingCache = field(default_factory=ShardingCache, compare=False)

    def __repr__(self) -> str:
        """Return a summary of the plan of at most 20 lines, with MFU for models with tokens."""
        return summarize(self.plan)

    def _repr_html_(self) -> str:
        """Return the summary as HTML, for notebooks."""
        return summarize_as_html(self.plan)

    @property
    def graph(self) -> fx.GraphModule:
        """The staged graph before sharding."""
        return self.whole.graph

    @property
    def optimizer(self) -> Any:
        """The default optimizer of trainers."""
        return self.request.optimizer

    def costed(self) -> JointProblem:
        """Return the planner's problem as numbers: all degrees, microbatch counts and schedules.

        Archived with a plan file, it answers ``fxpart whatif`` without the model.
        """
        if self.problem is not None:
            return self.problem
        return build_joint_problem(self.prepared, self.captured, self.request, None)[0]

    def mesh_rank_program(self, index: int) -> tuple[ProgramSpec, tuple[str, ...]]:
        """Return the spec and stage sources of one mesh rank, generated on demand."""
        if self.mesh_rank_programs is None:
            assert index == 0, "a stage of one rank has one mesh rank"
            return self.spec, self.sources
        return self.mesh_rank_programs.program(index)

    def completed_annotations(self, suffix: str = ".toml") -> str:
        """Return all placements of the program as an annotations file, with their origin.

        The file can be edited and passed as ``annotations``. suffix: ".toml" or ".json". FXP109 if
        each stage has one rank, so nothing is sharded.
        """
        if self.mesh_rank_programs is None:
            raise error(
                "FXP109",
                where="completed annotations",
                why="each stage of the program has one rank, so nothing is sharded",
                fix='compile with a mesh: constraints={"mesh": "dp=2,tp=2"}, or --mesh dp=2,tp=2',
            )
        whole = self.mesh_rank_programs.sharded.whole
        return dump_annotations(whole, suffix, without=whole.meta.get(ADDED_KEY, ()))

    @guard_compile
    def replan(
        self,
        cluster: Cluster | str | Path,
        *,
        microbatches: int | None = None,
        constraints: Mapping[str, int | float | str | bool] | None = None,
        cost_model: str | Path | CostModel = "auto",
        progress: Callable[[Progress], None] | bool | None = None,
    ) -> Program:
        """Plan the captured model for another cluster or other constraints, without a new capture.

        The granularity of the blocks is kept; arguments and errors are those of compile().
        """
        checked = match_capture_precision(dict(constraints or {}), self.captured.precision)
        granularity = self.plan.constraints.get("granularity", "block")
        if checked.get("granularity", granularity) != granularity:
            raise error(
                "FXP109",
                where=f"granularity={checked['granularity']!r}",
                why=f"the model was captured into blocks of granularity={granularity!r}",
                fix=f"compile the model again with granularity={checked['granularity']!r}",
            )
        if "granularity" in self.plan.constraints:
            checked["granularity"] = granularity
        if "batch_coupling" in self.plan.constraints:
            checked.setdefault("batch_coupling", self.plan.constraints["batch_coupling"])
        chosen = find_cluster(cluster, None)
        request = make_request(chosen, self.optimizer, cost_model, checked, self.plan.seed)
        check_trainable(request.constraints)
        annotations = {**self.annotations, **parse_annotation_constraint(request)}
        check_precision(request)
        request = with_model_profile(request, self.plan.model)
        front = PreparedModel(
            with_optimizer_parts(request, self.captured),
            self.captured,
            self.prepared,
            self.plan.model,
            annotations,
            lambda: self.plan.check,
            self._shardings.for_other_costs(),
        )
        with planning_progress(progress) as listener:
            return plan_program(front, microbatches, listener)

    def schedule(self, microbatches: int | None = None) -> Schedule:
        """Return every stage's actions with transfers, for the plan's or another microbatch count.

        In a stage of several ranks, each rank has these actions, and its peers are the ranks of the
        same mesh coordinate.
        """
        count = microbatches or self.plan.microbatches
        return plan_schedule(self.plan, microbatches=count)

    def export(self, directory: str | Path, *, sign: KeySource = None) -> tuple[Path, ...]:
        """Write plan, stage modules, actions and manifest to ``directory``; return the files.

        sign: a file with a secret key, which signs the manifest.
        """
        return write_program(self.plan, self.parts, directory, sign)

    @property
    def parts(self) -> GeneratedProgram:
        """The generated stages of the plan."""
        return GeneratedProgram(
            self.captured,
            self.prepared,
            self.whole,
            self.spec,
            self.sources,
            self.mesh_rank_programs,
        )

    def trainer(
        self,
        optimizer: Any = None,
        *,
        clip_norm: float | None = None,
        weights: Any = None,
        weight_mode: str | WeightMode | None = None,
        timeout: float | None = None,
        need_loss: bool = True,
        **options: Any,
    ) -> Trainer:
        """Return a trainer of this process's ranks: all ranks, or under torchrun the own rank.

        The pipeline is not flushed at updates if the plan's schedule is "async" or a
        ``weight_mode`` is given, and with ``routing="queue"`` or a plan of the mode "queue".

        optimizer: a torch optimizer's class, factory or instance; by default that of compile().
        clip_norm: maximum global gradient norm. weights: their source, by default the model itself:
        a safetensors file or a checkpoint folder (also sharded), from which each rank reads its own
        part, or a function (name, meta tensor) -> tensor; ``strict=False`` ignores entries that the
        model does not have. weight_mode: a weight mode or its name ("spectrain"), instead of the
        plan's (:mod:`fxpart.schedule.weight_modes`). timeout: maximum seconds of any wait between
        ranks; by default a multiple of the predicted and later the measured step time
        (:mod:`fxpart.runtime.transport.deadline`). need_loss: reject a model without a loss
        (FXP106) instead of training it on the mean square of its outputs. options: further fields
        of :class:`fxpart.runtime.trainer_options.TrainerOptions`.
        """
        from fxpart.training.trainer_factory import make_trainer

        if need_loss:
            self._require_loss()
        options["clip_norm"] = clip_norm
        return make_trainer(
            self, optimizer, weights=weights, weight_mode=weight_mode, timeout=timeout, **options
        )

    def to_pipeline_stages(
        self,
        device: Any = None,
        *,
        ranks: Sequence[int] | None = None,
        microbatches: int | None = None,
        batch: Any = None,
        weights: Any = None,
        group: Any = None,
    ) -> PipelineStages:
        """Return this rank's stages as torch.distributed.pipelining PipelineStage objects.

        device: by default as for a trainer. ranks: the rank in ``group`` (the default group) of
        each stage, by default the plan's; several stages may share a rank. microbatches: by default
        the plan's. batch: a global batch with the shapes of training, by default the example batch.
        weights: as for :meth:`trainer`. FXP109 if the plan's stages are not a chain.
        """
        from fxpart.interop.torch_pipeline import pipeline_stages

        self._require_loss()
        return pipeline_stages(
            self, device=device, ranks=ranks, microbatches=microbatches, batch=batch,
            weights=weights, group=group,
        )  # fmt: skip

    def _require_loss(self) -> None:
        """Raise FXP106 if training would use the mean square of the outputs as its loss."""
        if self.captured.loss_kind == "mean-square":
            raise error(
                "FXP106",
                where=self.plan.model.name,
                why="its output has no loss, and no loss was passed to compile()",
                fix="call compile(..., loss=torch.nn.functional.cross_entropy) with the targets "
                "last in the example inputs, or pass labels to a model that computes its own loss",
            )

    def verify(self, steps: int = 3, batch: Any = None, optimizer: Any = None) -> Verification:
        """Train next to a single process and compare losses, gradients and parameters.

        FXP109 for an asynchronous plan, whose forwards read stale weights. Replicas use round-robin
        routing here, also if the plan uses queues.
        """
        if self.plan.schedule == ASYNC or any(self.plan.staleness):
            raise error(
                "FXP109",
                where="verify",
                why="the plan is asynchronous: its forwards read stale weights, so its results "
                "differ from single-process training",
                fix='plan with mode="sync" to compare; `fxpart emulate` shows the effect of '
                "asynchronous training",
            )
        from fxpart.verification.comparison import verify

        return verify(self, steps=steps, batch=batch, optimizer=optimizer)


def check_precision(request: PlanRequest) -> None:
    """Raise FXP109 if devices do not compute in the requested precision."""
    if request.precision == "fp8":
        check_float8_devices(request.cluster)


def settle_microbatches(
    front: PreparedModel,
    microbatches: int | None,
    plan: Plan | None = None,
    found: Sequence[RowDependence] | None = None,
) -> int | None:
    """Return the microbatch count that row couplings allow; FXP114 for another count.

    found: the couplings, if they are known.
    """
    constraints = {**(plan.constraints if plan is not None else {}), **front.request.constraints}
    found = couplings(front.graph, front.captured) if found is None else found
    excluding = find_exclusion(constraints, "microbatches", 1)
    return resolve_microbatches(found, constraints, microbatches, excluding)


def _find_shardings(front: PreparedModel, parts: GeneratedProgram) -> ShardingCache:
    """Return the sharded graphs that replan() uses again: those of small graphs."""
    same = parts.prepared is front.graph and parts.captured is front.captured
    small = same and front.info.nodes <= SMALL_GRAPH
    return front.shardings.for_other_costs() if small else ShardingCache()


def plan_program(
    front: PreparedModel,
    microbatches: int | None,
    progress: Callable[[Progress], None],
) -> Program:
    """Return the program with the lowest step time.

    In a job of several ranks, rank 0 searches and the others apply its plan.
    """
    made: list[Program] = []
    found_couplings = couplings(front.graph, front.captured)
    microbatches = settle_microbatches(front, microbatches, found=found_couplings)

    def search() -> Plan:
        checked = front.compare()
        with log_phase("search for the best plan"):
            answer = select_mode(front, microbatches, progress)
        found = answer.result
        check_plan(found.plan, front.request.constraints, front.blocks)
        program = Program(
            replace(with_equivalence(found.plan, front.graph, found_couplings), check=checked),
            request=answer.request,
            annotations=front.annotations,
            problem=found.problem,
            _shardings=_find_shardings(front, found.parts),
            **fields_of(found.parts),
        )
        made.append(program)
        return program.plan

    devices = len(front.request.cluster.devices)
    plan = agree_on_plan(describe_request(front, microbatches), search, devices)
    if made:
        return made[0]
    with log_phase("generate the program", area="codegen"):
        parts = apply_plan(front.captured, front.graph, front.info, plan)
    request = request_of(front.request, plan)
    return Program(plan, request=request, annotations=front.annotations, **fields_of(parts))
