"""Stages in evaluation mode: captured again, on the same ranks, with shared state."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from fxpart.codegen.evaluation_stages import assign_like
from fxpart.codegen.materialization import ShardSelector
from fxpart.codegen.mesh_programs.microbatch_graph import divide_graph, divide_sharded_graph
from fxpart.codegen.mesh_programs.rank_programs import cut
from fxpart.codegen.mesh_programs.row_dependence import mark_batch_dependent_nodes
from fxpart.codegen.mesh_programs.stage_meshes import (
    as_assigned,
    check_stage_meshes,
    place_evaluation,
)
from fxpart.codegen.module_emitter import emit
from fxpart.codegen.stage_loader import load_stage
from fxpart.codegen.stage_split import StageGraph
from fxpart.compat import storage_identity
from fxpart.compiler import PassManager
from fxpart.errors import error
from fxpart.passes import PREPARE, all_passes
from fxpart.plan.model import Plan
from fxpart.program.replicas import get_replica_rounds, replicate_program
from fxpart.program.spec import ProgramSpec, StateSpec
from fxpart.runtime.batch.outputs import Outputs, OutputSpec
from fxpart.runtime.mesh.mesh_ranks import MeshRank
from fxpart.runtime.state.module_constants import ModuleConstants
from fxpart.runtime.state.shard_layout import make_state_slicer

if TYPE_CHECKING:
    from fxpart.api import Program
    from fxpart.capture import CapturedModel


def build_evaluation_stages(
    program: Program, mesh_ranks: Sequence[MeshRank], constants: ModuleConstants | None = None
) -> list[MeshRank]:
    """Build evaluation-mode stages on the same ranks that share the state of training.

    mesh_ranks: of the training program, with the modules of this process. constants: registers the
    copies of constants, and has the state that no stage trains.
    """
    assert program.captured.again is not None
    captured = program.captured.again(False)
    return place_on_training_stages(program, captured, mesh_ranks, constants, keep_outputs=False)


def build_prediction_stages(
    program: Program,
    mesh_ranks: Sequence[MeshRank],
    loss: bool,
    constants: ModuleConstants | None = None,
) -> tuple[list[MeshRank], Outputs]:
    """Build evaluation-mode stages that return the user's outputs, with or without the loss."""
    assert program.captured.again is not None
    captured = program.captured.again(False)
    (node,) = captured.graph.graph.find_nodes(op="output")
    _, *others = node.args[0]
    kept = [
        (name, dim)
        for name, dim, value in zip(captured.outputs, captured.output_dims, others, strict=True)
        if isinstance(value, fx.Node)
    ]
    if not kept:
        raise error(
            "FXP109", where="the model's output", why="its only tensor is the loss",
            fix="use eval_step, which returns the loss",
        )  # fmt: skip
    others = [_undo_broadcast(value) for value in others]
    if not loss or captured.loss_kind == "mean-square":
        node.args = ((None, *others),)
        captured.graph.recompile()
    found = place_on_training_stages(program, captured, mesh_ranks, constants, keep_outputs=True)
    values = found[0].spec.outputs
    specs = [OutputSpec(value, name, dim) for value, (name, dim) in zip(values, kept, strict=True)]
    return found, Outputs(tuple(specs), captured.form)


def _undo_broadcast(value: Any) -> Any:
    """Return an output from before a loss broadcast it to the shape of the targets.

    ``mse_loss`` and others do so, and torch.export takes the result for the model's own output.
    """
    while isinstance(value, fx.Node) and value.target is operator.getitem:
        made: Any = value.args[0]
        index: Any = value.args[1]
        if not isinstance(made, fx.Node) or "broadcast_tensors" not in str(made.target):
            break
        arguments: Any = made.args[0]
        source = arguments[index]
        if tuple(source.meta["val"].shape) != tuple(value.meta["val"].shape):
            break
        value = source
    return value


def place_on_training_stages(
    program: Program,
    captured: CapturedModel,
    mesh_ranks: Sequence[MeshRank],
    constants: ModuleConstants | None,
    *,
    keep_outputs: bool,
) -> list[MeshRank]:
    """Place a model captured in evaluation mode on the stages and mesh ranks of training."""
    constants = constants or ModuleConstants()
    found = _place(program, captured, mesh_ranks, constants.unused, keep_outputs)
    constants.extend(found, captured.state)
    return found


