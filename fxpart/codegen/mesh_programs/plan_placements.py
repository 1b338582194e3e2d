"""Convert the placements of a graph to a plan and back."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

from torch import fx

from fxpart.annotations.graph_values import sharding
from fxpart.annotations.placement_origin import is_annotated, key_of
from fxpart.codegen.mesh_programs.sharded_graph import ShardedGraph
from fxpart.compiler import MESH_KEY
from fxpart.compiler.collective_calls import op_name, unwrap_seeded_call
from fxpart.compiler.graph_edit import annotate, fork
from fxpart.compiler.node_annotation import NodeSharding
from fxpart.errors import error
from fxpart.passes.rules import rule_of
from fxpart.plan.model import PlanPlacement, PlanSharding
from fxpart.sharding import (
    REPLICATE,
    Mesh,
    Placements,
    Shard,
    format_placements,
    parse_placements,
)

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel

Kind = Literal["input", "state", "op"]
_KINDS: dict[str, Kind] = {"placeholder": "input", "get_attr": "state", "call_function": "op"}


def plan_sharding(sharded: ShardedGraph) -> PlanSharding:
    """Return the plan's placements: all that is not replicated, grouped by placement."""
    mesh = sharded.mesh
    groups: dict[tuple[Kind, str, str, tuple[tuple[str, str], ...]], dict[str, None]] = {}
    unruled: Counter[str] = Counter()
    for node in sharded.whole.graph.nodes:
        known = sharding(node)
        if known is None or node.op not in _KINDS:
            continue
        if node.op == "call_function" and rule_of(node) is None:
            unruled[op_name(unwrap_seeded_call(node)[0])] += 1
        strategy, placements = _strategy(known, mesh), _results(known, mesh)
        if not strategy and not placements:
            continue
        name = str(node.target) if node.op == "get_attr" else node.name
        key = (_KINDS[node.op], placements, strategy, _origins(known, mesh))
        groups.setdefault(key, {})[name] = None
    return PlanSharding(
        mesh=str(mesh),
        zero=sharded.zero,
        zero_axis=sharded.zero_axis,
        placed=tuple(
            PlanPlacement(
                kind=kind,
                names=tuple(names),
                placements=placements,
                strategy=strategy,
                origins=dict(origins),
            )
            for (kind, placements, strategy, origins), names in groups.items()
        ),
        unruled=dict(unruled),
        certificate=sharded.certificate,
    )


def restore_sharding(
    graph: fx.GraphModule, captured: CapturedModel, given: PlanSharding
) -> ShardedGraph:
    """Return the graph with the placements of a plan; raise FXP304 for unknown names."""
    mesh = Mesh.parse(given.mesh)
    whole = fork(graph)
    whole.meta[MESH_KEY] = mesh
    recorded = {(entry.kind, name): entry for entry in given.placed for name in entry.names}
    missing = set(recorded)
    for node in whole.graph.nodes:
        kind = _KINDS.get(node.op)
        stored = _count(node)
        if kind is None or not stored:
            continue
        name = str(node.target) if kind == "state" else node.name
        missing.discard((kind, name))
        annotate(node, sharding=_sharding(recorded.get((kind, name)), stored, mesh))
    if missing:
        listed = ", ".join(sorted(name for _, name in missing)[:5])
        raise error(
            "FXP304",
            where="the plan's placements",
            why=f"the model does not contain {listed}",
            fix="create a new plan for this model: fxpart plan TARGET -o plan.json",
        )
    return ShardedGraph(whole, captured, given.zero, given.zero_axis, given.certificate)


def _sharding(entry: PlanPlacement | None, count: int, mesh: Mesh) -> NodeSharding:
    """Return a node's sharding from the plan's entry; replicated without an entry."""
    nothing: Placements = (REPLICATE,) * len(mesh.axes)
    if entry is None:
        return NodeSharding(("",) * len(mesh.axes), (nothing,) * count)
    words = dict(part.split(":", 1) for part in entry.strategy.split(",") if part)
    texts = [text.strip() for text in entry.placements.split(";")] if entry.placements else []
    results: list[Placements] = [
        tuple(p or REPLICATE for p in parse_placements(text, mesh)) for text in texts[:count]
    ]
    results += [nothing] * (count - len(results))
    return NodeSharding(
        strategy=tuple(words.get(axis, "") for axis in mesh.names),
        results=tuple(results),
        origins=tuple(entry.origins.get(axis, "") for axis in mesh.names),
    )


def _count(node: fx.Node) -> int:
    """Return the number of tensors for which the node has placements."""
    from fxpart.annotations.graph_values import list_result_tensors

    return len(list_result_tensors(node))


def _strategy(known: NodeSharding, mesh: Mesh) -> str:
    pairs = zip(mesh.names, known.strategy, strict=True)
    return ",".join(f"{axis}:{factor}" for axis, factor in pairs if factor)


def _results(known: NodeSharding, mesh: Mesh) -> str:
    """Format the placements of all tensors; "" if all are replicated."""
    shown = [
        format_placements(
            tuple(p if isinstance(p, Shard) or p != REPLICATE else None for p in result), mesh
        )
        for result in known.results
    ]
    return "; ".join(shown) if any(shown) else ""


def _origins(known: NodeSharding, mesh: Mesh) -> tuple[tuple[str, str], ...]:
    """Return, per axis, the annotation that caused a placement, where there is one."""
    found = []
    for axis, origin in zip(mesh.names, known.origins, strict=False):
        if origin:
            key = key_of(origin)
            direct = is_annotated(origin) or key == origin
            found.append((axis, origin if direct else f"follows from '{key}'"))
    return tuple(found)
