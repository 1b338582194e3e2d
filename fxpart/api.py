"""compile(): capture -> passes -> price -> solve -> plan -> program, wired in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from fxpart.capture import Captured, capture
from fxpart.capture.fingerprint import fingerprint
from fxpart.cluster import Cluster
from fxpart.codegen import emit, split
from fxpart.codegen.export import export
from fxpart.codegen.materialise import constants_of
from fxpart.environment import launch
from fxpart.errors import FxpartError, Problem, error
from fxpart.optimizers import choose
from fxpart.passes import PREPARE
from fxpart.pipeline import BLOCKS_KEY, PassManager
from fxpart.plan import Plan, PlanInput, PlanModel
from fxpart.planning import make_plan
from fxpart.price import price
from fxpart.program import ProgramSpec
from fxpart.runtime.links import edges
from fxpart.schedule.action import Schedule
from fxpart.schedule.make import make
from fxpart.solver.portfolio import explain_infeasible, solve

if TYPE_CHECKING:
    from fxpart.runtime.trainer import Trainer
    from fxpart.verify import Verification


def compile(
    model: nn.Module,
    cluster: Cluster | str | Path = "auto",
    *,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    batch_size: int | None = None,
    microbatches: int | None = None,
    optimizer: Any = None,
    cost_model: str = "auto",
    plan: Plan | str | Path | None = None,
    constraints: Mapping[str, int | float | str | bool] | None = None,
    seed: int = 0,
    batch_dims: Mapping[str, int | None] | None = None,
) -> Program:
    """Partition ``model`` over ``cluster`` and return the program to train.

    cluster: a Cluster, a preset ("local:4", "16x8xh100", "auto") or a file. example_inputs (a tuple
    of positional inputs, or a dict) and example_kwargs: one batch, the targets of ``loss`` last or
    under its parameter names; inferred for models that carry examples. loss: a function of the
    output and the targets; without it the output's own loss. batch_size: rows of the global batch,
    by default those of the example. microbatches: fixed, or chosen. optimizer: a torch optimizer's
    class, name, factory or instance, for memory and as the trainer's default. plan: apply this one
    (a Plan or its file) instead of solving. constraints: ``stages``, ``schedule`` ("1f1b" or
    "gpipe"), ``granularity`` ("block", "op"), ``solver``, ``time_limit`` (seconds). seed: of all
    random ops. batch_dims: per input name its batch dim, None for an input that every microbatch
    gets whole.

    Raises FxpartError: FXP1xx for the model or its inputs, FXP2xx when no plan fits, FXP3xx for the
    plan, FXP4xx for the cluster.
    """
    chosen = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
    request = _Request(
        _cluster(cluster, chosen),
        optimizer if optimizer is not None else "adamw",
        cost_model,
        _checked(constraints or {}),
        seed,
    )
    _check_counts(batch_size, microbatches)
    wanted = microbatches if chosen is None else chosen.microbatches
    captured = _capture(
        model,
        example_inputs,
        example_kwargs,
        microbatches=wanted,
        ranks=len(request.cluster.devices),
        loss=loss,
        batch_size=batch_size if chosen is None else chosen.batch_size,
        batch_dims=batch_dims,
    )
    granularity = str(request.constraints.get("granularity", "block"))
    if chosen is not None:
        granularity = str(chosen.constraints.get("granularity", "block"))
    graph = PassManager().run(_prepare(granularity), captured.graph)
    info = _model_info(captured, graph)
    if chosen is not None:
        return _apply(request, captured, graph, info, chosen)
    return _solve(request, captured, graph, info, microbatches)


@dataclass(frozen=True)
class _Request:
    """What compile() was asked, parsed."""

    cluster: Cluster
    optimizer: Any
    cost_model: str
    constraints: dict[str, int | float | str | bool]
    seed: int


@dataclass(frozen=True)
class Program:
    """A compiled model: the plan, and a stage module for each rank.

    captured: what the model became. prepared: its graph with blocks; graph: with stages too. spec:
    the stages as data. sources: per stage the text of its module. optimizer: the default for
    trainers.
    """

    plan: Plan
    spec: ProgramSpec
    sources: tuple[str, ...]
    captured: Captured
    prepared: fx.GraphModule
    graph: fx.GraphModule
    optimizer: Any = None

    def replan(
        self,
        cluster: Cluster | str | Path,
        *,
        microbatches: int | None = None,
        constraints: Mapping[str, int | float | str | bool] | None = None,
        cost_model: str = "auto",
    ) -> Program:
        """The same captured model on another cluster or under other constraints, captured once.

        The granularity of the blocks stays as it was; arguments and errors are those of compile().
        """
        checked = _checked(constraints or {})
        if "granularity" in self.plan.constraints:
            checked["granularity"] = self.plan.constraints["granularity"]
        chosen = cluster if isinstance(cluster, Cluster) else Cluster.parse(str(cluster))
        request = _Request(chosen, self.optimizer, cost_model, checked, self.plan.seed)
        return _solve(request, self.captured, self.prepared, self.plan.model, microbatches)

    def schedule(self, microbatches: int | None = None) -> Schedule:
        """Every rank's actions with transfers, for the plan's or another number of microbatches."""
        return _schedule(self.spec, self.plan.schedule, microbatches or self.plan.microbatches)

    def export(self, directory: str | Path) -> tuple[Path, ...]:
        """Write plan, stage modules, actions and manifest to ``directory``; the files written."""
        schedule = self.schedule()
        return export(
            directory,
            plan=self.plan.dumps(),
            spec=self.spec,
            sources=self.sources,
            actions=["\n".join(map(str, actions)) + "\n" for actions in schedule.ranks],
            constants=constants_of(self.spec, self.captured.state),
        )

    def trainer(
        self,
        optimizer: Any = None,
        *,
        clip_norm: float | None = None,
        weights: Any = None,
        timeout: float = 300.0,
        need_loss: bool = True,
    ) -> Trainer:
        """A trainer of this process's ranks: all of them, or under torchrun its own.

        optimizer: a torch optimizer's class, factory or instance; by default what compile() was
        given. clip_norm: largest global gradient norm. weights: where they come from if not from
        the model itself: a safetensors file or folder, or a function (name, meta tensor) -> tensor.
        timeout: seconds that any wait between ranks may take. need_loss: refuse a model without a
        loss (FXP106) rather than train it on the mean square of its outputs.
        """
        from fxpart.running import make_trainer

        if need_loss and self.captured.loss_kind == "mean-square":
            raise error(
                "FXP106",
                where=self.plan.model.name,
                why="its output has no loss, and none was given to compile()",
                fix="compile(..., loss=torch.nn.functional.cross_entropy), with the targets last "
                "in the example inputs; or pass labels to a model that computes its own loss",
            )
        return make_trainer(self, optimizer, clip_norm=clip_norm, weights=weights, timeout=timeout)

    def verify(self, steps: int = 3, batch: Any = None, optimizer: Any = None) -> Verification:
        """Train beside one process and compare losses, gradients, parameters."""
        from fxpart.verify import verify

        return verify(self, steps=steps, batch=batch, optimizer=optimizer)


def _solve(
    request: _Request,
    captured: Captured,
    graph: fx.GraphModule,
    info: PlanModel,
    microbatches: int | None,
) -> Program:
    """Price the graph, choose, and make the program and its plan."""
    fixed = request.constraints
    ranks = _started_ranks()
    least, most = 1, len(request.cluster.devices)
    if (count := fixed.get("stages", ranks)) is not None:
        least = most = int(count)
    problem, provenance = price(
        graph,
        captured,
        request.cluster,
        cost_model=request.cost_model,
        batch_size=captured.batch_size,
        microbatches=microbatches,
        optimizer=request.optimizer,
        schedules=(str(fixed.get("schedule", "1f1b")),),
        min_stages=least,
        max_stages=most,
    )
    limit = float(fixed.get("time_limit", 30.0))
    solution = solve(
        problem, time_limit=limit, seed=request.seed, solver=str(fixed.get("solver", "auto"))
    )
    if solution.choice is None:
        raise FxpartError(explain_infeasible(problem))
    starts = solution.choice.starts
    assigned, spec, sources = _generate(captured, graph, starts, request.seed)
    count = problem.variants[solution.choice.variant].microbatches
    plan = make_plan(
        info,
        request.cluster,
        spec,
        _schedule(spec, solution.choice.schedule, count),
        problem,
        solution,
        batch_size=captured.batch_size,
        optimizer=choose(request.optimizer).name,
        provenance=provenance,
        constraints=fixed,
    )
    return Program(plan, spec, sources, captured, graph, assigned, request.optimizer)


def _apply(
    request: _Request, captured: Captured, graph: fx.GraphModule, info: PlanModel, plan: Plan
) -> Program:
    """Make the program that a given plan describes; FXP304 where it is another model's."""
    if plan.model.fingerprint != info.fingerprint:
        raise error(
            "FXP304",
            where=f"plan for {plan.model.name}",
            why=_difference(plan.model, info),
            fix="plan again for this model: fxpart plan TARGET -o plan.json",
        )
    starts = tuple(stage.first for stage in plan.stages)
    assigned, spec, sources = _generate(captured, graph, starts, plan.seed)
    return Program(plan, spec, sources, captured, graph, assigned, request.optimizer)


