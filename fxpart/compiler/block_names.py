"""Readable block names, from the module paths of their compute-intensive ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import fx

from fxpart.compiler.effects import op_of, packet_name
from fxpart.compiler.graph_edit import annotation
from fxpart.compiler.work_estimate import is_heavy, work


def block_names(blocks: Sequence[Sequence[fx.Node]]) -> list[str]:
    """Return one name per block; repeated names get a number: "decoder", "decoder#2"."""
    paths = [_paths(nodes) for nodes in blocks]
    plain = [".".join(_shared(p)) for p in paths]
    # A block that is only part of a layer is named by its first and last module:
    # "layer.0.fc1..fc2".
    names = [
        _ends(p) if _stands_above(name, plain) else name
        for name, p in zip(plain, paths, strict=True)
    ]
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result


def _paths(nodes: Sequence[fx.Node]) -> list[list[str]]:
    """Return the module paths of a block's compute-intensive ops, split at the dots."""
    ruling = [n for n in nodes if is_heavy(n)] or [max(nodes, key=work)]
    return [_path(n).split(".") for n in ruling]


def _shared(paths: Sequence[Sequence[str]]) -> Sequence[str]:
    """Return the longest common prefix of all paths."""
    depth = 0
    while all(len(p) > depth and p[depth] == paths[0][depth] for p in paths):
        depth += 1
    return paths[0][:depth]


def _stands_above(name: str, names: Sequence[str]) -> bool:
    """Return whether the name is empty or is a parent module of another block's name."""
    return not name or any(other.startswith(f"{name}.") for other in names)


def _ends(paths: Sequence[Sequence[str]]) -> str:
    """Return the common prefix, then the first and last module below it, up to the layer number."""
    shared = _shared(paths)
    tails = [_to_layer(p[len(shared) :]) for p in (paths[0], paths[-1])]
    ends = list(dict.fromkeys(".".join(t) for t in tails if t))
    return ".".join([*shared, *(["..".join(ends)] if ends else [])])


def _to_layer(path: Sequence[str]) -> Sequence[str]:
    """Return a path up to and including its layer number, or its first component."""
    numbers = [i for i, word in enumerate(path) if word.isdigit()]
    return path[: numbers[0] + 1] if numbers else path[:1]


def _path(node: fx.Node) -> str:
    """Return the op's module path, or the op's own name for an op of the root module."""
    return annotation(node).module or packet_name(op_of(node)).removeprefix("aten.") or node.name
