"""Annotate the graph with a mesh and the user's placements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from fxpart.annotations.entry_syntax import (
    FIX,
    AnnotationKey,
    read_placements,
    read_strategies,
    text_problems,
)
from fxpart.annotations.graph_values import list_result_tensors
from fxpart.annotations.model import explain_invalid_placement
from fxpart.annotations.placement_origin import make_annotation_origin
from fxpart.compiler.graph_edit import annotate
from fxpart.compiler.node_annotation import MESH_KEY, Level, NodeSharding
from fxpart.errors import FxpartError, Problem, error
from fxpart.sharding import Mesh, Placement

from .propagation.annotation_targets import AnnotationTarget, AnnotationTargets
from .propagation.axis_placements import fits, to_whole
from .propagation.axis_rules import GraphRules
from .propagation.conflicts import conflicts


@dataclass(frozen=True)
class AnnotatePass:
    """Set the graph's mesh and each node's sharding, undecided where no seed applies.

    mesh: "dp=2,tp=2". seeds: JSON of key -> placements (see docs/parallelism.md). aliases: JSON of
    other parameter names -> the name in the graph ("" if the graph does not use it). Raise FXP111
    with all invalid seeds, FXP112 with all contradictions.
    """

    mesh: str
    seeds: str = "{}"
    aliases: str = "{}"
    name: ClassVar[str] = "annotate"
    requires: ClassVar[Level] = Level.ANNOTATED
    ensures: ClassVar[Level] = Level.ANNOTATED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Set the mesh and overwrite every NodeAnnotation.sharding."""
        mesh = Mesh.parse(self.mesh)
        seeds, aliases = _table(self.seeds, "seeds"), _table(self.aliases, "aliases")
        problems = text_problems(seeds)
        if problems:
            raise FxpartError(problems)
        placed = _SeedPlacements(mesh)
        targets = AnnotationTargets(graph_module.graph, aliases)
        for text, placements in seeds.items():
            placed.add(text, placements, targets)
        placed.check()
        if placed.problems:
            raise FxpartError(placed.problems)
        for node in graph_module.graph.nodes:
            annotate(node, sharding=placed.sharding(node))
        graph_module.meta[MESH_KEY] = mesh
        problems = conflicts(graph_module.graph, GraphRules(mesh))
        if problems:
            raise FxpartError(problems)
        return graph_module


def _table(text: str, what: str) -> Mapping[str, Any]:
    """Parse a JSON option, which must be an object with text values."""
    try:
        held = json.loads(text)
    except ValueError as cause:
        held = str(cause)
    if not isinstance(held, dict) or not all(isinstance(v, str) for v in held.values()):
        why = f"{what} must be a JSON object with text values, not {str(held)[:80]}"
        fix = 'write {"input:x": "dp:S(0)"}'
        raise error("FXP109", where="pass annotate", why=why, fix=fix)
    return held


class _SeedPlacements:
    """Requested placements of each target per axis, and the problems found."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.problems: list[Problem] = []
        self._words: dict[AnnotationTarget, dict[int, tuple[Any, str]]] = {}

    def add(self, text: str, placements: str, targets: AnnotationTargets) -> None:
        """Apply one seed to all of its targets."""
        key = AnnotationKey.parse(text)
        found = targets.of(key)
        where = f"annotation {text!r}"
        if found is None:
            kinds = {"state": "parameter or buffer", "module": "module with a result"}
            why = f"the graph has no such {kinds.get(key.kind, key.kind)}. Known names: "
            why += targets.examples(key.kind) or "none"
            self.problems.append(Problem("FXP111", where, why, FIX))
            return
        words: Mapping[str, Placement | str] = (
            read_strategies(placements) if key.kind == "op" else read_placements(placements)
        )
        for axis, word in words.items():
            if axis not in self.mesh.names:
                why = f"the mesh has no axis {axis!r}, only {', '.join(self.mesh.names) or 'none'}"
                self.problems.append(Problem("FXP111", where, why, "use one of the mesh's axes"))
                continue
            for target in found:
                self._set(target, self.mesh.index(axis), word, text)

    def _set(self, target: AnnotationTarget, axis: int, word: Any, text: str) -> None:
        """Set one placement unless it contradicts another seed or does not fit the tensor."""
        before, by = self._words.setdefault(target, {}).setdefault(axis, (word, text))
        name = self.mesh.names[axis]
        if before != word:
            why = (
                f"{by!r} requests {name}:{before or '-'}, "
                f"but {text!r} requests {name}:{word or '-'}"
            )
            fix = "remove one of the two"
            self.problems.append(Problem("FXP112", _called(target), why, fix))
        elif target.index >= 0 and by == text:
            state = target.node.op != "call_function"
            why = explain_invalid_placement(
                word, target.tensor.shape, self.mesh.shape[axis], state=state
            )
            if why:
                where = f"annotation {text!r}, {_called(target)}, {name}:{word}"
                fix = "use another placement, or an axis with fewer ranks"
                self.problems.append(Problem("FXP111", where, why, fix))

    def check(self) -> None:
        """Check that factors exist and that the axes of each target fit together."""
        rules = GraphRules(self.mesh)
        for target, words in self._words.items():
            if target.index < 0:
                ruled = rules.of(target.node)
                strategy = tuple(words.get(a, ("", ""))[0] for a in range(len(self.mesh.axes)))
                if any(strategy) and (ruled is None or ruled.joint(strategy) is None):
                    known = (
                        "the op has no rule" if ruled is None else "the op's rule does not allow it"
                    )
                    key = next(text for word, text in words.values() if word)
                    where = f"annotation {key!r}, {_called(target)}"
                    self.problems.append(Problem("FXP111", where, known, "remove the factor"))
            elif len(words) > 1 and not self.problems:
                self._together(target, words)

    def _together(self, target: AnnotationTarget, words: Mapping[int, tuple[Any, str]]) -> None:
        placements = tuple(words.get(a, (None, ""))[0] for a in range(len(self.mesh.axes)))
        if not fits(to_whole(placements, self.mesh), target.tensor.shape, self.mesh):
            keys = " and ".join(sorted({repr(text) for _, text in words.values()}))
            why = "the axes together split a dim into more parts than it has, or unevenly"
            where = f"annotation {keys}, {_called(target)}"
            self.problems.append(Problem("FXP111", where, why, "shard other dims, or fewer axes"))

    def sharding(self, node: fx.Node) -> NodeSharding | None:
        """Return a node's sharding from the seeds; None for a node without tensors."""
        given = list_result_tensors(node)
        if not given:
            return None
        axes = range(len(self.mesh.axes))
        of = [self._words.get(AnnotationTarget(node, index), {}) for index in range(-1, len(given))]
        none: Any = "" if node.op != "call_function" else None
        origins = []
        for axis in axes:
            texts = [words[axis][1] for words in of if axis in words]
            origins.append(make_annotation_origin(texts[-1]) if texts else "")
        return NodeSharding(
            strategy=tuple(of[0].get(axis, (none, ""))[0] for axis in axes),
            results=tuple(
                tuple(words.get(axis, (None, ""))[0] for axis in axes) for words in of[1:]
            ),
            origins=tuple(origins),
        )


def _called(target: AnnotationTarget) -> str:
    """Return the name of a target for messages."""
    node = target.node
    name = str(node.target) if node.op == "get_attr" else node.name
    return name if target.index <= 0 else f"result {target.index} of {name}"