def _generate(
    captured: Captured, graph: fx.GraphModule, starts: Sequence[int], seed: int
) -> tuple[fx.GraphModule, ProgramSpec, tuple[str, ...]]:
    """The graph with its stages, the program's description, and each stage's text."""
    listed = ",".join(map(str, starts))
    assigned = PassManager().run(f'assign{{starts="{listed}"}}', graph)
    spec, stages = split(assigned, captured, seed)
    return assigned, spec, tuple(emit(stage) for stage in stages)


def _schedule(spec: ProgramSpec, name: str, microbatches: int) -> Schedule:
    return make(name, range(len(spec.stages)), microbatches, edges(spec))


def _prepare(granularity: str) -> str:
    """The pipeline from captured to annotated."""
    if granularity == "block":
        return PREPARE
    return PREPARE.replace("group_blocks", 'group_blocks{granularity="op"}')


def _model_info(captured: Captured, graph: fx.GraphModule) -> PlanModel:
    parameters = [captured.state[name] for name in captured.parameters]
    return PlanModel(
        name=captured.model_name,
        fingerprint=fingerprint(graph),
        capture=captured.method,
        batch="symbolic" if captured.symbolic else "fixed",
        nodes=sum(n.op.startswith("call") for n in graph.graph.nodes),
        blocks=len(graph.meta[BLOCKS_KEY]),
        parameters=sum(t.numel() for t in parameters),
        parameter_bytes=sum(t.numel() * t.element_size() for t in parameters),
        inputs=tuple(
            PlanInput(name=i.name, dtype=i.dtype, shape=i.shape, batch_dim=i.batch_dim)
            for i in captured.inputs
        ),
    )


