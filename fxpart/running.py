"""From a compiled program to a trainer: transport, stage modules with their weights, evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxpart.codegen import emit, load_stage, split
from fxpart.codegen.evaluation import assign_like
from fxpart.codegen.export import load_exported
from fxpart.codegen.materialise import constants_of, materialise
from fxpart.errors import error
from fxpart.passes import PREPARE
from fxpart.pipeline import PassManager
from fxpart.plan import Plan
from fxpart.program import ProgramSpec, StateSpec
from fxpart.runtime import Trainer, connect
from fxpart.runtime.connect import local_device

if TYPE_CHECKING:
    from fxpart.api import Program


def make_trainer(
    program: Program, optimizer: Any, *, clip_norm: float | None, weights: Any, timeout: float
) -> Trainer:
    """The trainer of :meth:`fxpart.api.Program.trainer`."""
    plan, spec = program.plan, program.spec
    ranks = tuple(stage.ranks[0] for stage in plan.stages)
    kind = "cuda" if _wants_gpu(plan) else "cpu"
    transport = connect(len(ranks), device=kind, timeout=timeout)
    state = program.captured.state
    constants = constants_of(spec, state)
    modules: dict[int, nn.Module] = {}
    devices = {rank: _device(kind, rank, transport.local) for rank in transport.local}
    for stage, rank in enumerate(ranks):
        if rank in transport.local:
            module = load_stage(program.sources[stage], spec.stages[stage], devices[rank])
            materialise(
                module, spec, state if weights is None else weights, constants=constants,
                strict=weights is not None,
            )  # fmt: skip
            modules[stage] = module
    return Trainer(
        spec,
        modules,
        ranks=ranks,
        transport=transport,
        microbatches=plan.microbatches,
        schedule=plan.schedule,
        optimizer=program.optimizer if optimizer is None else optimizer,
        clip_norm=clip_norm,
        evaluation=lambda: evaluation(program, modules),
        devices=devices,
        unused=_unused(program) if weights is None else None,
    )


def load_trainer(
    directory: str | Path,
    optimizer: Any,
    *,
    weights: Any,
    clip_norm: float | None = None,
    timeout: float = 300.0,
) -> Trainer:
    """A trainer of an exported program: no model, no capture and no solver are needed.

    directory: what Program.export wrote; every digest is checked before anything is imported
    (FXP505). weights: a safetensors file or folder with original names, a dict of tensors, or a
    function (name, meta tensor) -> tensor. The rest is as for Program.trainer; there is no
    eval_step, which needs the model.
    """
    exported = load_exported(directory)
    plan, spec = Plan.loads(exported.plan, str(directory)), exported.spec
    ranks = tuple(stage.ranks[0] for stage in plan.stages)
    kind = "cuda" if _wants_gpu(plan) else "cpu"
    transport = connect(len(ranks), device=kind, timeout=timeout)
    devices = {rank: _device(kind, rank, transport.local) for rank in transport.local}
    modules = {s: m for s, m in exported.modules.items() if ranks[s] in transport.local}
    for stage, module in modules.items():
        vars(module)["device"] = devices[ranks[stage]]
        materialise(module, spec, weights, constants=exported.constants)
    return Trainer(
        spec,
        modules,
        ranks=ranks,
        transport=transport,
        microbatches=plan.microbatches,
        schedule=plan.schedule,
        optimizer=optimizer,
        clip_norm=clip_norm,
        devices=devices,
    )


def evaluation(
    program: Program, modules: Mapping[int, nn.Module]
) -> tuple[ProgramSpec, dict[int, nn.Module]]:
    """The program captured in evaluation mode, on the same stages and sharing their state.

    modules: the training modules of this process, by stage.
    """
    assert program.captured.again is not None
    captured = program.captured.again(False)
    graph = PassManager().run(PREPARE, captured.graph)
    spec, stages = split(assign_like(program.graph, graph), captured, program.plan.seed)
    made: dict[int, nn.Module] = {}
    for index, trained in modules.items():
        stage = spec.stages[index]
        module = load_stage(emit(stages[index]), stage, _device_of(trained))
        held = {s.name: s.attribute for s in program.spec.stages[index].state}
        missing = [s for s in stage.state if s.name not in held]
        if missing:
            _fill(module, missing, captured.state)
        for state in stage.state:
            if state.name in held:
                setattr(module, state.attribute, getattr(trained, held[state.name]))
        made[index] = module
    return spec, made


def _fill(module: nn.Module, missing: list[StateSpec], state: Mapping[str, torch.Tensor]) -> None:
    """State that only evaluation reads (constants, fixed buffers), copied from the model."""
    for item in missing:
        tensor = state[item.name]
        if item.kind == "parameter":
            raise error(
                "FXP201",
                where=f"parameter {item.name}",
                why="evaluation uses it on a stage where training does not",
                fix="capture with the module's training and evaluation paths using the same layers",
            )
        setattr(module, item.attribute, tensor.detach().to(_device_of(module), copy=True))


def _wants_gpu(plan: Plan) -> bool:
    """Whether the plan's ranks are GPUs; FXP602 where it is so and this machine has none."""
    devices = {d.name: d for d in plan.cluster.devices}
    kinds = {devices[r.device].kind for r in plan.prediction.ranks}
    if "gpu" not in kinds:
        return False
    if not torch.cuda.is_available():
        raise error(
            "FXP602",
            where=f"a plan for {plan.cluster.name}",
            why="its ranks are GPUs and torch sees none here",
            fix='compile for this machine (cluster="local:4"), or start the program there',
        )
    return True


def _device_of(module: nn.Module) -> torch.device:
    """Where a stage module makes new tensors."""
    device = module.device
    assert isinstance(device, torch.device)
    return device


def _device(kind: str, rank: int, local: tuple[int, ...]) -> torch.device:
    """The rank's device: under torchrun by LOCAL_RANK, in one process by turns over all GPUs."""
    if kind == "cpu" or len(local) == 1:
        return local_device(kind)
    return torch.device("cuda", rank % torch.cuda.device_count())


def _unused(program: Program) -> dict[str, torch.Tensor]:
    """State of the model that no stage needs, so that a state dict is complete."""
    captured = program.captured
    held = {s.name for stage in program.spec.stages for s in stage.state}
    names = [*captured.parameters, *sorted(captured.persistent)]
    return {
        n: captured.state[n].detach().clone()
        for n in names
        if n not in held and captured.state[n].device.type != "meta"
    }
