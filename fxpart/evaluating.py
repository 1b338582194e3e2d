"""A program's stages in evaluation mode: captured again, on the same ranks, with the same state."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from fxpart.codegen.emit import emit
from fxpart.codegen.evaluation import assign_like
from fxpart.codegen.load import load_stage
from fxpart.codegen.materialise import Part
from fxpart.codegen.split import StageGraph
from fxpart.compat import storage_identity
from fxpart.errors import error
from fxpart.passes import PREPARE
from fxpart.pipeline import PassManager
from fxpart.plan import Plan
from fxpart.program import ProgramSpec, StateSpec
from fxpart.runtime.constants import Constants
from fxpart.runtime.lanes import Lane
from fxpart.runtime.outputs import Outputs, OutputSpec
from fxpart.runtime.pieces import parts_of
from fxpart.runtime.replicas import original, replicated, rounds_of
from fxpart.sharded.coupling import mark_numbers
from fxpart.sharded.divided import divided, divided_lanes
from fxpart.sharded.programs import cut

if TYPE_CHECKING:
    from fxpart.api import Program
    from fxpart.capture import Captured


def evaluation(
    program: Program, lanes: Sequence[Lane], constants: Constants | None = None
) -> list[Lane]:
    """The program captured in evaluation mode, on the same stages and sharing their state.

    lanes: of the training program, with the modules of this process. constants: where the copies
    of constants are noted.
    """
    assert program.captured.again is not None
    captured = program.captured.again(False)
    found = _in_evaluation(program, captured, lanes, keep_outputs=False)
    _note(found, captured, constants)
    return found


def prediction(
    program: Program, lanes: Sequence[Lane], loss: bool, constants: Constants | None = None
) -> tuple[list[Lane], Outputs]:
    """The same with the user's outputs; loss: and with the loss."""
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
            "FXP109", where="the model's output", why="it has no tensor but the loss",
            fix="eval_step gives the loss",
        )  # fmt: skip
    others = [_unbroadcast(value) for value in others]
    if not loss or captured.loss_kind == "mean-square":
        node.args = ((None, *others),)
        captured.graph.recompile()
    found = _in_evaluation(program, captured, lanes, keep_outputs=True)
    _note(found, captured, constants)
    values = found[0].spec.outputs
    specs = [OutputSpec(value, name, dim) for value, (name, dim) in zip(values, kept, strict=True)]
    return found, Outputs(tuple(specs), captured.form)


def _note(lanes: Sequence[Lane], captured: Captured, constants: Constants | None) -> None:
    """Note the copies of constants in evaluation modules."""
    if constants is not None:
        constants.extend(lanes, captured.state)


def _unbroadcast(value: Any) -> Any:
    """An output before a loss broadcast it to its own shape, which ties it to the targets.

    ``mse_loss`` and others do; torch.export then takes the result for the model's own output.
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


def _in_evaluation(
    program: Program, captured: Captured, lanes: Sequence[Lane], *, keep_outputs: bool
) -> list[Lane]:
    """A model that was captured in evaluation mode, on the stages and lanes of training."""
    if captured.microbatch_size not in (None, captured.batch_size):
        assert captured.again is not None
        mark_numbers(captured.again(False, captured.batch_size), captured)
    graph, plan = PassManager().run(PREPARE, captured.graph), program.plan
    trained = program.captured.state
    if program.lanes is None:
        placed = assign_like(program.graph, graph)
        assigned = divided(placed, captured, plan.microbatches, outputs=keep_outputs)
        made = cut(
            assigned, captured, plan.seed, None, plan.transfer_dtype, keep_outputs=keep_outputs
        )
        return [_evaluated(captured, trained, *_copied(plan, *made), lane) for lane in lanes]
    like = program.lanes.sharded.like(graph, captured)
    sharded = divided_lanes(
        replace(like, whole_outputs=keep_outputs), captured, plan.microbatches, outputs=keep_outputs
    )
    found = []
    for lane in lanes:
        own = assign_like(program.lanes.graph(lane.index), sharded.local(lane.index))
        made = cut(
            own, captured, plan.seed, sharded, plan.transfer_dtype, keep_outputs=keep_outputs
        )
        found.append(_evaluated(captured, trained, *made, lane))
    return found


def _copied(
    plan: Plan, spec: ProgramSpec, stages: Sequence[StageGraph]
) -> tuple[ProgramSpec, Sequence[StageGraph]]:
    """Stages with their copies, where the plan has any."""
    if not plan.replicas:
        return spec, stages
    whole = replicated(spec, rounds_of(plan))
    return whole, [stages[original(whole, k)] for k in range(len(whole.stages))]


def _evaluated(
    captured: Captured,
    training: Mapping[str, torch.Tensor],
    spec: ProgramSpec,
    stages: Sequence[StageGraph],
    lane: Lane,
) -> Lane:
    """One lane's evaluation modules. training: the state of the program captured in training."""
    part = parts_of(spec, lane.index)
    made: dict[int, nn.Module] = {}
    for index, trained in lane.modules.items():
        stage = spec.stages[index]
        module = load_stage(emit(stages[index]), stage, device_of(trained))
        # Constants are numbered in each capture: one name may be of two tensors.
        held = {
            s.name: s.attribute
            for s in lane.spec.stages[index].state
            if s.kind != "constant" or _is_same(s.name, training, captured.state)
        }
        missing = [s for s in stage.state if s.name not in held]
        if missing:
            _fill(module, missing, captured.state, part)
        for state in stage.state:
            if state.name in held:
                setattr(module, state.attribute, getattr(trained, held[state.name]))
        made[index] = module
    return Lane(lane.index, spec, made)


def _is_same(
    name: str, training: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> bool:
    """Whether both captures have the same constant under the name."""
    one, other = training.get(name), state.get(name)
    if one is None or other is None:
        return one is other
    return storage_identity(one) == storage_identity(other)


def _fill(
    module: nn.Module,
    missing: list[StateSpec],
    state: Mapping[str, torch.Tensor],
    part: Part | None,
) -> None:
    """State that only evaluation reads (constants, fixed buffers), copied from the model."""
    for item in missing:
        tensor = state[item.name] if part is None else part(item.name, state[item.name])
        if item.kind == "parameter":
            raise error(
                "FXP201",
                where=f"parameter {item.name}",
                why="evaluation uses it on a stage where training does not",
                fix="capture with the module's training and evaluation paths using the same layers",
            )
        setattr(module, item.attribute, tensor.detach().to(device_of(module), copy=True))


def device_of(module: nn.Module) -> torch.device:
    """Where a stage module makes new tensors."""
    device = module.device
    assert isinstance(device, torch.device)
    return device
