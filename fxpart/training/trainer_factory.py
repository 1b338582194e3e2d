"""Build a trainer from a compiled program: transport, stage modules, weights, evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fxpart.checkpoint.signature import KeySource
from fxpart.codegen.materialization import constants_of, materialize, unused_state
from fxpart.codegen.program_archive import load_exported
from fxpart.compat import replaced_names
from fxpart.diagnostics.progress import log_phase
from fxpart.errors import FxpartError, Problem, error
from fxpart.plan.model import Plan
from fxpart.plan.throughput import compute_row_figures
from fxpart.runtime import Trainer
from fxpart.runtime.entry_point import announce_call
from fxpart.runtime.optimizer.factory import make_default_optimizer
from fxpart.runtime.optimizer.user_optimizer import UserOptimizer
from fxpart.runtime.queues.options import is_queue_routed
from fxpart.runtime.state.module_constants import ModuleConstants
from fxpart.runtime.state.module_watch import ModuleWatch
from fxpart.runtime.state.shard_layout import make_state_slicer
from fxpart.runtime.state.weight_consistency import check_same_weights
from fxpart.runtime.torch_modes import TorchModes, TrainerCallKind, disable_torch_modes
from fxpart.runtime.trainer_options import ASYNCHRONOUS_OPTIONS
from fxpart.runtime.transport.agreement import agree
from fxpart.schedule.spec import ASYNC, DEFAULT_SCHEDULE, SCHEDULES
from fxpart.schedule.weight_modes import FLUSH, MODES, SPECTRAIN, WeightMode, weight_mode
from fxpart.training.local_placement import LocalPlacement, get_device_type, has_gpu_ranks

if TYPE_CHECKING:
    from fxpart.api import Program
    from fxpart.capture import CapturedModel


_FROM_PLAN = frozenset(("microbatches", "schedule"))


def make_trainer(
    program: Program,
    optimizer: Any,
    *,
    weights: Any,
    weight_mode: str | WeightMode | None,
    timeout: float | None,
    strict: bool = True,
    **options: Any,
) -> Trainer:
    """Return the trainer of :meth:`fxpart.api.Program.trainer`.

    weights: their source. weight_mode: replaces the plan's. options: the trainer's own.
    """
    for name in _FROM_PLAN & options.keys():
        raise error(
            "FXP109", where=f"trainer({name}=)", why="the plan sets it",
            fix=f"pass it to compile(), as an argument or as constraints={{{name!r}: ...}}",
        )  # fmt: skip
    kind = get_device_type(program.plan)
    captured = program.captured
    ambient = TorchModes(captured.default_dtype, captured.precision, kind, captured.mode_change)
    with (
        log_phase("make the trainer", area="runtime"),
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
) -> Trainer:
    """Build the trainer without active torch modes."""
    # Imported late: an exported program trains without capture and passes.
    from fxpart.training.activation_statistics import build_activation_stages
    from fxpart.training.evaluation import build_evaluation_stages, build_prediction_stages

    plan, spec = program.plan, program.spec
    _check_precision(plan)
    queue = is_queue_routed(plan, weight_mode, options)
    options["weight_mode"] = None if queue else select_weight_mode(plan, weight_mode, options)
    given = _refresh_optimizer(program, optimizer, options["weight_mode"])
    placement = LocalPlacement.of(plan, spec, timeout)
    state = program.captured.state
    constants = constants_of(spec, state)
    mesh_ranks = placement.load(program.mesh_rank_program)

    def fill() -> tuple[dict[str, torch.Tensor], str]:
        for mesh_rank, module in [(own, m) for own in mesh_ranks for m in own.modules.values()]:
            materialize(
                module, mesh_rank.spec, state if weights is None else weights, constants=constants,
                strict=weights is not None and strict,
                part=make_state_slicer(mesh_rank.spec, mesh_rank.index),
            )  # fmt: skip
        return _get_unused_state(program, weights), ""

    unused = agree(placement.transport, "the weights", fill)
    if weights is None:
        used = [t.name for own in mesh_ranks for k in own.modules for t in own.spec.stages[k].state]
        check_same_weights(placement.transport, state, used)
    copies = ModuleConstants.of(mesh_ranks, state, unused)
    made = placement.trainer(
        mesh_ranks,
        queue=queue,
        optimizer=given,
        evaluation=lambda: build_evaluation_stages(program, mesh_ranks, copies),
        prediction=lambda loss: build_prediction_stages(program, mesh_ranks, loss, copies),
        unused=unused,
        **options,
    )
    made.model_config = program.captured.config
    captured = program.captured
    made.parts.divisors.watch(captured.state)
    made.agreement.watch = _watch_module(captured, values=weights is None)
    if (guard := program.captured.guard) is not None:
        # In a pipeline without flushes, minibatches from before and after a change are in flight
        # together.
        made.agreement.guard = lambda: guard(None if made.is_asynchronous else copies.update)
    made.activation_stages = lambda: build_activation_stages(program, mesh_ranks, copies)
    made.row_figures = lambda: compute_row_figures(plan)
    made.reload_unused = copies.reload
    return _attach_plan(made, plan)


def _watch_module(captured: CapturedModel, *, values: bool) -> ModuleWatch:
    """Return the watch of the module's tensors that the captured program's guard does not cover."""
    slots = {name: slot for name, slot in captured.slots.items() if name not in captured.guarded}
    made = ModuleWatch(slots, captured.parameters, values=values)
    made.names = replaced_names(captured.aliases)
    return made


def _refresh_optimizer(program: Program, optimizer: Any, mode: WeightMode | None) -> Any:
    """Read the module's current tensors, and return the optimizer over them.

    Without a given one it is the weight mode's, unless compile() was given another than AdamW.
    """
    from fxpart.capture.live_state import live_parameters, refresh_state

    refresh_state(program.captured)
    _check_frozen(program)
    given = program.optimizer if optimizer is None else optimizer
    if optimizer is None and given == "adamw":
        given = make_default_optimizer(mode, given)
    if isinstance(given, torch.optim.Optimizer):
        return UserOptimizer(given, live_parameters(program.captured))
    return given


def _check_frozen(program: Program) -> None:
    """Raise FXP109 for every parameter whose requires_grad has changed since compilation."""
    stages, names = program.spec.stages, replaced_names(program.spec.aliases)
    compiled = {s.name: s.requires_grad for g in stages for s in g.state if s.kind == "parameter"}
    problems = [
        Problem(
            "FXP109",
            f"parameter {names.get(name, name)}",
            f"requires_grad was {trained} when the program was compiled, and is {not trained} now",
            "compile again: the gradients that stages exchange depend on it",
        )
        for name, trained in compiled.items()
        if program.captured.state[name].requires_grad != trained
    ]
    if problems:
        raise FxpartError(problems)


def load_trainer(
    directory: str | Path,
    optimizer: Any,
    *,
    weights: Any,
    timeout: float | None = None,
    sign: KeySource = None,
    **options: Any,
) -> Trainer:
    """Return a trainer of an exported program, without model, capture or solver.

    directory: written by Program.export; every digest is checked before anything is imported
    (FXP505). weights: a safetensors file or folder with original names, a dict of tensors, or a
    function (name, meta tensor) -> tensor. sign: a file with a secret key; FXP524 if it has not
    signed the program. Other arguments are those of Program.trainer. The trainer has no eval_step,
    which needs the model.
    """
    exported = load_exported(directory, stages=(), sign=sign)
    plan, spec = Plan.loads(exported.plan, str(directory)), exported.spec
    _check_precision(plan)
    placement = LocalPlacement.of(plan, spec, timeout)
    mesh_ranks = placement.load(exported.mesh_rank_program)

    def fill() -> tuple[None, str]:
        for mesh_rank, module in [(own, m) for own in mesh_ranks for m in own.modules.values()]:
            materialize(
                module, mesh_rank.spec, weights, constants=exported.constants,
                part=make_state_slicer(mesh_rank.spec, mesh_rank.index),
            )  # fmt: skip
        return None, ""

    agree(placement.transport, "the weights", fill)
    if isinstance(optimizer, torch.optim.Optimizer):
        raise error(
            "FXP115",
            where=f"optimizer {type(optimizer).__name__}",
            why="the parameters of an optimizer instance belong to a module, and an exported "
            "program has no module",
            fix="pass its class, functools.partial(torch.optim.AdamW, lr=...), or a function",
        )
    options["queue"] = is_queue_routed(plan, None, options)
    options["weight_mode"] = None if options["queue"] else select_weight_mode(plan, None, options)
    made = _attach_plan(placement.trainer(mesh_ranks, optimizer=optimizer, **options), plan)
    made.ambient = TorchModes(precision=plan.precision, device=placement.kind)
    return made


def _attach_plan(made: Trainer, plan: Plan) -> Trainer:
    """Store in the trainer what its checkpoints record about the plan."""
    made.parts.divisors.renew()
    if made.row_figures is None:
        made.row_figures = lambda: compute_row_figures(plan)
    made.plan_text, made.fingerprint = plan.dumps(), plan.model.fingerprint
    return made


def _check_precision(plan: Plan) -> None:
    """Raise FXP601 if GPUs need a package for the plan's precision that is not installed."""
    if plan.precision == "fp8" and has_gpu_ranks(plan):
        # Imported late: other programs train without the compiler.
        from fxpart.compiler.float8_linear import check_float8_package

        check_float8_package()


