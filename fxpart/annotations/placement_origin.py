"""Origins of placements, as text that can be parsed."""

from __future__ import annotations

import re

from torch import fx

from fxpart.annotations.graph_values import find_producer, sharding
from fxpart.compiler.graph_edit import describe_node
from fxpart.compiler.node_annotation import MESH_KEY
from fxpart.errors import error
from fxpart.sharding import Mesh, format_placements

_THROUGH = re.compile(r"'(?P<key>.*)' through (?P<node>\S+)\Z")
_ANNOTATED = re.compile(r"annotation '(?P<key>.*)'\Z")
_LONGEST = 1000  # ops that `why` lists


def make_annotation_origin(key: str) -> str:
    """Return the origin of a placement that an annotation states directly."""
    return f"annotation '{key}'"


def extend_origin(origin: str, node: str) -> str:
    """Return the origin of a placement derived from ``origin`` through a node."""
    return f"'{key_of(origin)}' through {node}"


def key_of(origin: str) -> str:
    """Return the annotation of an origin; the origin itself if there is none."""
    found = _ANNOTATED.match(origin) or _THROUGH.match(origin)
    return found["key"] if found else origin


def is_annotated(origin: str) -> bool:
    """Return whether the origin is an annotation itself."""
    return _ANNOTATED.match(origin) is not None


def why(graph: fx.GraphModule, node_name: str) -> str:
    """Explain how a node is sharded and why: the annotation and the ops in between, per axis.

    Raise FXP111 for an unknown name or a graph without a mesh.
    """
    nodes = {node.name: node for node in graph.graph.nodes}
    mesh = graph.meta.get(MESH_KEY)
    fix = "pass the name of a node of a graph after the pass `propagate`"
    if node_name not in nodes or not isinstance(mesh, Mesh):
        reason = "the graph has no mesh" if mesh is None else "the graph has no such node"
        raise error("FXP111", where=f"node {node_name[:80]!r}", why=reason, fix=fix)
    node, index = find_producer(nodes[node_name])
    known = sharding(node)
    if known is None:
        where = describe_node(nodes[node_name])
        return f"{where}\n  it holds no tensor of its own, so it has no placement"
    results = known.results[index : index + 1] if node.name != node_name else known.results
    shown = " and ".join(format_placements(r, mesh) or "open" for r in results)
    lines = [f"{describe_node(nodes[node_name])}: {shown}"]
    for axis, name in enumerate(mesh.names):
        strategy = known.strategy[axis]
        cut = {None: "open", "": "not cut"}.get(strategy, f"cuts factor {strategy}")
        what = "" if node.op in ("placeholder", "get_attr") else f"{cut}; "
        lines.append(f"  {name:<6} {what}{_origin(known.origins, axis) or 'open'}")
        lines += [f"  {'':<6} {step}" for step in _steps(nodes, node, axis)]
    return "\n".join(lines)


def _origin(origins: tuple[str, ...], axis: int) -> str:
    return origins[axis] if axis < len(origins) else ""


def _steps(nodes: dict[str, fx.Node], node: fx.Node, axis: int) -> list[str]:
    """Return the nodes between the annotation and this one, nearest first."""
    path: list[str] = []
    seen = {node}
    while len(path) < _LONGEST:
        known = sharding(node)
        found = _THROUGH.match(_origin(known.origins, axis)) if known is not None else None
        if found is None or found["node"] not in nodes:
            break
        node = nodes[found["node"]]
        if node in seen:
            break
        seen.add(node)
        path.append(node.name)
    return [f"by way of {', '.join(path)}"] if path else []