def _started_ranks() -> int | None:
    """How many processes torchrun started, each of which then gets a stage; None outside of it."""
    found = launch()
    return None if found is None else found.world


def _checked(
    constraints: Mapping[str, int | float | str | bool],
) -> dict[str, int | float | str | bool]:
    """The constraints, each known and of the right kind; FXP109 lists every other one."""
    allowed: dict[str, tuple[type, tuple[str, ...]]] = {
        "stages": (int, ()),
        "schedule": (str, ("1f1b", "gpipe")),
        "granularity": (str, ("block", "op")),
        "solver": (str, ("auto", "dp", "cp-sat", "brute")),
        "time_limit": (float, ()),
    }
    problems = []
    for key, value in constraints.items():
        where = f"constraint {key}={value!r}"
        if key not in allowed:
            fix = f"one of {', '.join(allowed)}"
            problems.append(Problem("FXP109", where, "it is not a constraint", fix))
            continue
        kind, choices = allowed[key]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if choices and value not in choices:
            problems.append(Problem("FXP109", where, "it is not a choice", " or ".join(choices)))
        elif kind is int and not (number and isinstance(value, int) and value >= 1):
            problems.append(Problem("FXP109", where, "it is not a whole number above 0", ""))
        elif kind is float and not (number and float(value) > 0):
            problems.append(Problem("FXP109", where, "it is not a number of seconds above 0", ""))
    if problems:
        raise FxpartError(problems)
    return dict(constraints)


