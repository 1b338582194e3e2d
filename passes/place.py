"""Apply selected strategies and placements where annotations and propagation decided nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar

from torch import fx

from fxpart.compiler.graph_edit import annotate, annotation, value
from fxpart.compiler.node_annotation import MESH_KEY, Level, NodeSharding
from fxpart.compiler.tensor_sizes import tensors
from fxpart.errors import FxpartError, Problem, error
from fxpart.sharding import REPLICATE, Mesh, Placements, parse_placements

from .rules import REPLICATED, layout, rule_of

CHOSEN = "chosen by the solver"
_FIX = 'write choice="linear=b|n;weight=dp:R,tp:S(0)", or use choose_placements()'


@dataclass(frozen=True)
class PlacePass:
    """Decide every undecided axis of the nodes that the choice names.

    choice: ``node=strategy|strategy;...``, one strategy per mesh axis, for ops; and
    ``node=dp:S(0),tp:R`` for inputs and state. Decided axes do not change. Raise FXP109 with
    everything wrong in the choice.
    """

    choice: str = ""
    name: ClassVar[str] = "place"
    requires: ClassVar[Level] = Level.ANNOTATED
    ensures: ClassVar[Level] = Level.ANNOTATED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Set NodeAnnotation.sharding of the named nodes."""
        mesh = graph_module.meta.get(MESH_KEY)
        if not isinstance(mesh, Mesh):
            raise error("FXP109", where="pass place", why="the graph has no mesh", fix=_FIX)
        nodes = {node.name: node for node in graph_module.graph.nodes}
        problems = []
        for entry in filter(None, self.choice.split(";")):
            name, equals, text = entry.partition("=")
            node = nodes.get(name)
            try:
                if node is None or not equals or node.op == "output":
                    raise _InvalidChoiceError("the graph has no such node")
                if node.op == "call_function":
                    _op(node, text.split("|"), mesh)
                else:
                    _source(node, parse_placements(text, mesh))
            except _InvalidChoiceError as fault:
                where = f"pass place, {entry[:80]!r}"
                problems.append(Problem("FXP109", where, str(fault), _FIX))
            except FxpartError as fault:
                problems += fault.problems
        if problems:
            raise FxpartError(problems)
        return graph_module


class _InvalidChoiceError(Exception):
    """Raised for an invalid entry of the choice."""


def _op(node: fx.Node, chosen: Sequence[str], mesh: Mesh) -> None:
    if len(chosen) != len(mesh.axes):
        raise _InvalidChoiceError(
            f"{len(chosen)} strategies do not match the {len(mesh.axes)} axes of the mesh"
        )
    old = annotation(node).sharding
    before = old.strategy if old is not None else (None,) * len(chosen)
    strategy = tuple(new if had is None else had for had, new in zip(before, chosen, strict=True))
    results = _results(node, strategy, mesh)
    if results is None:
        raise _InvalidChoiceError(f"the op has no strategy {strategy}")
    _write(node, strategy, results)


def _results(node: fx.Node, strategy: tuple[str, ...], mesh: Mesh) -> tuple[Placements, ...] | None:
    """Return the result placements under a strategy; None for an invalid strategy."""
    rule = rule_of(node) if any(strategy) else None
    if rule is None:
        whole: Placements = (REPLICATE,) * len(mesh.axes)
        return None if any(strategy) else (whole,) * len(tensors(value(node)))
    made = layout(rule, strategy, mesh)
    return None if made is None else made.results


def _source(node: fx.Node, placements: Placements) -> None:
    if None in placements:
        raise _InvalidChoiceError("a mesh axis has no placement")
    _write(node, (REPLICATED,) * len(placements), (placements,))


def _write(node: fx.Node, strategy: tuple[str, ...], results: tuple[Placements, ...]) -> None:
    """Set undecided axes; decided axes keep their origin."""
    old = annotation(node).sharding
    if old is None:
        annotate(node, sharding=NodeSharding(strategy, results, (CHOSEN,) * len(strategy)))
        return
    placed = tuple(
        tuple(new if had is None else had for had, new in zip(before, after, strict=True))
        for before, after in zip(old.results, results, strict=True)
    )
    source = node.op != "call_function"
    open_ = [
        any(r[axis] is None for r in old.results) if source else old.strategy[axis] is None
        for axis in range(len(strategy))
    ]
    origins = tuple(
        CHOSEN if is_open else (had or "")
        for is_open, had in zip_longest(open_, old.origins[: len(open_)], fillvalue="")
    )
    annotate(node, sharding=NodeSharding(strategy, placed, origins))