def _get_unused_state(program: Program, weights: Any) -> dict[str, torch.Tensor]:
    """Return the state of the model that no stage needs, so that a state dict is complete."""
    captured = program.captured
    used = {s.name for stage in program.spec.stages for s in stage.state}
    names = [*captured.parameters, *sorted(captured.persistent)]
    unused = {n: captured.state[n].detach() for n in names if n not in used}
    if weights is not None:
        return unused_state(weights, program.spec, unused)
    return {n: t.clone() for n, t in unused.items() if t.device.type != "meta"}


def select_weight_mode(
    plan: Plan, given: str | WeightMode | None, options: Mapping[str, Any]
) -> WeightMode | None:
    """Return the weight mode of an asynchronous trainer, or None for a synchronous one.

    A trainer is synchronous if neither the plan nor the caller (``given``) requests a mode other
    than "flush". options: keyword arguments of the trainer. FXP109 for an unknown mode, for options
    that only an asynchronous trainer has, and for a schedule that has no asynchronous form.
    """
    streams = not SCHEDULES[plan.schedule].flushes
    planned = plan.weights if streams else FLUSH
    mode = weight_mode(planned if given is None else given)
    async_options = [name for name in options if name in ASYNCHRONOUS_OPTIONS]
    if mode.name == FLUSH and not streams:
        if async_options:
            raise error(
                "FXP109",
                where=f"trainer({async_options[0]}=)",
                why="only an asynchronous trainer has this option",
                fix=f'pass weight_mode="{SPECTRAIN}" or another of {", ".join(MODES)}',
            )
        return None
    # a schedule that the planner selected gives way to asynchronous 1F1B
    if "schedule" in plan.constraints and not SCHEDULES[plan.schedule].runs_unflushed:
        raise error(
            "FXP109",
            where=f"weight_mode={mode.name}",
            why=f"the schedule of the plan, {plan.schedule}, has no asynchronous form",
            fix=f'use compile(..., mode="{ASYNC}") or '
            f'constraints={{"schedule": "{DEFAULT_SCHEDULE}"}}',
        )
    return mode
