"""Readable names for blocks, from the module paths of their heavy ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import fx

from fxpart.compiler.effects import op_of, packet_name
from fxpart.compiler.graph_edit import annotation
from fxpart.compiler.work_estimate import is_heavy, work


def block_names(blocks: Sequence[Sequence[fx.Node]]) -> list[str]:
    """One name for each block; a name that would repeat gets a number: "decoder", "decoder#2"."""
    paths = [_paths(nodes) for nodes in blocks]
    plain = [".".join(_shared(p)) for p in paths]
    # A layer whose other part is a block of its own is named by its ends: "layer.0.fc1..fc2".
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
    """The module paths of a block's heavy ops, split into words."""
    ruling = [n for n in nodes if is_heavy(n)] or [max(nodes, key=work)]
    return [_path(n).split(".") for n in ruling]


def _shared(paths: Sequence[Sequence[str]]) -> Sequence[str]:
    """The words with which all paths begin."""
    depth = 0
    while all(len(p) > depth and p[depth] == paths[0][depth] for p in paths):
        depth += 1
    return paths[0][:depth]


def _stands_above(name: str, names: Sequence[str]) -> bool:
    """Whether the name is a container of other blocks' modules, or none."""
    return not name or any(other.startswith(f"{name}.") for other in names)


def _ends(paths: Sequence[Sequence[str]]) -> str:
    """Shared words, then the first and last module below them, each up to its layer's number."""
    shared = _shared(paths)
    tails = [_to_layer(p[len(shared) :]) for p in (paths[0], paths[-1])]
    ends = list(dict.fromkeys(".".join(t) for t in tails if t))
    return ".".join([*shared, *(["..".join(ends)] if ends else [])])


def _to_layer(path: Sequence[str]) -> Sequence[str]:
    """A path up to the number of its layer, or its first word."""
    numbers = [i for i, word in enumerate(path) if word.isdigit()]
    return path[: numbers[0] + 1] if numbers else path[:1]


def _path(node: fx.Node) -> str:
    """The op's module path, or the op's own name at the root."""
    return annotation(node).module or packet_name(op_of(node)).removeprefix("aten.") or node.name
