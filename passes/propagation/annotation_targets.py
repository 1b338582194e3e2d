"""Resolve annotation keys to values of a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fxpart.annotations.entry_syntax import STATE, AnnotationKey
from fxpart.annotations.graph_values import find_producer, is_item, list_result_tensors
from fxpart.compiler.graph_edit import annotation
from fxpart.compiler.node_annotation import RNG_KEY


@dataclass(frozen=True)
class AnnotationTarget:
    """One tensor of a node (an item belongs to its op), or the op itself with index -1."""

    node: fx.Node
    index: int

    @property
    def tensor(self) -> torch.Tensor:
        """The abstract value of the tensor."""
        return list_result_tensors(self.node)[self.index]


class AnnotationTargets:
    """The names of a graph by kind, looked up by key.

    aliases: other names of parameters and buffers -> the name in the graph, "" if the graph does
    not use it.
    """

    def __init__(self, graph: fx.Graph, aliases: Mapping[str, str]) -> None:
        self._names: dict[str, dict[str, list[AnnotationTarget]]] = {
            kind: {} for kind in (STATE, "input", "node", "module", "op")
        }
        self._graph = graph
        self._modules_known = False
        for node in graph.nodes:
            for kind, name, target in _names(node):
                self._names[kind].setdefault(name, []).append(target)
        state = self._names[STATE]
        for name, main in aliases.items():
            state.setdefault(name, state.get(main, []))

    def of(self, key: AnnotationKey) -> list[AnnotationTarget] | None:
        """Return the targets of a key, each tensor once; None if the key matches nothing."""
        if key.kind == "module" and not self._modules_known:
            self._names["module"] = _module_results(self._graph)
            self._modules_known = True
        names = self._names[key.kind]
        found = key.select(names)
        if not found:
            return None
        return list(dict.fromkeys(target for name in found for target in names[name]))

    def examples(self, kind: str) -> str:
        """Return a few names of the kind, for an error message."""
        if kind == "module" and not self._modules_known:
            self.of(AnnotationKey("module", ""))
        names = list(self._names[kind])
        return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _names(node: fx.Node) -> Iterator[tuple[str, str, AnnotationTarget]]:
    """Yield (kind, name, target) of a node with tensors."""
    if is_item(node):
        if isinstance(node.meta.get("val"), torch.Tensor):
            yield "node", node.name, AnnotationTarget(*find_producer(node))
        return
    given = list_result_tensors(node)
    if node.name == RNG_KEY or not given:
        return
    if node.op == "placeholder":
        yield "input", node.name, AnnotationTarget(node, 0)
    elif node.op == "get_attr":
        yield STATE, str(node.target), AnnotationTarget(node, 0)
    else:
        yield "op", node.name, AnnotationTarget(node, -1)
    if isinstance(node.meta.get("val"), torch.Tensor):
        yield "node", node.name, AnnotationTarget(node, 0)


def _module_results(graph: fx.Graph) -> dict[str, list[AnnotationTarget]]:
    """Map each module path to the tensors computed inside and used outside.

    If some of them require a gradient, only those count: an attention mask computed inside is not a
    result of the module.
    """
    found: dict[str, list[tuple[AnnotationTarget, bool]]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        own = annotation(node)
        left = _left(own.module, [annotation(u).module for u in node.users if not is_item(u)])
        for path in left:
            found.setdefault(path, []).append(
                (AnnotationTarget(*find_producer(node)), own.requires_grad)
            )
    result: dict[str, list[AnnotationTarget]] = {}
    for path, targets in found.items():
        carried = [target for target, carries in targets if carries]
        result[path] = carried or [target for target, _ in targets]
    return result


def _left(module: str, users: list[str]) -> Iterator[str]:
    """Yield the modules around ``module`` that a value leaves because a user is outside."""
    path = module
    while path:
        if any(user != path and not user.startswith(path + ".") for user in users):
            yield path
        path = path.rpartition(".")[0]
