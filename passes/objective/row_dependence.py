"""Explain which parts of a model couple the rows of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import fx

from fxpart.compiler.effects import is_random, op_of, packet_name
from fxpart.compiler.graph_edit import annotation

from .analysis import ObjectiveAnalysis
from .microbatch_rewrite import needed_for
from .value_kinds import BatchRelation

# A captured graph: names of state that microbatches write as the whole batch does.
STEP_STATE_KEY = "fxpart_step_state"
_SHOWN = 3  # maximum number of layers that a message names


@dataclass(frozen=True)
class RowDependence:
    """Parts of a model that couple rows in one way. where: location. why: what is coupled."""

    where: str
    why: str


def coupling_of(analysis: ObjectiveAnalysis, loss: bool = True) -> tuple[RowDependence, ...]:
    """Return everything that makes the loss or written state depend on the division of the batch.

    loss: whether the loss counts; otherwise only written state does.
    """
    found: dict[str, RowDependence] = {}
    layers: dict[str, str] = {}  # batch normalizations, by module path
    writers = sorted(analysis.writers.items(), key=lambda item: not _normalization(item[0]))
    for writer, names in writers:
        module, layer = annotation(writer).module, _normalization(writer)
        if layer:
            layers.setdefault(module, layer)
        elif module not in layers and not _writes_per_step(analysis, writer, names):
            why = f"{', '.join(names)} is updated with the values of each microbatch"
            found.setdefault(module, RowDependence(_where(writer), why))
    end = analysis.loss
    if loss and end is not None:
        kind = analysis.kind(end)
        if kind.coupled or kind.relation in (BatchRelation.ROWS, BatchRelation.INDEX):
            cause = kind.cause if kind.cause is not None else end
            module, name = annotation(cause).module, _normalization(cause)
            if name:
                layers.setdefault(module, name)
            else:
                key = f"{module} {cause.name}"
                found.setdefault(key, RowDependence(_where(cause), f"{_op(cause)} combines rows"))
    return (*_normalizations(layers), *found.values())


def _writes_per_step(analysis: ObjectiveAnalysis, writer: fx.Node, names: tuple[str, ...]) -> bool:
    """Return whether what a node writes to state depends neither on rows nor on random numbers.

    Each microbatch can then compute what the whole batch would, from the state before the step.
    Trained parameters do not count: microbatches without flushes read several versions of them.
    """
    if analysis.kind(writer).relation is not BatchRelation.FIXED:
        return False
    module: Any = analysis.graph.owning_module
    if any(attrgetter(name)(module).requires_grad for name in names):
        return False
    return not any(is_random(node) for node in needed_for([writer]))


def _normalizations(layers: dict[str, str]) -> tuple[RowDependence, ...]:
    """Return one entry per kind of layer. layers: the kind of each, by module path."""
    by_kind: dict[str, list[str]] = {}
    for module, kind in layers.items():
        by_kind.setdefault(kind, []).append(module)
    found = []
    for kind, modules in by_kind.items():
        more = f" and {len(modules) - _SHOWN} more" if len(modules) > _SHOWN else ""
        where = f"{kind} in {', '.join(modules[:_SHOWN])}{more}"
        found.append(RowDependence(where, "batch statistics"))
    return tuple(found)


def _normalization(node: fx.Node) -> str:
    """Return the kind of a normalization over the batch; "" for other ops."""
    name = packet_name(op_of(node))
    if "batch_norm" in name:
        return "BatchNorm"
    return "InstanceNorm" if "instance_norm" in name else ""


def _op(node: fx.Node) -> str:
    name = packet_name(op_of(node)) if node.op == "call_function" else ""
    return name.removeprefix("aten.") or node.name


def _where(node: fx.Node) -> str:
    """Return the module and source line of a node."""
    known = annotation(node)
    module = known.module or "the loss"
    return f"{module} ({known.source})" if known.source else module