def _place(
    program: Program,
    captured: CapturedModel,
    mesh_ranks: Sequence[MeshRank],
    unused: Mapping[str, torch.Tensor],
    keep_outputs: bool,
) -> list[MeshRank]:
    if captured.microbatch_size not in (None, captured.batch_size):
        assert captured.again is not None
        mark_batch_dependent_nodes(captured.again(False, captured.batch_size), captured)
    graph, plan = PassManager(all_passes()).run(PREPARE, captured.graph), program.plan
    trained = program.captured.state
    if program.mesh_rank_programs is None:
        placed = assign_like(program.graph, graph)
        assigned = divide_graph(placed, captured, plan.microbatches, outputs=keep_outputs)
        made = cut(
            assigned, captured, plan.seed, None, plan.transfer_dtype, keep_outputs=keep_outputs
        )
        return [
            _build_mesh_rank(captured, trained, *_replicate(plan, *made), mesh_rank, unused)
            for mesh_rank in mesh_ranks
        ]
    programs = program.mesh_rank_programs
    like = programs.sharded.like(graph, captured)
    sharded = divide_sharded_graph(
        replace(like, whole_outputs=keep_outputs), captured, plan.microbatches, outputs=keep_outputs
    )
    if programs.stage_ranks:
        sharded = place_evaluation(program.graph, sharded, programs.stage_ranks)
    found = []
    for mesh_rank in mesh_ranks:
        local = sharded.local(mesh_rank.index)
        if programs.stage_ranks:
            own = as_assigned(local, len(programs.stage_ranks))
        else:
            own = assign_like(programs.graph(mesh_rank.index), local)
        made = cut(
            own, captured, plan.seed, sharded, plan.transfer_dtype, keep_outputs=keep_outputs
        )
        if programs.stage_ranks:
            check_stage_meshes(own, made[0], sharded.mesh, programs.stage_ranks)
        own_stages = _replicate(plan, *made)
        found.append(_build_mesh_rank(captured, trained, *own_stages, mesh_rank, unused))
    return found


def _replicate(
    plan: Plan, spec: ProgramSpec, stages: Sequence[StageGraph]
) -> tuple[ProgramSpec, Sequence[StageGraph]]:
    """Return the stages with their replicas, if the plan has any."""
    if not plan.replicas:
        return spec, stages
    return replicate_program(spec, stages, get_replica_rounds(plan))


def _build_mesh_rank(
    captured: CapturedModel,
    training: Mapping[str, torch.Tensor],
    spec: ProgramSpec,
    stages: Sequence[StageGraph],
    mesh_rank: MeshRank,
    unused: Mapping[str, torch.Tensor],
) -> MeshRank:
    """Build one mesh rank's evaluation modules.

    training: the state of the training capture. unused: state that no stage trains.
    """
    part = make_state_slicer(spec, mesh_rank.index)
    made: dict[int, nn.Module] = {}
    for index, trained in mesh_rank.modules.items():
        stage = spec.stages[index]
        module = load_stage(emit(stages[index]), stage, get_module_device(trained))
        # Each capture numbers constants anew, so one name may denote two tensors.
        attributes = {
            s.name: s.attribute
            for s in mesh_rank.spec.stages[index].state
            if s.kind != "constant" or _is_same_constant(s.name, training, captured.state)
        }
        missing = [s for s in stage.state if s.name not in attributes]
        if missing:
            _add_missing_state(module, missing, captured.state, unused, part)
        for state in stage.state:
            if state.name in attributes:
                setattr(module, state.attribute, getattr(trained, attributes[state.name]))
        made[index] = module
    return MeshRank(mesh_rank.index, spec, made)


def _is_same_constant(
    name: str, training: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> bool:
    """Return whether both captures have the same constant under the name."""
    one, other = training.get(name), state.get(name)
    if one is None or other is None:
        return one is other
    return storage_identity(one) == storage_identity(other)


def _add_missing_state(
    module: nn.Module,
    missing: list[StateSpec],
    state: Mapping[str, torch.Tensor],
    unused: Mapping[str, torch.Tensor],
    part: ShardSelector | None,
) -> None:
    """Copy state that only evaluation reads; without a gradient, training does not change it."""
    for item in missing:
        parameter = item.kind == "parameter"
        if parameter and item.name not in unused:
            raise error(
                "FXP201",
                where=f"parameter {item.name}",
                why="evaluation uses it on a stage where training does not",
                fix="use the same layers in the training and evaluation paths of the module",
            )
        whole = unused.get(item.name, state.get(item.name))
        assert whole is not None
        tensor = whole if part is None else part(item.name, whole)
        copy = tensor.detach().to(get_module_device(module), copy=True)
        setattr(module, item.attribute, nn.Parameter(copy, False) if parameter else copy)


def get_module_device(module: nn.Module) -> torch.device:
    """Return the device on which a stage module creates tensors."""
    device = module.device
    assert isinstance(device, torch.device)
    return device
