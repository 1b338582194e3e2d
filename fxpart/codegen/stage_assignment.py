"""Which stage each op runs on, and whether that is sound: all faults are reported at once."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from fxpart.codegen.dataflow import StateWrites, format_node, is_op, is_tuple
from fxpart.compat import has_unbacked_symbols
from fxpart.compiler.graph_edit import annotation
from fxpart.errors import FxpartError, Problem

# graph.meta: how many stages there are, where some may have no op (evaluation).
STAGES_KEY = "fxpart_stages"


def stages_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """The stage of every op.

    An item of a tuple stays with the op that returned the tuple, and a number computed from an
    unbacked symbol without a stage of its own stays with what it is computed from.
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
            Problem("FXP900", format_node(n), "the operation is on no stage", "") for n in homeless
        )
    return stages


def check_stage_assignment(
    stages: Mapping[fx.Node, int], alive: set[fx.Node], effects: StateWrites, outside: set[fx.Node]
) -> None:
    """Raise FXP201 with everything that makes the stages impossible.

    outside: values that leave their stage for the loss or as outputs. Checked: values go forward
    only, only tensors of known shape cross, and state that is written is touched on one stage.
    """
    problems: list[Problem] = []
    for node in stages:
        if node in alive:
            problems.extend(_inputs(node, stages))
    for name, touching in effects.touching.items():
        used = sorted({stages[n] for n in touching if n in alive})
        if len(used) > 1:
            problems.append(
                Problem(
                    "FXP201",
                    f"{name}, written by the model and used on stages {_numbers(used)}",
                    "one stage writes it, and another would read an old copy",
                    "put the blocks that use it on one stage",
                )
            )
    for node in outside:
        if is_tuple(node):
            problems.append(_several(node, "it is an output of the model"))
    if problems:
        raise FxpartError(problems)


def _inputs(node: fx.Node, stages: Mapping[fx.Node, int]) -> Iterator[Problem]:
    here = stages[node]
    for used in node.all_input_nodes:
        there = stages.get(used)
        if there is None or there == here:
            continue
        if there > here:
            yield Problem(
                "FXP201",
                format_node(node),
                f"it is on stage {here} and needs {used.name} of the later stage {there}",
                "let stages follow the order of computation",
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
                "put both on one stage: such values do not cross",
            )


def _several(node: fx.Node, why: str) -> Problem:
    return Problem(
        "FXP201", format_node(node), why, "only single tensors cross; take its items first"
    )


def _numbers(stages: list[int]) -> str:
    return ", ".join(map(str, stages))
