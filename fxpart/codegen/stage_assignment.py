"""Stage of each op, and validity checks that report all problems at once."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator, Mapping

import torch
from torch import fx

from fxpart.codegen.dataflow import StateWrites, format_node, is_op, is_tuple
from fxpart.compat import has_unbacked_symbols
from fxpart.compiler.graph_edit import annotation
from fxpart.errors import FxpartError, Problem

# graph.meta: number of stages, since some may have no op (evaluation).
STAGES_KEY = "fxpart_stages"


def stages_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the stage of every op.

    An item of a tuple is on the stage of the op that returned the tuple. A number computed from an
    unbacked symbol, without a stage of its own, is on the stage of its operands.
    """
    stages: dict[fx.Node, int] = {}
    homeless: list[fx.Node] = []
    for node in graph.nodes:
        if not is_op(node):
            continue
        stage = annotation(node).stage
        first = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(first, fx.Node) and is_tuple(first):
            stage = stages.get(first, stage)
        if stage is None:
            stage = max((stages[a] for a in node.all_input_nodes if a in stages), default=None)
        if stage is None:
            homeless.append(node)
        else:
            stages[node] = stage
    if homeless:
        raise FxpartError(
            Problem("FXP900", format_node(n), "the operation has no stage", "") for n in homeless
        )
    return stages


def check_stage_assignment(
    stages: Mapping[fx.Node, int],
    alive: set[fx.Node],
    effects: StateWrites,
    outside: set[fx.Node],
    duplicated: Container[fx.Node] = (),
) -> None:
    """Raise FXP201 with everything that makes the assignment invalid.

    outside: values returned as the loss or as outputs. duplicated: ops that each stage runs itself.
    Values must only flow forward, only tensors of known shape may cross, and written state must be
    used on a single stage.
    """
    problems: list[Problem] = []
    for node in stages:
        if node in alive:
            problems.extend(_inputs(node, stages, duplicated))
    for name, touching in effects.touching.items():
        used = sorted({stages[n] for n in touching if n in alive})
        if len(used) > 1:
            problems.append(
                Problem(
                    "FXP201",
                    f"{name}, which the model writes, used on stages {_numbers(used)}",
                    "one stage writes it, so the other stages would read stale copies",
                    "put the blocks that use it on one stage",
                )
            )
    for node in outside:
        if is_tuple(node):
            problems.append(_several(node, "it is an output of the model"))
    if problems:
        raise FxpartError(problems)


def _inputs(
    node: fx.Node, stages: Mapping[fx.Node, int], duplicated: Container[fx.Node]
) -> Iterator[Problem]:
    here = stages[node]
    for used in node.all_input_nodes:
        there = stages.get(used)
        if there is None or there == here or used in duplicated:
            continue
        if there > here:
            yield Problem(
                "FXP201",
                format_node(node),
                f"it is on stage {here} but needs {used.name} of the later stage {there}",
                "assign stages in the order of computation",
            )
            continue
        value = used.meta.get("val")
        if is_tuple(used):
            yield _several(used, f"stage {here} takes the whole tuple from stage {there}")
        elif not isinstance(value, torch.Tensor) or has_unbacked_symbols(value):
            kind = "number" if not isinstance(value, torch.Tensor) else "size"
            yield Problem(
                "FXP201",
                format_node(used),
                f"its {kind} depends on the data, and stage {here} needs it from stage {there}",
                "put both on one stage, since such values cannot be sent",
            )


def _several(node: fx.Node, why: str) -> Problem:
    return Problem(
        "FXP201", format_node(node), why, "only tensors are sent between stages; index the tuple"
    )


def _numbers(stages: list[int]) -> str:
    return ", ".join(map(str, stages))
