"""Write the completed annotations of a graph as text that can be edited and loaded again."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import fx

from fxpart.annotations.entry_syntax import WHOLE
from fxpart.annotations.files import FORMAT
from fxpart.annotations.graph_values import find_producer, is_item, sharding
from fxpart.compiler.node_annotation import MESH_KEY, NodeSharding
from fxpart.errors import error
from fxpart.sharding import Mesh, Placements, format_placements


@dataclass(frozen=True)
class _AnnotationLine:
    """One entry of the file and its origin."""

    key: str
    text: str
    origin: str


def dump_annotations(
    graph: fx.GraphModule, suffix: str = ".toml", without: Collection[str] = ()
) -> str:
    """Return the placements of every parameter, input and op as the text of a TOML or JSON file.

    ``op:NAME`` states the factor that each axis shards, ``node:NAME`` the placement of the result;
    undecided axes are omitted. Each entry has its origin (as a comment, or in the table
    ``origins``). Passing the file to the pass ``annotate`` gives the same placements. without:
    names of nodes that the captured graph does not have. Raise FXP111 without a mesh.
    """
    mesh = mesh_of(graph)
    lines = [line for line in _lines(graph, mesh, without) if line.text]
    if suffix == ".json":
        held = {
            "format": FORMAT,
            "mesh": str(mesh),
            "annotations": {line.key: line.text for line in lines},
            "origins": {line.key: line.origin for line in lines},
        }
        return json.dumps(held, indent=1) + "\n"
    rows = [f"format = {_quoted(FORMAT)}", f"mesh = {_quoted(str(mesh))}", "", "[annotations]"]
    rows += [f"{_quoted(e.key)} = {_quoted(e.text)}  # {_plain(e.origin)}" for e in lines]
    return "\n".join(rows) + "\n"


def sharding_text(graph: fx.GraphModule) -> str:
    """Format every node with a sharding, one per line, for golden files.

    A line has name, op, factors and placements. Factors are per mesh axis: ``-`` for none, ``?``
    while undecided.
    """
    mesh = mesh_of(graph)
    rows = []
    for node in graph.graph.nodes:
        known = sharding(node)
        if known is None:
            continue
        inside = ", ".join(a.name for a in node.all_input_nodes)
        call = f"{node.name} = {_op(node)}({inside})"
        placed = "; ".join(_shown(result, mesh) for result in known.results)
        rows.append(f"{call:<76} {_factors(known):<12} {placed}".rstrip())
    return "\n".join(rows) + "\n"


def mesh_of(graph: fx.GraphModule) -> Mesh:
    """Return the graph's mesh; raise FXP111 without one."""
    mesh = graph.meta.get(MESH_KEY)
    if not isinstance(mesh, Mesh):
        why = "it has no mesh, which the pass `annotate` sets"
        raise error("FXP111", where="the graph", why=why, fix="run the pass first")
    return mesh


def _lines(
    graph: fx.GraphModule, mesh: Mesh, without: Collection[str]
) -> Iterator[_AnnotationLine]:
    """Yield entries in graph order: factors of an op, then its results."""
    for node in graph.graph.nodes:
        if node.name in without:
            continue
        known = sharding(node)
        if node.op == "placeholder" and known is not None:
            yield _line(f"input:{node.name}", known.results[0], known, mesh)
        elif node.op == "get_attr" and known is not None:
            yield _line(str(node.target), known.results[0], known, mesh)
        elif is_item(node):
            parent, index = find_producer(node)
            known = sharding(parent)
            if known is not None and index < len(known.results):
                yield _line(f"node:{node.name}", known.results[index], known, mesh)
        elif known is not None:
            words = [
                f"{axis}:{strategy or WHOLE}"
                for axis, strategy in zip(mesh.names, known.strategy, strict=True)
                if strategy is not None
            ]
            yield _AnnotationLine(f"op:{node.name}", ",".join(words), _origin(known, mesh))
            if not isinstance(node.meta.get("val"), (list, tuple)):
                yield _line(f"node:{node.name}", known.results[0], known, mesh)


def _line(key: str, placements: Placements, known: NodeSharding, mesh: Mesh) -> _AnnotationLine:
    return _AnnotationLine(key, format_placements(placements, mesh), _origin(known, mesh))


def _origin(known: NodeSharding, mesh: Mesh) -> str:
    """Return the origin of each axis."""
    pairs = zip(mesh.names, known.origins, strict=False)
    return "; ".join(f"{axis}: {origin}" for axis, origin in pairs if origin)


def _op(node: fx.Node) -> str:
    """Return ``linear.default``, ``input``, or the name of a parameter or buffer."""
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return str(node.target)
    return str(node.target).removeprefix("aten.") if "." in str(node.target) else _name(node)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _factors(known: NodeSharding) -> str:
    """Return ``b,-`` for an op on a mesh of two axes."""
    return ",".join("?" if s is None else s or WHOLE for s in known.strategy)


def _shown(result: Placements, mesh: Mesh) -> str:
    return " ".join(
        f"{axis}:{'?' if placed is None else placed}"
        for axis, placed in zip(mesh.names, result, strict=True)
    )


def _quoted(text: str) -> str:
    """Return a TOML basic string, which equals a JSON string except for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _plain(text: str) -> str:
    """Replace characters that would end a comment."""
    return "".join(c if c.isprintable() else " " for c in text)
