"""Readable names for blocks, from the module paths of their heavy ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import fx

from fxpart.pipeline.edit import annotation
from fxpart.pipeline.effects import op_of, packet_name
from fxpart.pipeline.work import is_heavy, work


def block_names(blocks: Sequence[Sequence[fx.Node]]) -> list[str]:
    """One name for each block; a name that would repeat gets a number: "decoder", "decoder#2"."""
    plain = [_name(nodes) for nodes in blocks]
    seen: Counter[str] = Counter()
    result = []
    for name in plain:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result


def _name(nodes: Sequence[fx.Node]) -> str:
    """The module that holds the block's heavy ops, or its children there if they are several."""
    ruling = [n for n in nodes if is_heavy(n)] or [max(nodes, key=work)]
    paths = list(dict.fromkeys(_path(n) for n in ruling))
    if len(paths) == 1:
        return paths[0]
    parts = [p.split(".") for p in paths]
    depth = 0
    while all(len(p) > depth + 1 or (len(p) > depth and depth) for p in parts) and (
        len({p[depth] for p in parts if len(p) > depth}) == 1 and all(len(p) > depth for p in parts)
    ):
        depth += 1
    prefix = ".".join(parts[0][:depth])
    children = list(dict.fromkeys(p[depth] for p in parts if len(p) > depth))
    if _is_container(prefix) or not prefix:
        inner = children[0] if len(children) == 1 else f"{children[0]}..{children[-1]}"
        return f"{prefix}.{inner}" if prefix else inner
    return prefix


def _is_container(path: str) -> bool:
    """Whether a path names a level above layers rather than a layer ("transformer", not "h.3.attn")."""
    return not any(word.isdigit() for word in path.split("."))


def _path(node: fx.Node) -> str:
    """The op's module path, or the op's own name at the root."""
    return annotation(node).module or packet_name(op_of(node)).removeprefix("aten.") or node.name