def _check_counts(batch_size: int | None, microbatches: int | None) -> None:
    """batch_size and microbatches, where given, are whole and above 0; FXP109."""
    problems = [
        Problem("FXP109", f"{name}={value!r}", "it must be a whole number above 0", "")
        for name, value in (("batch_size", batch_size), ("microbatches", microbatches))
        if value is not None
        and (isinstance(value, bool) or not isinstance(value, int) or value < 1)
    ]
    if not problems and batch_size is not None and microbatches is not None:
        if microbatches > batch_size:
            why = f"a batch of {batch_size} cannot be cut into {microbatches} microbatches"
            problems.append(Problem("FXP109", "microbatches", why, f"at most {batch_size}"))
    if problems:
        raise FxpartError(problems)


def _cluster(given: Cluster | str | Path, plan: Plan | None) -> Cluster:
    """The cluster to plan for; with a plan, the plan's own, and FXP305 if another one was named."""
    if plan is not None and given == "auto":
        return plan.cluster
    found = given if isinstance(given, Cluster) else Cluster.parse(str(given))
    if plan is not None and found.hash != plan.cluster_hash:
        raise error(
            "FXP305",
            where=f"plan for {plan.cluster.name}, {len(plan.cluster.devices)} devices",
            why=f"the cluster given is {found.name}, {len(found.devices)} devices, and differs in "
            "its devices or links",
            fix='leave cluster="auto" to run the plan as it is, or plan again for this cluster',
        )
    return found


def _capture(
    model: nn.Module,
    inputs: Any,
    kwargs: Mapping[str, Any] | None,
    *,
    microbatches: int | None,
    ranks: int,
    **options: Any,
) -> Captured:
    """Capture; where the batch cannot be symbolic, at the size of one microbatch.

    Without a wish that size is a divisor of the batch that makes about two microbatches a rank.
    """
    captured = capture(model, inputs, kwargs, **options)
    if captured.symbolic or not any(i.batch_dim is not None for i in captured.inputs):
        return captured
    batch = captured.batch_size
    count = microbatches
    if count is None:
        count = max(m for m in range(1, min(batch, 2 * ranks) + 1) if batch % m == 0)
    if batch % count:
        raise error(
            "FXP109",
            where=f"microbatches={count}",
            why=f"the model can only be captured at a fixed size, and {count} does not divide the "
            f"batch of {batch}",
            fix="choose a number that divides the batch",
        )
    if count == 1:
        return captured
    return capture(model, inputs, kwargs, microbatch_size=batch // count, **options)


def _difference(planned: PlanModel, found: PlanModel) -> str:
    """What distinguishes the plan's model from the one at hand, in words."""
    rows = [
        f"{field}: planned {getattr(planned, field)}, found {getattr(found, field)}"
        for field in ("name", "capture", "batch", "nodes", "blocks", "parameters", "inputs")
        if getattr(planned, field) != getattr(found, field)
    ]
    return "\n".join(rows) or "the same counts, but other operations, shapes or arguments"
